"""Every mistake in a target: exit 78 and one paragraph that names the target, the place and the way out."""

from pathlib import Path

import pytest
from support.runs import TINY, Run, write_target

WITHOUT_TORCH = {
    "no such function": (
        "def build_trainers(config): ...",
        ["has no function build_trainer.", "Did you mean build_trainers?"],
    ),
    "not callable": ("build_trainer = 3", ["build_trainer is an object of type int, and cannot be called"]),
    "wrong signature": (
        "def build_trainer(model, data): ...",
        ["has the signature build_trainer(model, data), but it is called with one argument, the [config] table"],
    ),
    "syntax error": ("\ndef build_trainer(config:\n", ["is no valid Python: train.py:2:"]),
    "missing module": (
        "import a_module_that_is_not_there",
        ["cannot be imported at train.py:1 (<module>)", "No module named 'a_module_that_is_not_there'"],
    ),
    "import fails": ("1 / 0\n", ["cannot be imported at train.py:1 (<module>)", "ZeroDivisionError: division by zero"]),
    "import exits": ("import sys\nsys.exit(3)\n", ["importing", "called sys.exit(3) at train.py:2 (<module>)"]),
    "raises": (
        "def load(p): raise OSError(2, 'Kein\\nAnschluss hier')\n\ndef build_trainer(c): return load(3)\n",
        [
            "failed at train.py:3 (build_trainer) → train.py:1 (load)",
            "FileNotFoundError: [Errno 2] Kein Anschluss hier",
            "{'lr': 0.5}",
        ],
    ),
    "interrupts": (
        "def build_trainer(config): raise KeyboardInterrupt('mine')\n",
        ["failed at train.py:1 (build_trainer)", "KeyboardInterrupt: mine"],
    ),
    "exits": ("import sys\ndef build_trainer(config): sys.exit('done')\n", ["called sys.exit('done')"]),
}


def with_state(expression: str) -> str:
    methods = f"    def state_dict(self): return {expression}\n    def load_state_dict(self, state): ...\n"
    return TINY.replace("class Script(HookBase):\n", f"class Script(HookBase):\n{methods}")


WITH_TORCH = {
    "returns none": ("def build_trainer(config): ...", ["returned None, which is no trainer", "SimpleTrainer"]),
    "is async": ("async def build_trainer(config): ...", ["returned a coroutine (is it an `async def`"]),
    "state that cannot be saved": (with_state("{'f': hold}"), ["The state cannot be saved: hooks.Script.f: function"]),
    "state_dict that raises": (with_state("1 / 0"), ["Script", "division by zero"]),
}


CASES = WITHOUT_TORCH | WITH_TORCH


@pytest.mark.parametrize("case", CASES)
def test_a_bad_target_is_one_paragraph_and_leaves_the_run_as_it_was(tmp_path: Path, case: str) -> None:
    """Exit 78 at the first start: no restart, no traceback, nothing in the run folder but its lock."""
    source, says = CASES[case]
    with Run(write_target(tmp_path, source), tmp_path / "run", lr=0.5) as run:
        assert run.wait() == 78, run.text
    (paragraph,) = [line for line in run.text.splitlines() if says[0] in line]
    assert paragraph.startswith("trainerd: ")
    for part in says:
        assert part in paragraph
    assert "Traceback" not in run.text
    assert len(run.workers) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_file_may_not_take_the_name_of_a_module_in_use(tmp_path: Path) -> None:
    """A target called random.py is refused with the reason, since it would replace Python's own."""
    with Run(write_target(tmp_path, "def build_trainer(config): ...", "random.py"), tmp_path / "run") as run:
        assert run.wait() == 78, run.text
    assert "its name is taken: random is a module of Python or of a library that is in use; rename the file" in run.text


def test_modules_beside_the_target_can_be_imported(tmp_path: Path) -> None:
    """The target's folder is where Python looks first, and the chain of frames goes through its neighbours."""
    (tmp_path / "data_of_mine.py").write_text("def load():\n    raise KeyError('colour')\n")
    source = "import data_of_mine\n\ndef build_trainer(config):\n    return data_of_mine.load()\n"
    with Run(write_target(tmp_path, source), tmp_path / "run") as run:
        assert run.wait() == 78, run.text
    assert "failed at train.py:4 (build_trainer) → data_of_mine.py:2 (load) with KeyError: 'colour'" in run.text
