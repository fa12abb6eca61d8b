"""The handful of operations that a run needs from its storage, and which of them a backend guarantees.

Everything above speaks in paths relative to the run URL and in the errors of `trainerd.checkpoint.errors`; only
FileNotFoundError of a read and FileExistsError of a creation pass through, since callers decide by them.
"""

from collections.abc import Iterable
from typing import Protocol

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

    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and the files in it; one that is gone already is fine."""


class UnknownScheme(CheckpointError):
    """A run URL that no backend serves."""

    def __init__(self, url: str, scheme: str) -> None:
        super().__init__(
            f"{url}: run folders on {scheme}:// are not supported yet; this version keeps runs on a local disk. "
            f"Give a folder's path."
        )


def open_storage(url: str) -> Storage:
    """The storage behind a run URL: a local path or file:// URL today. UnknownScheme for others."""
    scheme, separator, rest = url.partition("://")
    from trainerd.checkpoint.local_storage import LocalStorage

    if not separator:
        return LocalStorage(url, url)
    if scheme == "file":
        return LocalStorage(url, rest)
    raise UnknownScheme(url, scheme)
