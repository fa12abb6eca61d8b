"""The real console script in a child process."""

import os
import subprocess
import sys
from pathlib import Path

TRAINERD = str(Path(sys.executable).parent / "trainerd")


def trainerd(*words, cwd=None, environment=None):
    """Run one command line to its end; its exit code and what it printed, as text."""
    return subprocess.run(
        [TRAINERD, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_refused(done, exit_code, *says):
    """Nothing on standard output, one paragraph without a traceback on standard error, and this exit code."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("trainerd: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in says:
        assert part in done.stderr
