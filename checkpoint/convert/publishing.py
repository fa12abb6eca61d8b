"""A file or folder of the user's that appears whole, under its name, or not at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from trainerd.checkpoint import durable
from trainerd.checkpoint.convert.errors import NotConverted
from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.layout import TEMPORARY_SUFFIX

DCP_METADATA = ".metadata"


@contextmanager
def appearing(path: str, *, force: bool) -> Iterator[str]:
    """Give a free name beside `path`; what the block makes there gets the name `path` once it is flushed to the disk.

    If the block fails nothing is left. NotConverted if `path` is taken and `force` is not set, or if what is there
    must not be replaced; StorageUnusable.
    """
    _refuse_taken(path, force=force)
    temporary = f"{os.path.abspath(path)}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        os.listdir(os.path.dirname(temporary))  # libraries have no errno for a folder that is missing
        yield temporary
        _sync(temporary)
        _refuse_taken(path, force=force)
        _appear(temporary, path, force=force)
        durable.sync_folder(os.path.dirname(temporary))
    except OSError as error:
        raise StorageUnusable("write", path, error) from error
    finally:
        _remove(temporary)


def _refuse_taken(path: str, *, force: bool) -> None:
    if not os.path.lexists(path):
        return
    if not force:
        raise NotConverted(f"{path} exists already; it was left as it is. Give another name, or replace it: --force.")
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, DCP_METADATA)):
        raise NotConverted(f"{path} is a folder, and none that an export has made; it was left as it is.")


def _sync(path: str) -> None:
    if not os.path.isdir(path):
        _sync_file(path)
        return
    for name in os.listdir(path):
        _sync_file(os.path.join(path, name))
    durable.sync_folder(path)


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _appear(temporary: str, path: str, *, force: bool) -> None:
    if os.path.isdir(path) or (os.path.isdir(temporary) and os.path.lexists(path)):
        # A folder is not replaced in one step: put the old one aside, so that a crash in between loses neither.
        aside = f"{temporary}.old"
        os.rename(path, aside)
        os.rename(temporary, path)
        _remove(aside)
    elif force or os.path.isdir(temporary):
        os.rename(temporary, path)
    else:
        try:
            os.link(temporary, path)  # unlike a rename it fails if somebody has taken the name meanwhile
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}:
                raise
            os.rename(temporary, path)  # a file system without hard links


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
