"""Tables of the user's own: what a file may put there, and `--set key=value` or `--storage key=value` on top."""

import datetime
import re
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job_errors import JobError, Place

# Python's spellings that TOML has not: taken as texts they would be true, or no number, without a word.
_PYTHON_SPELLINGS = {"True": "true", "False": "false"}
_EXAMPLES = {
    "--set": "--set lr=3e-4 or --set model.width=256",
    "--storage": "--storage anon=true or --storage client_kwargs.region_name=eu-west-1",
}
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


def apply_settings(table: dict[str, Any], settings: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """A copy of `table` with every `key=value` set; dotted keys make tables, the last one wins. JobError otherwise."""

    def refused(setting: str, problem: str) -> JobError:
        return JobError(f"{flag} {setting}: {problem}", ExitCode.WRONG_USAGE)

    result = _copy(table)
    for setting in settings:
        name, equals, text = setting.partition("=")
        *tables, key = path = [part.strip() for part in name.split(".")]
        if not equals or not all(path):
            raise refused(setting, f"expected key=value, for example {_EXAMPLES[flag]}.")
        inner = result
        for part in tables:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise refused(setting, f"{part!r} is a value, not a table, so nothing can be set inside it.")
        if isinstance(inner.get(key), dict):
            raise refused(setting, f"{key!r} is a table; set its keys, for example {flag} {name.strip()}.key=value.")
        inner[key] = _value(setting, text, refused)
    return result


def _value(setting: str, text: str, refused: Callable[[str, str], JobError]) -> Any:
    text = text.strip()
    if text in _PYTHON_SPELLINGS:
        raise refused(setting, f"write {_PYTHON_SPELLINGS[text]}, as in TOML, or '\"{text}\"' if a text is meant.")
    if _BARE_POINT.fullmatch(text):
        raise refused(setting, f"write the number with digits on both sides of the point, or '\"{text}\"' for a text.")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in the text could smuggle further keys in; dates have no way to the target.
    if set(parsed) != {"value"} or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _copy(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}
