"""The unit file under a real systemd, booted over a throw-away overlay of this machine."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from support.runs import write_target

from trainerd.checkpoint import list_checkpoints, open_storage

ROOT = pathlib.Path(__file__).parents[2]
SANDBOX = ROOT / "tests/support/systemd-sandbox"

SCRIPT = """
set -eu
wait_for() {
  for _ in $(seq 600); do if eval "$1"; then return; fi; sleep 0.1; done
  echo "no $1"; exit 1
}
show() { systemctl show trainerd@job -p "$1" --value; }
mkdir -p /etc/trainerd /etc/systemd/system/trainerd@.service.d
cp $ROOT/systemd/trainerd@.service /etc/systemd/system/
printf '[Service]\\nEnvironment=PATH=%s:/usr/bin:/bin\\n' "$BIN" > /etc/systemd/system/trainerd@.service.d/path.conf
cat > /etc/trainerd/job.toml <<END
target = "$TARGET"
dir = "$RUN"
max_iter = 1000000
[checkpoint]
every = "20 steps"
[config]
sleep = 0.01
END
systemctl daemon-reload

systemctl start trainerd@job
wait_for 'ls $RUN/checkpoints/*/manifest.json >/dev/null 2>&1'
kill -KILL "$(show MainPID)"
wait_for '[ -e $RUN/terms/000002.json ]'
echo "came back: $(show ActiveState)"
systemctl stop trainerd@job
echo "stopped: $(show ActiveState) $(show Result)"

sed -i 's/build_trainer/no_such_function/' /etc/trainerd/job.toml
systemctl start trainerd@job
wait_for '[ "$(show ActiveState)" = failed ]'
echo "bad job: $(show ExecMainStatus), restarts $(show NRestarts)"
"""


def test_systemd_brings_the_daemon_back_stops_it_saved_and_leaves_a_bad_job_alone(tmp_path):
    """SIGKILL of the daemon: resumed in a second term. stop: saved, success. Exit code 78: not restarted."""
    if os.geteuid() != 0 or not shutil.which("systemctl") or not os.path.exists("/lib/systemd/systemd"):
        pytest.skip("booting systemd takes root and systemd")
    settings = {"ROOT": ROOT, "BIN": pathlib.Path(sys.executable).parent, "TARGET": write_target(tmp_path)}
    settings["RUN"] = tmp_path / "run"
    exports = "".join(f"export {name}={value}\n" for name, value in settings.items())
    (tmp_path / "script").write_text(exports + SCRIPT)
    command = ["bash", SANDBOX, "--bind", tmp_path, "--timeout", "200", "--", "bash", tmp_path / "script"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "came back: active",
        "stopped: inactive success",
        "bad job: 78, restarts 0",
    ]
    *_, newest = list_checkpoints(open_storage(str(tmp_path / "run")))
    assert (newest.term, newest.state) == (2, "valid")
