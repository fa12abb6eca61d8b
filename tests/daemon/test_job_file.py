"""Job files and flags: what is accepted, what is refused, and in which words."""

import math
import os

import pytest

from trainerd.daemon.durations import Bytes, Interval, Seconds, Spacing, Steps
from trainerd.daemon.job import CheckpointTable, Job, KeepTable, PreemptionTable, RestartTable
from trainerd.daemon.job_errors import JobError
from trainerd.daemon.job_file import build_job

MINIMAL = 'target = "train.py:build"\ndir = "runs/a"\nmax_iter = 10\n'
FLAGS = {"dir": "d", "max_iter": "5"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a target file in it; the current folder is another one beside it."""
    jobs, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    jobs.mkdir()
    elsewhere.mkdir()
    (jobs / "train.py").touch()
    (elsewhere / "train.py").touch()
    monkeypatch.chdir(elsewhere)
    return jobs


def job_of(folder, text, flags=None, settings=()):
    """The job of a file with this text."""
    path = folder / "job.toml"
    path.write_text(text)
    return build_job(str(path), flags or {}, list(settings))


def refusal(folder, text, flags=None, settings=()):
    """The error that a file with this text meets."""
    with pytest.raises(JobError) as raised:
        job_of(folder, text, flags, settings)
    assert "\n" not in str(raised.value)
    return raised.value


def test_a_minimal_file_gets_every_default(folder):
    """Only target, dir and max_iter must be given."""
    assert job_of(folder, MINIMAL) == Job(
        target=f"{folder}/train.py:build",
        dir=f"{folder}/runs/a",
        max_iter=10,
        folder=str(folder),
        source=str(folder / "job.toml"),
    )


def test_every_key_arrives_where_it_belongs(folder):
    """All tables, all units."""
    text = MINIMAL + (
        '[config]\nlr = 0.1\n[checkpoint]\nevery = "500 steps"\n'
        'keep = { last = 2, every = "6 h", newer_than = "1 h", best = 4, metric = "val/acc", mode = "max", '
        'bytes = "2 GB" }\n'
        '[restart]\nmax_restarts = 0\nbackoff = "2 s"\nbackoff_max = "5 min"\n[preemption]\ngrace = "90 s"\n'
    )
    job = job_of(folder, text)
    assert job.config == {"lr": 0.1}
    assert job.checkpoint == CheckpointTable(
        every=Interval(steps=Steps(500)),
        keep=KeepTable(
            last=2,
            every=Spacing(seconds=Seconds(21600.0)),
            newer_than_seconds=Seconds(3600.0),
            best=4,
            metric="val/acc",
            mode="max",
            bytes=Bytes(2 * 10**9),
        ),
    )
    assert job.restart == RestartTable(max_restarts=0, backoff_seconds=Seconds(2.0), backoff_max_seconds=Seconds(300.0))
    assert job.preemption == PreemptionTable(grace_seconds=Seconds(90.0))


def test_a_file_means_the_same_from_every_folder_and_a_flag_means_the_current_one(folder):
    """Relative paths: the job file's folder for the file, the current folder for flags."""
    assert job_of(folder, MINIMAL).dir == f"{folder}/runs/a"
    assert job_of(folder, MINIMAL, {"dir": "b"}).dir == f"{os.getcwd()}/b"
    job = build_job("train.py:build", FLAGS, [])
    assert (job.target, job.dir) == (f"{os.getcwd()}/train.py:build", f"{os.getcwd()}/d")
    assert (job.folder, job.source) == (os.getcwd(), "command line")


def test_a_run_url_is_left_alone(folder):
    """Only paths are made absolute."""
    assert job_of(folder, MINIMAL, {"dir": "s3://bucket/a"}).dir == "s3://bucket/a"


def test_home_is_the_users(folder, monkeypatch):
    """The shell expands ~ on the command line, nobody does it in a file."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert job_of(folder, MINIMAL.replace("runs/a", "~/runs/a")).dir == "/home/someone/runs/a"


def test_flags_override_the_file_key_by_key(folder):
    """A rule of `keep` that the flag does not name stays as the file has it."""
    text = MINIMAL + '[checkpoint]\nkeep = { last = 2, newer_than = "1 h" }\n[restart]\nbackoff = "2 s"\n'
    flags = {"max_iter": "1_000", "checkpoint.keep": "last=5, every=10000 steps", "restart.backoff_max": "9 s"}
    job = job_of(folder, text, flags)
    assert job.max_iter == 1000
    assert job.checkpoint.keep == KeepTable(
        last=5, every=Spacing(steps=Steps(10000)), newer_than_seconds=Seconds(3600.0)
    )
    assert job.restart == RestartTable(backoff_seconds=Seconds(2.0), backoff_max_seconds=Seconds(9.0))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_itre = 5", "unknown key or table max_itre at the top of the file. Did you mean max_iter?"),
        ("[checkpont]\n", "unknown key or table checkpont at the top of the file. Did you mean checkpoint?"),
        ("[checkpoint]\nevry = 'auto'", "unknown key evry in [checkpoint]. Did you mean every?"),
        ("[checkpoint]\nkeep = { lats = 3 }", "unknown key lats in [checkpoint.keep]. Did you mean last?"),
        ("[restart]\nevery = 'auto'", "unknown key every in [restart]. It belongs into [checkpoint]."),
        ("[restart]\nmax_iter = 5", "unknown key max_iter in [restart]. It belongs into the top of the file"),
        ("[hang]\nfloor = '30 s'", "unknown key or table hang at the top of the file. Known here: target, dir"),
        ("folder = 'x'", "unknown key or table folder"),
    ],
)
def test_an_unknown_key_is_refused_with_where_it_stands_and_what_was_meant(folder, line, says):
    """A typing error must never pass as a default."""
    error = refusal(folder, MINIMAL + line)
    assert f"{folder}/job.toml: {says}" in str(error)
    assert error.exit_code == 78


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_iter = 0", "max_iter = 0: expected a whole number, 1 or more."),
        ('max_iter = "10"', 'max_iter = "10": expected a whole number, 1 or more.'),
        ("max_iter = 1.5", "max_iter = 1.5: expected a whole number"),
        ("max_iter = true", "max_iter = true: expected a whole number"),
        ("dir = 3", "dir = 3: expected a text"),
        ('dir = " "', 'dir = " ": expected a text that is not empty'),
        ("checkpoint = 3", "checkpoint = 3: expected a table, [checkpoint]."),
        ("config = []", "config = []: expected a table, [config]."),
        ("[checkpoint]\nevery = 500", 'checkpoint.every = 500: expected "auto", a number of steps such as "500 steps"'),
        ("[checkpoint]\nevery = '5 m'", 'checkpoint.every = "5 m": expected "auto"'),
        ("[checkpoint]\nkeep = 3", "checkpoint.keep = 3: expected a table"),
        (
            "[checkpoint]\nkeep = { last = 0 }",
            "checkpoint.keep.last = 0: expected a whole number, 1 or more (the new",
        ),
        ("[checkpoint]\nkeep = { last = -1 }", "checkpoint.keep.last = -1: expected a whole number, 1 or more"),
        ("[checkpoint]\nkeep = { last = 'x' }", 'checkpoint.keep.last = "x": expected a whole number, 1 or more'),
        (
            "[checkpoint]\nkeep = { every = 'auto' }",
            'checkpoint.keep.every = "auto": expected a number of steps such as',
        ),
        ("[checkpoint]\nkeep = { every = '0 h' }", 'checkpoint.keep.every = "0 h": expected a number of steps such as'),
        ("[checkpoint]\nkeep = { every = 5 }", "checkpoint.keep.every = 5: expected a number of steps such as"),
        ("[checkpoint]\nkeep = { best = 0 }", "checkpoint.keep.best = 0: expected a whole number, 1 or more."),
        ("[checkpoint]\nkeep = { metric = '' }", 'checkpoint.keep.metric = "": expected a text that is not empty.'),
        (
            "[checkpoint]\nkeep = { mode = 'mim' }",
            'checkpoint.keep.mode = "mim": expected "min" or "max". Did you mean min?',
        ),
        ("[checkpoint]\nkeep = { mode = 1 }", 'checkpoint.keep.mode = 1: expected "min" or "max".'),
        (
            "[checkpoint]\nkeep = { bytes = '200 gb' }",
            'checkpoint.keep.bytes = "200 gb": expected an amount of bytes such as "200 GB"',
        ),
        ("[checkpoint]\nkeep = { bytes = '0 GB' }", 'checkpoint.keep.bytes = "0 GB": expected an amount of bytes'),
        ("[checkpoint]\nkeep = { bytes = 200 }", "checkpoint.keep.bytes = 200: expected an amount of bytes"),
        ("[restart]\nmax_restarts = -1", "restart.max_restarts = -1: expected a whole number, 0 or more."),
        ("[restart]\nbackoff = '-1 s'", 'restart.backoff = "-1 s": expected a duration such as "10 s"'),
        ("[preemption]\ngrace = [1, {a = 2}]", "preemption.grace = [1, { a = 2 }]: expected a duration"),
        ("[config]\nday = 2024-01-01", "config.day = 2024-01-01: dates and times"),
        ("[config.a]\nlist = [{ at = 12:00:00 }]", "config.a.list.at = 12:00:00: dates and times"),
    ],
)
def test_a_bad_value_is_refused_with_file_key_value_and_what_is_allowed(folder, line, says):
    """Whatever the kind of value."""
    base = "\n".join(row for row in MINIMAL.splitlines() if row.split(" =")[0] != line.split(" =")[0])
    error = refusal(folder, f"{base}\n{line}\n")
    assert f"{folder}/job.toml: {says}" in str(error)
    assert error.exit_code == 78


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_iter": "0"}, "--max-iter 0: expected a whole number, 1 or more."),
        ({"max_iter": "1e5"}, "--max-iter 1e5: expected a whole number"),
        ({"dir": ""}, "--dir : expected a text"),
        ({"checkpoint.every": "5"}, '--checkpoint-every 5: expected "auto"'),
        ({"checkpoint.keep": "last=0"}, "--checkpoint-keep last=0: expected a whole number, 1 or more (the newest"),
        ({"checkpoint.keep": "3"}, "--checkpoint-keep 3: expected key=value pairs"),
        ({"checkpoint.keep": "lats=3"}, "--checkpoint-keep lats=3: unknown key 'lats'. Did you mean last?"),
        ({"preemption.grace": "25"}, "--preemption-grace 25: expected a duration"),
    ],
)
def test_a_bad_flag_is_wrong_use_of_the_command_line(folder, flags, says):
    """The same words as for a file's key, and exit code 2."""
    error = refusal(folder, MINIMAL, flags)
    assert says in str(error)
    assert error.exit_code == 2


def test_missing_keys_are_named_with_both_ways_to_give_them(folder):
    """In a file: the key and its flag."""
    error = refusal(folder, 'target = "train.py:build"\nmax_iter = 5\n')
    assert 'the key dir is missing. Add dir = "runs/a", or give --dir.' in str(error)
    assert error.exit_code == 78
    assert "the key target is missing" in str(refusal(folder, "", FLAGS))


def test_without_a_file_missing_flags_are_wrong_use(folder):
    """All of them at once."""
    with pytest.raises(JobError, match="--dir and --max-iter must be given") as raised:
        build_job("train.py:build", {}, [])
    assert raised.value.exit_code == 2


def test_a_key_that_slipped_below_config_is_found_there(folder):
    """TOML's trap: what stands after [config] belongs to it."""
    error = refusal(folder, 'target = "train.py:build"\ndir = "a"\n[config]\nlr = 1\nmax_iter = 5\n')
    assert "There is one inside [config]: move it above the first [table]." in str(error)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = 1\nb =\n", "line 2, column 4"),
        ("a=1\n\n = 3", "line 3, column 2"),
        ("a = [1,\n  2", "line 2, column 4"),
    ],
)
def test_a_toml_error_names_file_line_and_column(folder, text, place):
    """At the end of the file too."""
    error = refusal(folder, text)
    assert f"{folder}/job.toml is no valid TOML" in str(error)
    assert place in str(error)
    assert error.exit_code == 78


