"""Try out what a server guarantees before a run is written to it: not every one that speaks S3 keeps S3's promises."""

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.guarantees import Guarantees
from trainerd.checkpoint.remote_storage import RemoteStorage
from trainerd.checkpoint.storage import Storage

_RACERS = 4

_logger = logging.getLogger("trainerd.checkpoint")


def probed(storage: Storage) -> Storage:
    """The storage, held from now on to what its server has shown. StorageUnusable if a run cannot be kept there.

    Writes a few small files beside the run's own and deletes them again; a local disk needs no probe.
    """
    if isinstance(storage, RemoteStorage):
        storage.hold_to(probe(storage))
    return storage


def probe(storage: RemoteStorage) -> Guarantees:
    """What the server guarantees, found out by trying. StorageUnusable names what a run cannot do without."""
    folder = f"probe-{secrets.token_hex(8)}"
    storage.make_folder(folder)
    try:
        exclusive = _creates_once(storage, folder)
        _check_reading(storage, folder)
    finally:
        storage.delete_folder(folder)
    _demand(storage, "a listing that shows deletions at once", not storage.names(folder))
    if not exclusive:
        _logger.warning(
            "%s does not refuse to create a name twice, as %s should. One daemon alone is safe there; never start two "
            "on one run at the same time, for nothing would stop the second (docs/storage.md)",
            storage.url,
            storage.guarantees.backend,
        )
    return replace(storage.guarantees, exclusive_create=exclusive)


def _creates_once(storage: RemoteStorage, folder: str) -> bool:
    """Whether, of several that create one name at once and of two one after the other, only the first succeeds."""
    path = f"{folder}/created"

    def create(content: bytes) -> bool:
        try:
            storage.create(path, content)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_RACERS) as pool:
        winners = sum(pool.map(create, [secrets.token_bytes(16) for _ in range(_RACERS)]))
    _demand(storage, "that a file can be created", winners > 0)
    return winners == 1 and not create(secrets.token_bytes(16))


def _check_reading(storage: RemoteStorage, folder: str) -> None:
    path, content = f"{folder}/data", secrets.token_bytes(1000)
    storage.write(path, [content[:400], content[400:]], len(content))
    _demand(storage, "to read what was written", storage.read(path) == content)
    _demand(storage, "to read a part of a file", storage.read(path, 100, 50) == content[100:150])
    _demand(storage, "to tell a file's length", storage.size(path) == len(content))
    _demand(storage, "a listing that shows a new file at once", storage.sizes(folder).get("data") == len(content))
    storage.replace(path, b"replaced")
    _demand(storage, "to read the newer of two contents", storage.read(path) == b"replaced")
    storage.delete(path)
    _demand(storage, "that a deleted file is gone at once", storage.size(path) is None)


def _demand(storage: Storage, what: str, shown: bool) -> None:
    if not shown:
        raise StorageUnusable(
            "keep a run in", storage.url, OSError(f"the server failed a test of what a run needs: {what}")
        )
