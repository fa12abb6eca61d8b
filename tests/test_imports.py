"""The rooms and their doors: who may import whom, and who may know torch. Walks every import in the source."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = ("checkpoint", "trainer", "daemon")
# daemon -> trainer -> checkpoint; nobody else.
MAY_IMPORT = {"checkpoint": {"checkpoint"}, "trainer": {"trainer", "checkpoint"}, "daemon": set(ROOMS)}
# The writer, the reader and the commands work on a tree and named buffers: only these of the store know torch.
CHECKPOINT_WITH_TORCH = {"codec", "lazy_state", "live_tensors", "numpy_values", "tensor_values", "store"}
# Those of `checkpoint/convert` that build values, or read what other programs wrote.
CONVERT_WITH_TORCH = {
    "dcp_folder",
    "mapping",
    "parts",
    "plain_state",
    "safetensors_file",
    "sources",
    "tensor_difference",
    "torch_export",
    "torch_file",
}
# What runs in the worker process; it may import torch inside its functions, never when it is imported itself.
WORKER_SIDE = {"worker", "worker_session", "attempt", "target"}


def modules():
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield room, path


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "trainerd." + ".".join(part for part in parts if part != "__init__")


def imports(path):
    """(module, at import time?) of every import statement, wherever it stands; type-checking blocks do not run."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in lazy
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if _is_module(full) else node.module), id(node) not in lazy


def _is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_module(name):
    return (
        (ROOT / pathlib.Path(*name.split(".")[1:])).with_suffix(".py").exists()
        if name.startswith("trainerd.")
        else False
    )


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: getattr(value, "stem", None))
def test_no_module_reaches_through_a_wrong_door(room, path):
    """checkpoint knows neither of the others, trainer not the daemon; nobody imports the bare room names."""
    for name, _ in imports(path):
        assert name.split(".")[0] not in ROOMS, f"{path}: import trainerd.{name}, not {name}"
        if name.startswith("trainerd."):
            assert name.split(".")[1] in MAY_IMPORT[room], f"{path} must not import {name}"


def test_only_the_named_modules_of_the_store_know_torch():
    """So that the saver and the reading commands stay light."""
    direct = {
        path.stem
        for room, path in modules()
        if room == "checkpoint" and "torch" in {n.split(".")[0] for n, _ in imports(path)}
    }
    assert direct <= CHECKPOINT_WITH_TORCH | CONVERT_WITH_TORCH


def test_the_daemon_reaches_torch_only_from_inside_the_workers_functions():
    """What bears torch is imported inside functions, and only by modules that run in the worker."""
    bearing = {f"trainerd.checkpoint.{name}" for name in CHECKPOINT_WITH_TORCH} | {"torch"}
    bearing |= {f"trainerd.checkpoint.convert.{name}" for name in CONVERT_WITH_TORCH}
    for room, path in modules():
        if room != "daemon":
            continue
        for name, at_import in imports(path):
            if name in bearing or name.split(".")[0] == "torch":
                assert not at_import, f"{path} imports {name} at import time"
                assert path.stem in WORKER_SIDE, f"{path} is not the worker's side, yet imports {name}"


def test_no_module_of_the_daemon_loads_torch():
    """Proven in a child process, over everything that importing them really pulls in."""
    names = [dotted(path) for room, path in modules() if room == "daemon"]
    names += [
        dotted(path)
        for room, path in modules()
        if room == "checkpoint" and path.stem not in CHECKPOINT_WITH_TORCH | CONVERT_WITH_TORCH
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, name\n"
    done = subprocess.run([sys.executable, "-P", "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_folder_with_modules_is_installed():
    """A package that pyproject.toml forgets works in the clone and is missing in the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({dotted(path.parent / "__init__.py") for _, path in modules()})


def test_modules_stay_small():
    """Question 300 lines, split before 400."""
    long = {str(path.relative_to(ROOT)): n for _, path in modules() if (n := len(path.read_text().splitlines())) >= 400}
    assert not long