def test_a_job_file_that_cannot_be_read_is_named(folder):
    """Missing (with its nearest neighbour), a folder, no text."""
    (folder / "job.toml").write_bytes(b"\xff\xfe")
    (folder / "dir.toml").mkdir()
    for name, says in [("jbo.toml", "does not exist. Did you mean"), ("dir.toml", "directory"), ("job.toml", "UTF-8")]:
        with pytest.raises(JobError, match=says) as raised:
            build_job(str(folder / name), {}, [])
        assert raised.value.exit_code == 78
        assert name in str(raised.value)


def test_a_file_of_a_windows_editor_is_read(folder):
    """Byte order mark and line ends."""
    (folder / "job.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert build_job(str(folder / "job.toml"), {}, []).max_iter == 10


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("x=3e-4", 3e-4),
        ("x=5", 5),
        ("x=true", True),
        ("x=data/books", "data/books"),
        ('x="5"', "5"),
        ("x=[1, 2]", [1, 2]),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=inf", math.inf),
        ("x=2024-01-01", "2024-01-01"),
        ("x=1\ny = 2", "1\ny = 2"),
        ("x=007", "007"),
    ],
)
def test_set_reads_toml_and_takes_the_rest_as_text(folder, setting, value):
    """Numbers, truth values and lists as TOML has them; paths need no quotes."""
    config = job_of(folder, MINIMAL, settings=[setting]).config
    assert config == {"x": value}
    assert type(config["x"]) is type(value)


