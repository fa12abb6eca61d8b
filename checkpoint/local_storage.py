"""A run in a folder of a local disk."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from trainerd.checkpoint import durable
from trainerd.checkpoint.direct_io import Part
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.guarantees import LOCAL, Guarantees


class LocalStorage:
    """A run in a folder of a local disk, through `durable`."""

    def __init__(self, url: str, root: str) -> None:
        self._url = url
        self.root = os.path.abspath(os.path.expanduser(root))

    @property
    def url(self) -> str:
        """The run URL, as the user wrote it."""
        return self._url

    @property
    def guarantees(self) -> Guarantees:
        """What callers may build on."""
        return LOCAL

    def create(self, path: str, data: bytes) -> None:
        """Make a whole file appear under a free name, atomically; FileExistsError if the name is taken."""
        with self._errors("write", path, passing=(FileExistsError,)) as full:
            durable.create(full, data)

    def replace(self, path: str, data: bytes) -> None:
        """Make a whole file appear in place of what was there."""
        with self._errors("write", path) as full:
            durable.replace(full, data)

    def write(self, path: str, parts: Iterable[Part], size: int) -> None:
        """Write a new data file of `size` bytes. Its name is durable once the folder's manifest is created."""
        with self._errors("write", path, passing=(FileExistsError,)) as full:
            durable.write_new(full, parts, size)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read bytes of a file; fewer than asked when it is shorter."""
        with self._errors("read", path, passing=(FileNotFoundError,)) as full, _opened(full) as file:
            if length is None:
                file.seek(offset)
                return file.read()
            parts = []
            while length > 0 and (part := os.pread(file.fileno(), length, offset)):
                parts.append(part)
                offset += len(part)
                length -= len(part)
            return b"".join(parts)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a file; return the bytes read, fewer when the file is shorter."""
        with self._errors("read", path, passing=(FileNotFoundError,)) as full, _opened(full) as file:
            done = 0
            while done < len(buffer) and (n := os.preadv(file.fileno(), [buffer[done:]], offset + done)):
                done += n
            return done

    def size(self, path: str) -> int | None:
        """Length of a file in bytes; None if it is not there."""
        with self._errors("look at", path) as full:
            try:
                found = os.stat(full)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there."""
        with self._errors("look at", path) as full:
            return os.path.isdir(full)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if it is not there."""
        with self._errors("list", folder) as full:
            try:
                return sorted(os.listdir(full))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Length in bytes of each file in a folder; none if it is not there."""
        with self._errors("list", folder) as full:
            sizes = {}
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(full) as entries:
                for entry in entries:
                    # One that goes while we look must not hide the others.
                    with suppress(FileNotFoundError):
                        if entry.is_file():
                            sizes[entry.name] = entry.stat().st_size
            return sizes

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents; "" is the run itself."""
        with self._errors("make the folder", folder) as full:
            durable.make_folder(full)

    def move(self, path: str, to: str) -> None:
        """Give a file another name, in a folder that is there."""
        with self._errors("move", path) as full:
            durable.move(full, os.path.join(self.root, to))

    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""
        with self._errors("delete", path) as full:
            durable.delete(full)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and the files in it; one that is gone already is fine."""
        with self._errors("delete", folder) as full:
            durable.delete_folder(full)

    @contextmanager
    def _errors(self, action: str, path: str, passing: tuple[type[OSError], ...] = ()) -> Iterator[str]:
        full = os.path.join(self.root, path) if path else self.root
        try:
            yield full
        except passing:
            raise
        except OSError as error:
            raise StorageUnusable(action, full, error) from error


@contextmanager
def _opened(full: str) -> Iterator[FileIO]:
    """A regular file. Anything else of its name is no file of ours: a pipe would be waited for, perhaps for ever."""
    with open(full, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file", full)
        yield file
