"""From a job file, an operand and flags to a Job; flags override the file."""

import os
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import Job
from trainerd.daemon.job_config import apply_settings, check_config
from trainerd.daemon.job_errors import JobError, Place
from trainerd.daemon.job_keys import Key, Table, all_keys, flag_keys, keys_of, read
from trainerd.daemon.near_names import did_you_mean, near_files
from trainerd.daemon.target_names import resolve_target

_EXAMPLES = {"target": 'target = "train.py:build_trainer"', "dir": 'dir = "runs/a"', "max_iter": "max_iter = 10000"}


class Found(NamedTuple):
    """One value, where it stands, and the folder that relative names in it start from."""

    value: Any
    place: Place
    folder: str


def build_job(operand: str, flags: dict[str, str], settings: list[str], storage: Sequence[str] = ()) -> Job:
    """The job of `trainerd run OPERAND`: a job file (`*.toml`) or a target, flags by their dotted key, and the texts of
    `--set` and `--storage`.

    JobError, with exit code 78 for what a file says and 2 for what the command line says.
    """
    here = os.getcwd()
    if operand.endswith(".toml"):
        file = operand
        found = _read_file(operand)
    else:
        file = ""
        found = {"target": Found(operand, Place("target"), here)}
    found.update(_read_flags(flags, here))
    if "target" in found:
        target = found["target"]
        found["target"] = target._replace(value=resolve_target(target.value, target.folder, target.place))
    _require(found, file)

    directory = found["dir"]
    found["dir"] = directory._replace(value=_absolute(directory.value, directory.folder))
    for table, flag, texts in (("config", "--set", settings), ("storage", "--storage", storage)):
        given = found[table].value if table in found else {}
        found[table] = Found(apply_settings(given, texts, flag), Place(table), here)
    source = file or "command line"
    return Job(**_fill(Job, "", found), folder=found["target"].folder, source=source)


def _read_file(path: str) -> dict[str, Found]:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            text = stream.read()
    except FileNotFoundError:
        raise JobError(f"The job file {path} does not exist. {near_files(path)}".rstrip()) from None
    except OSError as error:
        raise JobError(f"The job file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise JobError(f"The job file {path} is no UTF-8 text: byte {error.start} cannot be read.") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        lines = text.splitlines() or [""]
        end = f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
        problem = str(error).replace("at end of document", end)
        raise JobError(f"The job file {path} is no valid TOML: {problem}.") from None
    found: dict[str, Found] = {}
    _collect(raw, Job, "", Place("", path), os.path.dirname(os.path.abspath(path)), found)
    return found


def _read_flags(flags: dict[str, str], folder: str) -> dict[str, Found]:
    found = {}
    for key in flag_keys():
        text = flags.get(key.path)
        if text is None:
            continue
        place = Place(key.flag)
        if not key.is_table:
            found[key.path] = Found(read(key, text, place), place, folder)
            continue
        for inner, value in read_rules(key, text, place).items():
            found[inner.path] = Found(value, place, folder)
    return found


def _collect(
    raw: dict[str, Any], struct: Table, table: str, place: Place, folder: str, found: dict[str, Found]
) -> None:
    known = {key.name: key for key in keys_of(struct, table)}
    for name, value in raw.items():
        key = known.get(name)
        if key is None:
            raise _unknown(name, table, list(known), place.file)
        where = Place(key.path, place.file)
        if (key.is_table or key.kind is dict) and not isinstance(value, dict):
            raise where.error(value, f"expected a table, [{key.path}].")
        if key.is_table:
            _collect(value, key.kind, key.path, where, folder, found)
        elif key.kind is dict:
            check_config(value, where)
            found[key.path] = Found(value, where, folder)
        else:
            found[key.path] = Found(read(key, value, where), where, folder)


def read_rules(table: Key, text: str, place: Place) -> dict[Key, Any]:
    """The keys of a table and their values in a flag's text, `last=3, every=10000 steps`. JobError."""
    known = {inner.name: inner for inner in keys_of(table.kind, table.path)}
    rules = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise place.error(text, "expected key=value pairs with commas between them, for example last=3, best=1.")
        if name not in known:
            raise place.error(text, f"unknown key {name!r}. {did_you_mean(name, known)}")
        rules[known[name]] = read(known[name], value, Place(f"{place.name} {name}="))
    return rules


def _fill(struct: Table, table: str, found: dict[str, Found]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in keys_of(struct, table):
        if key.is_table:
            values[key.attribute] = key.kind(**_fill(key.kind, key.path, found))
        elif key.path in found:
            values[key.attribute] = found[key.path].value
    return values


def _require(found: dict[str, Found], file: str) -> None:
    missing = [name for name in _EXAMPLES if name not in found]
    if missing and not file:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise JobError(
            f"{flags} must be given where there is no job file, for example: "
            f"trainerd run train.py:build_trainer --dir runs/a --max-iter 10000",
            ExitCode.WRONG_USAGE,
        )
    for name in missing:
        example = _EXAMPLES[name]
        flag = "" if name == "target" else f"--{name.replace('_', '-')}"
        hint = f"Add {example}" + (f", or give {flag}." if flag else ".")
        if "config" in found and name in found["config"].value:
            hint = f"There is one inside [config]: move it above the first [table]. {hint}"
        raise JobError(f"{file}: the key {name} is missing. {hint}")


def _unknown(name: str, table: str, known: list[str], file: str) -> JobError:
    where = f"in [{table}]" if table else "at the top of the file"
    elsewhere = [key for key in all_keys() if key.name == name]
    if elsewhere:
        home = f"[{elsewhere[0].table}]" if elsewhere[0].table else "the top of the file, above the first [table]"
        return JobError(f"{file}: unknown key {name} {where}. It belongs into {home}.")
    kind = "key" if table else "key or table"
    return JobError(f"{file}: unknown {kind} {name} {where}. {did_you_mean(name, known)}")


def _absolute(directory: str, folder: str) -> str:
    if "://" in directory:
        return directory
    return os.path.normpath(os.path.join(folder, os.path.expanduser(directory)))