def test_dotted_settings_make_tables_and_the_last_one_wins(folder):
    """Over the file's [config], which is not changed elsewhere."""
    text = MINIMAL + "[config]\nlr = 1\n[config.model]\nwidth = 2\ndepth = 3\n"
    job = job_of(folder, text, settings=["model.width=5", "model.width=6", "data.path=x", "lr=2"])
    assert job.config == {"lr": 2, "model": {"width": 6, "depth": 3}, "data": {"path": "x"}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["lr"], "--set lr: expected key=value"),
        (["=3"], "--set =3: expected key=value"),
        (["a..b=3"], "expected key=value"),
        (["a=1", "a.b=2"], "'a' is a value, not a table"),
        (["a.b=1", "a=2"], "'a' is a table"),
        (["amp=False"], "write false, as in TOML"),
        (["lr=.001"], "digits on both sides of the point"),
        (["lr=1."], "digits on both sides of the point"),
    ],
)
def test_a_setting_that_would_quietly_mean_something_else_is_refused(folder, settings, says):
    """`False` as a text would be true, `.001` as a text no number."""
    error = refusal(folder, MINIMAL, settings=settings)
    assert says in str(error)
    assert error.exit_code == 2


def test_a_job_reaches_the_worker_unchanged(folder):
    """Infinity, NaN and large numbers of [config] too."""
    text = MINIMAL + '[config]\na = inf\nb = nan\nc = 0.1\nd = 9223372036854775807\ne = "ü"\nf = [[1], {g = -0.0}]\n'
    job = job_of(folder, text, {"checkpoint.every": "7 steps", "checkpoint.keep": "newer_than=1.5 h"})
    there = Job.from_json(job.to_json())
    assert math.isnan(there.config.pop("b"))
    assert math.isnan(job.config.pop("b"))
    assert there == job
    assert math.copysign(1, there.config["f"][1]["g"]) == -1
