"""Targets: the text that names the function which builds the trainer."""

import os
from typing import NamedTuple

from trainerd.daemon.job_errors import JobError, Place
from trainerd.daemon.near_names import near_files

TARGET_FORM = "path/train.py:build_trainer or package.module:build_trainer"


class Target(NamedTuple):
    """Where the function is: in a file (`path`), or in an importable module (`module`); the other one is ""."""

    path: str
    module: str
    function: str


def split_target(text: str) -> Target:
    """The parts of a target; ValueError with the reason if it has not its form."""
    where, colon, function = text.rpartition(":")
    if not colon:
        where = text
        example = text if text.endswith(".py") else "train.py"
        raise ValueError(f"the function is missing. Expected {TARGET_FORM}, for example {example}:build_trainer.")
    if not where or not function:
        missing = "function" if where else "file or module"
        raise ValueError(f"the {missing} is missing beside the colon. Expected {TARGET_FORM}.")
    if not all(part.isidentifier() for part in function.split(".")):
        raise ValueError(f"{function!r} can be no function's name. Expected {TARGET_FORM}.")
    if where.endswith(".py"):
        return Target(where, "", function)
    if not all(part.isidentifier() for part in where.split(".")):
        raise ValueError(
            f"{where!r} is neither a Python file (its name would end in .py) nor a module. Expected {TARGET_FORM}."
        )
    return Target("", where, function)


def resolve_target(text: str, folder: str, place: Place) -> str:
    """The target with its file's absolute path; relative paths start in `folder`. JobError if it cannot be meant."""
    try:
        target = split_target(text)
    except ValueError as error:
        raise place.error(text, str(error)) from None
    if not target.path:
        return text
    path = os.path.normpath(os.path.join(folder, os.path.expanduser(target.path)))
    if not os.path.isfile(path):
        problem = "is a folder, not a file" if os.path.isdir(path) else "does not exist"
        where = f"{place.file}: target = " if place.file else "target "
        raise JobError(f'{where}"{text}": the file {path} {problem}. {near_files(path)}'.rstrip())
    return f"{path}:{target.function}"
