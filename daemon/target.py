"""From a job's target to a trainer, in the worker; whatever is wrong with the target is one paragraph for the user."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainerd.daemon.job import Job
from trainerd.daemon.job_errors import JobError
from trainerd.daemon.near_names import did_you_mean, near_files
from trainerd.daemon.target_names import Target, split_target
from trainerd.daemon.user_frames import at, one_paragraph

if TYPE_CHECKING:
    from trainerd.trainer.base import TrainerBase

_EXAMPLE = "def build_trainer(config): ... return trainer"


def build_trainer(job: Job) -> "TrainerBase":
    """Import the job's target, call it with the job's config, return the trainer. JobError for all that goes wrong."""
    target = _parse(job.target)
    function = _find_function(_import(target, job), target, job.target)
    _check_signature(function, job.target)
    try:
        trainer = function(job.config)
    except SystemExit as error:
        raise JobError(
            f'target "{job.target}" called sys.exit({error.code!r}){at(error)}. Raise an exception instead.'
        ) from None
    except BaseException as error:  # whatever it raises, it is no trainer
        raise JobError(
            f'target "{job.target}" failed{at(error)} with {one_paragraph(error)}. It is called with the [config] '
            f"table: {_shown(job.config)}. `trainerd run --no-daemon` runs it in a single process, for a debugger."
        ) from error
    # Imported late: it brings torch, and most mistakes show before.
    from trainerd.trainer.base import TrainerBase

    if not isinstance(trainer, TrainerBase):
        raise JobError(
            f'target "{job.target}" returned {_kind(trainer)}, which is no trainer. It has to return an instance of '
            f"trainerd.trainer.TrainerBase, such as SimpleTrainer(model, loader, optimizer)."
        )
    return trainer


def _parse(text: str) -> Target:
    try:
        return split_target(text)
    except ValueError as error:
        raise JobError(f'target "{text}": {error}') from None


def _import(target: Target, job: Job) -> ModuleType:
    what = target.path or target.module
    try:
        return _import_file(target.path) if target.path else _import_module(target.module, job.folder)
    except SystemExit as error:
        raise JobError(
            f'target "{job.target}": importing {what} called sys.exit({error.code!r}){at(error)}. Keep what only a '
            f'script does under `if __name__ == "__main__":`.'
        ) from None
    except SyntaxError as error:
        place = f"{os.path.basename(error.filename or what)}:{error.lineno}"
        raise JobError(f'target "{job.target}" is no valid Python: {place}: {error.msg}. Mend that line.') from error
    except ImportError as error:
        raise JobError(
            f'target "{job.target}" cannot be imported{at(error)}: {one_paragraph(error)}. Modules are looked up '
            f"beside the target and in the environment of {sys.executable}: install what is missing there."
        ) from error
    except BaseException as error:
        raise JobError(
            f'target "{job.target}" cannot be imported{at(error)}: it failed with {one_paragraph(error)}.'
        ) from error


def _import_file(path: str) -> ModuleType:
    """Import a file as the module of its stem, as if its folder were the program's."""
    if not os.path.isfile(path):
        raise ImportError(f"the file {path} does not exist. {near_files(path)}".rstrip())
    folder, stem = os.path.dirname(os.path.abspath(path)), os.path.basename(path).removesuffix(".py")
    known = sys.modules.get(stem)
    if known is not None and getattr(known, "__file__", None) != path:
        raise ImportError(
            f"its name is taken: {stem} is a module of Python or of a library that is in use; rename the file"
        )
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as every import does: loader processes and dataclasses look it up by name.
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(stem, None)
        raise
    return module


def _import_module(name: str, folder: str) -> ModuleType:
    sys.path.insert(0, folder or os.getcwd())
    return importlib.import_module(name)


def _find_function(module: ModuleType, target: Target, text: str) -> Callable[..., Any]:
    found: Any = module
    for part in target.function.split("."):
        if not hasattr(found, part):
            known = getattr(found, "__dict__", {})
            names = [name for name, value in known.items() if callable(value) and not name.startswith("_")]
            where = target.path or target.module
            raise JobError(
                f'target "{text}": {where} has no function {target.function}. {did_you_mean(part, names)}'.rstrip()
            )
        found = getattr(found, part)
    if not callable(found):
        raise JobError(
            f'target "{text}": {target.function} is {_kind(found)}, and cannot be called. It has to be a function: '
            f"{_EXAMPLE}"
        )
    function: Callable[..., Any] = found
    return function


def _check_signature(function: Callable[..., Any], text: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: only calling it would tell
        return
    try:
        signature.bind({})
    except TypeError:
        name = text.rpartition(":")[2]
        raise JobError(
            f'target "{text}" has the signature {name}{signature}, but it is called with one argument, the [config] '
            f"table, a dict. Write: {_EXAMPLE}"
        ) from None


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        return f"a {type(value).__name__} (is it an `async def`, or does it contain `yield`?)"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of type {name}"


def _shown(config: dict[str, Any]) -> str:
    text = repr(config)
    return text if len(text) <= 200 else f"{text[:200]}..."
