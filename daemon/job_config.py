"""The [config] table: what a file may put there, and `--set key=value` on top of it."""

import datetime
import re
import tomllib
from typing import Any

from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job_errors import JobError, Place

# Python's spellings that TOML has not: taken as texts they would be true, or no number, without a word.
_PYTHON_SPELLINGS = {"True": "true", "False": "false"}
_BARE_POINT = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")


def check_config(config: dict[str, Any], place: Place) -> None:
    """JobError for a value that cannot go to the worker unchanged: dates and times."""
    for key, value in config.items():
        where = place.inside(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                check_config(item, where)
            elif isinstance(item, datetime.date | datetime.time):
                raise where.error(item, "dates and times cannot be handed to the target; write it in quotes.")


def apply_settings(config: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """A copy of `config` with every `key=value` set; dotted keys make tables, the last one wins. JobError otherwise."""
    result = _copy(config)
    for setting in settings:
        name, equals, text = setting.partition("=")
        *tables, key = path = [part.strip() for part in name.split(".")]
        if not equals or not all(path):
            raise _refused(setting, "expected key=value, for example --set lr=3e-4 or --set model.width=256.")
        table = result
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise _refused(setting, f"{part!r} is a value, not a table, so nothing can be set inside it.")
        if isinstance(table.get(key), dict):
            raise _refused(setting, f"{key!r} is a table; set its keys, for example --set {name.strip()}.key=value.")
        table[key] = _value(setting, text)
    return result


def _value(setting: str, text: str) -> Any:
    text = text.strip()
    if text in _PYTHON_SPELLINGS:
        raise _refused(setting, f"write {_PYTHON_SPELLINGS[text]}, as in TOML, or '\"{text}\"' if a text is meant.")
    if _BARE_POINT.fullmatch(text):
        raise _refused(setting, f"write the number with digits on both sides of the point, or '\"{text}\"' for a text.")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in the text could smuggle further keys in; dates have no way to the target.
    if set(parsed) != {"value"} or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _refused(setting: str, problem: str) -> JobError:
    return JobError(f"--set {setting}: {problem}", ExitCode.WRONG_USAGE)


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}
