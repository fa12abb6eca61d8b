"""The handful of operations that a run needs from its storage, and which of them a backend guarantees.

Everything above speaks in paths relative to the run URL and in the errors of `trainerd.checkpoint.errors`; only
FileNotFoundError of a read and FileExistsError of a creation pass through, since callers decide by them.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from trainerd.checkpoint import guarantees
from trainerd.checkpoint.direct_io import Part
from trainerd.checkpoint.errors import CheckpointError
from trainerd.checkpoint.guarantees import Guarantees


class Storage(Protocol):
    """Where one run lives. Every call that returns has taken effect durably."""

    @property
    def url(self) -> str:
        """The run URL, as the user wrote it."""

    @property
    def guarantees(self) -> Guarantees:
        """What callers may build on."""

    def create(self, path: str, data: bytes) -> None:
        """Make a whole file appear under a free name, atomically; FileExistsError if the name is taken."""

    def replace(self, path: str, data: bytes) -> None:
        """Make a whole file appear in place of what was there. For advisory records: nothing orders two of these."""

    def write(self, path: str, parts: Iterable[Part], size: int) -> None:
        """Write a new data file of `size` bytes, which means nothing until a manifest names it."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read bytes of a file; fewer than asked when it is shorter. FileNotFoundError if it is not there."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a file; return the bytes read, fewer when the file is shorter."""

    def size(self, path: str) -> int | None:
        """Length of a file in bytes; None if it is not there."""

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if it is not there."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Length in bytes of each file in a folder, in one look; none if it is not there."""

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents; "" is the run itself."""

    def move(self, path: str, to: str) -> None:
        """Give a file another name, in a folder that is there; a name that is taken is an error."""

    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and the files in it; one that is gone already is fine."""


class UnknownScheme(CheckpointError):
    """A run URL that no backend serves."""

    def __init__(self, url: str, scheme: str) -> None:
        known = ", ".join(f"{name}://" for name in _BACKENDS)
        super().__init__(
            f"{url}: there is no storage for {scheme}://. Runs are kept in local folders and on {known} "
            f"(docs/storage.md)."
        )


class IncompleteURL(CheckpointError):
    """A run URL that ends before it names a place."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url} names no place: give a bucket, container or host and a path, as in s3://bucket/runs/a "
            f"(docs/storage.md)."
        )


class MissingPackage(CheckpointError):
    """The package that talks to a backend is not installed."""

    def __init__(self, url: str, extra: str, cause: ImportError) -> None:
        super().__init__(
            f"{url} needs a package that is not installed ({cause}). `pip install 'trainerd[{extra}]'` brings it."
        )


class _Backend(NamedTuple):
    module: str  # imported to see whether its package is there
    extra: str
    guarantees: Guarantees


_BACKENDS = {
    "s3": _Backend("s3fs", "s3", guarantees.S3),
    "gs": _Backend("gcsfs", "gcs", guarantees.GCS),
    "abfs": _Backend("adlfs", "azure", guarantees.AZURE),
    "sftp": _Backend("paramiko", "sftp", guarantees.SFTP),
    "memory": _Backend("fsspec", "s3", guarantees.MEMORY),
}
_OTHER_NAMES = {"gcs": "gs", "abfss": "abfs", "az": "abfs", "ssh": "sftp", "s3a": "s3"}


def open_storage(url: str, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage behind a run URL; nothing is reached or written yet. UnknownScheme, MissingPackage.

    `options` are those of the fsspec filesystem, as docs/storage.md shows for each.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        from trainerd.checkpoint.local_storage import LocalStorage

        return LocalStorage(url, rest if separator else url)
    backend = _BACKENDS.get(_OTHER_NAMES.get(scheme, scheme))
    if backend is None:
        raise UnknownScheme(url, scheme)
    if not rest.strip("/"):
        raise IncompleteURL(url)
    try:
        import_module(backend.module)
    except ImportError as error:
        raise MissingPackage(url, backend.extra, error) from error
    storage: Storage = _remote(backend)(url, options or {}, backend.guarantees)
    return storage


def _remote(backend: _Backend) -> Any:
    if backend.guarantees is guarantees.SFTP:
        from trainerd.checkpoint.sftp_storage import SftpStorage

        return SftpStorage
    from trainerd.checkpoint.remote_storage import MemoryStorage, RemoteStorage

    return RemoteStorage if backend.guarantees.shared else MemoryStorage
