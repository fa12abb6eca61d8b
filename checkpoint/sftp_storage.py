"""A run on an SSH server, by SFTP. What is written under a final name there can be seen half, so nothing is: a whole
file gets a temporary name first.
"""

import contextlib
import posixpath
import secrets
import threading
from collections.abc import Callable
from typing import Any

from paramiko.sftp import CMD_EXTENDED

from trainerd.checkpoint.layout import TEMPORARY_SUFFIX
from trainerd.checkpoint.remote_storage import Answer, RemoteStorage

_REQUEST_BYTES = 32 * 1024
_KEEPALIVE_SECONDS = 15


class SftpStorage(RemoteStorage):
    """A run in a folder of an SSH server; one connection, one request at a time."""

    # Paramiko drops the answer to one thread's request when another thread happens to receive it.
    _one_at_a_time: threading.RLock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._one_at_a_time = threading.RLock()

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there."""
        try:
            info = self._ask("look at", path, lambda: self._info(self._full(path)), passing=FileNotFoundError)
        except FileNotFoundError:
            return False
        return bool(info["type"] == "directory")

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents."""
        self._ask("make the folder", folder, lambda: self._fs.makedirs(self._full(folder), exist_ok=True))

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and the files in it; one that is gone already is fine."""
        super().delete_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            self._ask("delete", folder, lambda: self._fs.ftp.rmdir(self._full(folder)), passing=FileNotFoundError)

    def _create(self, full: str, data: bytes) -> None:
        if not self.guarantees.exclusive_create:
            super()._create(full, data)
            return
        with self._temporary(full, data) as temporary:
            try:
                # Plain rename, which OpenSSH does by a hard link: it fails where the name is taken.
                self._fs.ftp.rename(temporary, full)
            except OSError as error:
                found = self._content(full)
                if found is None:
                    raise
                if found != data:
                    raise FileExistsError(full) from error

    def _replace(self, full: str, data: bytes) -> None:
        with self._temporary(full, data) as temporary:
            self._fs.ftp.posix_rename(temporary, full)

    @contextlib.contextmanager
    def _temporary(self, full: str, data: bytes) -> Any:
        temporary = f"{full}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            self._put(temporary, data)
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                self._fs.ftp.remove(temporary)

    def _put(self, full: str, data: bytes) -> None:
        with self._fs.ftp.open(full, "wb") as file:
            file.set_pipelined(True)
            file.write(data)
            self._sync(file)
        if self._fs.ftp.stat(full).st_size != len(data):
            raise OSError(f"{full} is shorter than what was sent")

    def _sync(self, file: Any) -> None:
        """Flush to the server's disk, where the server knows how."""
        file.flush()
        with contextlib.suppress(OSError):
            self._fs.ftp._request(CMD_EXTENDED, "fsync@openssh.com", file.handle)

    def _get(self, full: str, start: int, end: int | None) -> bytes:
        with self._fs.ftp.open(full, "rb") as file:
            size = file.stat().st_size
            end = size if end is None else min(end, size)
            # Asked for all at once: one round trip for each 32 KiB would take for ever.
            pieces = [(at, min(_REQUEST_BYTES, end - at)) for at in range(start, end, _REQUEST_BYTES)]
            return b"".join(file.readv(pieces)) if pieces else b""

    def _remove(self, full: str) -> None:
        self._fs.ftp.remove(full)

    def _list(self, full: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._fs.ls(full, detail=True)
        return [{**info, "name": posixpath.join(full, posixpath.basename(info["name"]))} for info in listed]

    def _connect(self) -> Any:
        wait = self._patience.request_seconds
        self._options = {"timeout": wait, "banner_timeout": wait, "auth_timeout": wait, **self._options}
        filesystem = super()._connect()
        filesystem.ftp.get_channel().settimeout(wait)
        filesystem.client.get_transport().set_keepalive(_KEEPALIVE_SECONDS)
        return filesystem

    def _disconnect(self) -> None:
        with self._lock:
            if self._connected is not None:
                with contextlib.suppress(Exception):
                    self._connected[1].client.close()
            self._connected = None

    def _ask(
        self, action: str, path: str, request: Callable[[], Answer], passing: type[OSError] | None = None
    ) -> Answer:
        with self._one_at_a_time:
            return super()._ask(action, path, request, passing)
