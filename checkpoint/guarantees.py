"""What each backend guarantees, as data, so that no caller asks which one it has. docs/storage.md has the table."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Guarantees:
    """What callers may build on. A server is probed before a run is written to it, and held to what it showed."""

    backend: str
    """Its name, for people."""
    exclusive_create: bool
    """Of several processes that create one name, exactly one succeeds."""
    life_lock: bool
    """A lock that the kernel frees when its holder dies tells who owns a run."""
    shared: bool
    """Other processes see what was written."""
    folders: bool
    """Folders exist by themselves, so that a missing one means something."""
    file_bytes: int
    """A data file's elements add up to this at most."""
    parallel: int
    """Transfers worth having in flight at once."""
    read_bytes: int
    """Worth asking for at a time: what a core's cache holds until it is hashed, or what a request should carry."""


LOCAL = Guarantees(
    backend="local disk",
    exclusive_create=True,
    life_lock=True,
    shared=True,
    folders=True,
    file_bytes=512 * MIB,
    parallel=2,
    read_bytes=2 * MIB,
)


def _objects(backend: str) -> Guarantees:
    """An object store. A file is an object is a request: no multipart upload can be left behind, unseen and billed.

    Four of 16 MiB in flight are 64 MiB of memory, whatever the size of the state.
    """
    return Guarantees(
        backend=backend,
        exclusive_create=True,
        life_lock=False,
        shared=True,
        folders=False,
        file_bytes=16 * MIB,
        parallel=4,
        read_bytes=16 * MIB,
    )


S3 = _objects("S3")
GCS = _objects("Google Cloud Storage")
AZURE = _objects("Azure Blob Storage")

SFTP = Guarantees(
    backend="SFTP",
    exclusive_create=True,
    life_lock=False,
    shared=True,
    folders=True,
    file_bytes=16 * MIB,
    parallel=1,
    read_bytes=4 * MIB,
)

MEMORY = Guarantees(
    backend="memory of this process",
    exclusive_create=True,
    life_lock=False,
    shared=False,
    folders=False,
    file_bytes=16 * MIB,
    parallel=1,
    read_bytes=16 * MIB,
)
