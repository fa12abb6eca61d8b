"""The documents against the code, so that they cannot drift apart."""

import re
import typing
from pathlib import Path

from trainerd.daemon import durations
from trainerd.daemon.durations import Bytes, BytesPerHour, Interval, Seconds, Spacing, Steps
from trainerd.daemon.exit_codes import ExitCode
from trainerd.daemon.job import CheckpointTable, Job, KeepTable
from trainerd.daemon.job_file import build_job
from trainerd.daemon.job_keys import all_keys, flag_keys
from trainerd.trainer.mismatch import OnMismatch

DOCS = Path(__file__).parents[2] / "docs"


def table_rows(document, heading):
    """The cells of the first table below a heading, without its head."""
    text = (DOCS / document).read_text().split(f"\n## {heading}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_key_table_lists_every_key_with_flag_default_and_meaning():
    """In the order of the structs."""
    values = {str: ("path", "target", "scalar"), int: ("whole number",), dict: ("table",), Bytes: ("bytes",)}
    values |= {BytesPerHour: ("bytes per hour",)}
    values |= {
        Seconds: ("duration",),
        Interval: ("interval",),
        OnMismatch: ("action",),
        Spacing: ("steps or duration",),
    }
    values |= {typing.Literal["min", "max"]: ('`"min"` or `"max"`',)}
    flags = {key.path: f"`{key.flag}`" for key in flag_keys()}
    flags |= {"target": "JOB", "config": "`--set key=value`", "storage": "`--storage key=value`"}
    rows = table_rows("job-file.md", "Keys")
    keys = [key for key in all_keys() if not key.is_table or key.path in flags]
    assert [row[0] for row in rows] == [f"`{key.path}`" for key in keys]
    for key, (_, flag, value, default, meaning) in zip(keys, rows, strict=True):
        assert flag == flags.get(key.path, "in `--checkpoint-keep`")
        assert value.startswith(("table",) if key.is_table else values[key.kind])
        assert (f", {key.least} or more" in value) == (key.least is not None)
        optional = "empty" if key.kind is dict else "none"
        required = key.path in ("target", "dir", "max_iter")
        assert default == ("must be given" if required else f"`{key.default_text}`" if key.default_text else optional)
        assert key.help.startswith(meaning)


def test_the_example_file_is_a_job_of_defaults(tmp_path):
    """What it says beyond the defaults: [config], and more rules of keep."""
    example = re.search(r"```toml\n(.*?)```", (DOCS / "job-file.md").read_text(), re.DOTALL)[1]
    (tmp_path / "job.toml").write_text(example)
    (tmp_path / "train.py").touch()
    every, budget = Spacing(steps=Steps(10000)), Bytes(200 * 10**9)
    keep = KeepTable(every=every, newer_than_seconds=Seconds(3600.0), best=1, bytes=budget)
    assert build_job(str(tmp_path / "job.toml"), {}, []) == Job(
        target=f"{tmp_path}/train.py:build_trainer",
        dir=f"{tmp_path}/runs/a",
        max_iter=10_000,
        config={"lr": 3e-4, "model": {"width": 256, "layers": 4}},
        checkpoint=CheckpointTable(keep=keep),
        folder=str(tmp_path),
        source=str(tmp_path / "job.toml"),
    )
    for key in all_keys():
        assert key.is_table or re.search(rf"\b{key.name} =|\[{key.name}\]", example), key.path


def test_the_values_of_the_table_are_readable():
    """Every duration and interval that the document shows."""
    rows = dict(table_rows("job-file.md", "Values"))
    for text in re.findall(r'`"(.+?)"`', rows["duration"]):
        durations.parse_duration(text)
    for text in re.findall(r'`"(.+?)"`', rows["steps"] + rows["interval"]):
        durations.parse_interval(text)
    for text in re.findall(r'`"(.+?)"`', rows["bytes"]):
        durations.parse_bytes(text)


def test_the_table_of_exit_codes_is_the_code():
    """Number, meaning and advice, in order."""
    rows = table_rows("commands.md", "Exit codes")
    assert rows == [[str(int(code)), code.meaning, code.restart] for code in ExitCode]
