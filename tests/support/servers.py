"""Real storage servers on the loopback, each a child process, for whoever asks first; gone when the tests end."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from typing import NamedTuple

import pytest

KINDS = ("local", "memory", "s3", "abfs", "sftp", "gs")
START_SECONDS = 60
# The account that every Azurite has; it is in Azurite's manual.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Place(NamedTuple):
    """Where a run can be kept: its URL and fsspec's options."""

    url: str
    options: dict


class Servers:
    """Starts each server when it is first needed."""

    def __init__(self, folder):
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._roots = {}

    def place(self, kind, name=""):
        """An unused run of a kind of storage; skips the test when its server is not on this machine."""
        if kind not in self._roots:
            self._roots[kind] = getattr(self, f"_start_{kind}")()
        root = self._roots[kind]
        return Place(f"{root.url}/{name or uuid.uuid4().hex}", root.options)

    def close(self):
        """End every server."""
        self._stack.close()

    def _start_local(self):
        return Place(str(self._folder / "local"), {})

    def _start_memory(self):
        return Place("memory://runs", {})

    def _start_s3(self):
        port = free_port()
        self._serve([sys.executable, "-c", MOTO, str(port)], port)
        endpoint = f"http://127.0.0.1:{port}"
        options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"}}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=10).close()
        return Place("s3://bucket", options)

    def _start_abfs(self):
        program = shutil.which("azurite-blob") or shutil.which("azurite-blob", path=os.environ.get("AZURITE_BIN", ""))
        if program is None:
            missing("Azurite (npm install azurite; AZURITE_BIN names its node_modules/.bin)")
        port = free_port()
        folder = self._folder / "azurite"
        command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        self._serve([*command, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], port)
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};BlobEndpoint={endpoint}"
        options = {"connection_string": f"DefaultEndpointsProtocol=http;{account};"}
        import adlfs

        adlfs.AzureBlobFileSystem(**options, skip_instance_cache=True).mkdir("container")
        return Place("abfs://container", options)

    def _start_gs(self):
        port = free_port()
        # It reads environment variables that gcsfs reads too.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port)]
        self._serve([*command, "--in-memory", "--default-bucket", "bucket"], port)
        return Place("gs://bucket", {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "test"})

    def _start_sftp(self):
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
        if program is None:
            missing("sshd (apt install openssh-server)")
        folder = self._folder / "ssh"
        folder.mkdir(mode=0o700)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        port = free_port()
        (folder / "config").write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\nSubsystem sftp internal-sftp\n"
        )
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # where its unprivileged part lives
        self._serve([program, "-D", "-e", "-f", str(folder / "config")], port)
        import getpass

        options = {"username": getpass.getuser(), "key_filename": str(folder / "user"), "look_for_keys": False}
        (self._folder / "sftp").mkdir()
        return Place(f"sftp://127.0.0.1:{port}{self._folder}/sftp", {**options, "allow_agent": False})

    def _serve(self, command, port):
        log = self._stack.enter_context((self._folder / f"server-{port}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._stack.callback(end, process)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.05)
        text = (self._folder / f"server-{port}.log").read_text(errors="replace")
        raise RuntimeError(f"{command[:3]} does not serve port {port}: {text[-2000:]}")


# Not `moto_server`: it would look things up in the network when it starts.
MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
"""


def end(process):
    """End a process that we started, kindly first."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def missing(what):
    """Skip the test; where everything must be there, fail."""
    if os.environ.get("TRAINERD_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{what} is not on this machine")
    pytest.skip(f"{what} is not on this machine")
