"""A run on an fsspec filesystem: object stores, and the memory of this process. `sftp_storage` adds what SFTP needs.

Nothing here uses fsspec's `mv`, transactions, listing caches or open files: their guarantees differ from ours.
"""

import contextlib
import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import sync

from trainerd.checkpoint.direct_io import Part
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.guarantees import Guarantees
from trainerd.checkpoint.patience import Patience

Answer = TypeVar("Answer")


_ONE_PROCESS = threading.Lock()


class RemoteStorage:
    """A run below a URL. Data files are sent whole in one request each, so that a failed one can be sent again."""

    def __init__(
        self, url: str, options: Mapping[str, Any], guarantees: Guarantees, patience: Patience | None = None
    ) -> None:
        self._url = url
        self._options = dict(options)
        self._guarantees = guarantees
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._connected: tuple[int, Any] | None = None
        self.root = ""

    @property
    def url(self) -> str:
        """The run URL, as the user wrote it."""
        return self._url

    @property
    def guarantees(self) -> Guarantees:
        """What callers may build on."""
        return self._guarantees

    def hold_to(self, guarantees: Guarantees) -> None:
        """From now on count on what the server has shown."""
        self._guarantees = guarantees

    def create(self, path: str, data: bytes) -> None:
        """Make a whole file appear under a free name, atomically; FileExistsError if the name is taken."""
        self._ask("write", path, lambda: self._create(self._full(path), data), passing=FileExistsError)

    def replace(self, path: str, data: bytes) -> None:
        """Make a whole file appear in place of what was there."""
        self._ask("write", path, lambda: self._replace(self._full(path), data))

    def write(self, path: str, parts: Iterable[Part], size: int) -> None:
        """Write a new data file of `size` bytes."""
        data = b"".join(parts)
        assert len(data) == size
        self._ask("write", path, lambda: self._put(self._full(path), data))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read bytes of a file; fewer than asked when it is shorter."""
        end = None if length is None else offset + length
        return self._ask("read", path, lambda: self._get(self._full(path), offset, end), passing=FileNotFoundError)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a file; return the bytes read, fewer when the file is shorter."""
        data = self.read(path, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size(self, path: str) -> int | None:
        """Length of a file in bytes; None if it is not there."""
        try:
            info = self._ask("look at", path, lambda: self._info(self._full(path)), passing=FileNotFoundError)
        except FileNotFoundError:
            return None
        return info["size"] if info["type"] == "file" else None

    def is_folder(self, path: str) -> bool:  # noqa: ARG002
        """Whether a folder is there; where folders are only parts of names, any may be said to be."""
        return True

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if it is not there."""
        return sorted(name for name, _ in self._entries(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Length in bytes of each file in a folder; none if it is not there."""
        return {name: info["size"] for name, info in self._entries(folder) if info["type"] == "file"}

    def make_folder(self, folder: str) -> None:
        """Nothing: where there are no folders, none need be made."""

    def move(self, path: str, to: str) -> None:
        """Give a file another name: by a copy, which is read back before the original goes."""
        data = self.read(path)
        self.create(to, data)
        if self.read(to) != data:
            raise StorageUnusable("move", f"{self._url}/{path}", OSError("the copy is not what was copied"))
        self.delete(path)

    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("delete", path, lambda: self._remove(self._full(path)), passing=FileNotFoundError)

    def delete_folder(self, folder: str) -> None:
        """Delete the files of a folder, and the folder; one that is gone already is fine."""
        with ThreadPoolExecutor(self.guarantees.parallel, thread_name_prefix="trainerd-delete") as pool:
            for done in [pool.submit(self.delete, f"{folder}/{name}") for name in self.sizes(folder)]:
                done.result()

    # What a request is made of; each may be made again.

    def _create(self, full: str, data: bytes) -> None:
        try:
            if self.guarantees.exclusive_create:
                self._call("pipe_file", full, data, carried=len(data), mode="create")
            else:
                self._create_by_looking(full, data)
        except Exception as error:
            # The answer to an earlier try, ours or the library's own, may have been lost: what is there decides.
            found = self._content(full)
            if found == data:
                return
            if found is not None:
                raise FileExistsError(full) from error
            raise

    def _create_by_looking(self, full: str, data: bytes) -> None:
        """The best that a server allows which knows no conditional create: the last of two that race has it."""
        if self._content(full) is not None:
            raise FileExistsError(full)
        self._put(full, data)
        if self._content(full) != data:
            raise FileExistsError(full)

    def _content(self, full: str) -> bytes | None:
        try:
            return self._get(full, 0, None)
        except FileNotFoundError:
            return None

    def _replace(self, full: str, data: bytes) -> None:
        self._put(full, data)

    def _put(self, full: str, data: bytes) -> None:
        self._call("pipe_file", full, data, carried=len(data))

    def _get(self, full: str, start: int, end: int | None) -> bytes:
        if start == 0 and end is None:
            return bytes(self._call("cat_file", full))
        try:
            return bytes(self._call("cat_file", full, carried=(end or 0) - start, start=start, end=end))
        except FileNotFoundError:
            raise
        except Exception:
            # Servers refuse a range that begins beyond the end.
            if start >= self._info(full)["size"]:
                return b""
            raise

    def _info(self, full: str) -> dict[str, Any]:
        info: dict[str, Any] = self._call("info", full)
        return info

    def _remove(self, full: str) -> None:
        self._call("rm_file", full)

    def _list(self, full: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._call("ls", full, detail=True, **self._fresh)
        return listed

    @property
    def _fresh(self) -> dict[str, bool]:
        return {"refresh": True} if self._fs.async_impl else {}

    def _entries(self, folder: str) -> list[tuple[str, dict[str, Any]]]:
        full = self._full(folder)
        try:
            listed = self._ask("list", folder, lambda: self._list(full), passing=FileNotFoundError)
        except FileNotFoundError:
            return []
        # A file of the folder's own name, or the mark that some tools leave for an empty folder, is not in it.
        below = [(info["name"].strip("/"), info) for info in listed]
        return [(posixpath.basename(name), info) for name, info in below if name != full.strip("/")]

    # The way to the server.

    def _full(self, path: str) -> str:
        self._fs  # noqa: B018 # connecting tells what the root is
        return f"{self.root}/{path}" if path else self.root

    @property
    def _fs(self) -> Any:
        """The filesystem of this process: its connections and its event loop must not cross a fork."""
        with self._lock:
            if self._connected is None or self._connected[0] != os.getpid():
                self._connected = (os.getpid(), self._connect())
            return self._connected[1]

    def _connect(self) -> Any:
        filesystem, root = fsspec.url_to_fs(self._url, **{"skip_instance_cache": True, **self._options})
        filesystem.dircache.use_listings_cache = False
        self.root = root.rstrip("/")
        return filesystem

    def _disconnect(self) -> None:
        """After a failure: a filesystem with one connection of its own needs another one."""

    def _call(self, method: str, *args: Any, carried: int = 0, **kwargs: Any) -> Any:
        filesystem = self._fs
        if not filesystem.async_impl:
            return getattr(filesystem, method)(*args, **kwargs)
        deadline = self._patience.deadline(carried)
        return sync(filesystem.loop, getattr(filesystem, f"_{method}"), *args, timeout=deadline, **kwargs)

    def _ask(
        self, action: str, path: str, request: Callable[[], Answer], passing: type[OSError] | None = None
    ) -> Answer:
        place = f"{self._url.rstrip('/')}/{path}" if path else self._url
        try:
            return self._patience.call(f"Cannot {action} {place}", request, self._disconnect)
        except Exception as error:
            if passing is not None and isinstance(error, passing):
                raise
            raise StorageUnusable(action, place, error) from error


class MemoryStorage(RemoteStorage):
    """A run in the memory of this process, for programs and tests that keep nothing."""

    def _create(self, full: str, data: bytes) -> None:
        # fsspec looks first and writes then.
        with _ONE_PROCESS:
            super()._create(full, data)
