"""The only place that writes, links, renames, syncs and deletes on a local disk.

Must: a file is whole on the disk before a name that commits it appears; a name that appeared is on the disk before
the caller goes on. Not guaranteed: disks that acknowledge a flush they did not do; file systems without hard links.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterable

from trainerd.checkpoint.direct_io import BLOCK_BYTES, Part, write_parts
from trainerd.checkpoint.layout import TEMPORARY_SUFFIX


def write_new(path: str, parts: Iterable[Part], size: int) -> None:
    """Write a file of `size` bytes that does not exist yet and flush it to the disk. FileExistsError if it does.

    The name itself is durable only after `sync_folder`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _reserve(descriptor, size)
        if size > BLOCK_BYTES:
            write_parts(descriptor, parts)
        else:
            _write_all(descriptor, b"".join(parts))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: str, data: bytes) -> None:
    """Make a whole file appear under a free name, durably, or raise FileExistsError and change nothing."""
    _publish(path, data, _link)


def replace(path: str, data: bytes) -> None:
    """Make a whole file appear under a name, durably, in place of what was there."""
    _publish(path, data, os.replace)


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: str) -> None:
    """Make a folder and its parents, durably; one that exists is fine."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path) or "."
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
        sync_folder(os.path.dirname(folder) or ".")


def move(path: str, to: str) -> None:
    """Give a file a free name, durably. FileExistsError; a crash may leave it under both names, never under none."""
    os.link(path, to)
    sync_folder(os.path.dirname(to) or ".")
    delete(path)


def delete(path: str) -> None:
    """Delete a file, durably; one that is gone already is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(path) or ".")


def delete_folder(path: str) -> None:
    """Delete a folder and the files in it, durably; one that is gone already is fine."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        os.unlink(f"{path}/{name}")
    os.rmdir(path)
    sync_folder(os.path.dirname(path) or ".")


def _publish(path: str, data: bytes, appear: Callable[[str, str], None]) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        write_new(temporary, [data], len(data))
        appear(temporary, path)
    finally:
        # After a replace the temporary name is gone; after a link, or a failure, it must go.
        if os.path.lexists(temporary):
            os.unlink(temporary)
    sync_folder(os.path.dirname(path) or ".")


def _link(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        # EPERM is what Linux says where there are no hard links (FAT, some network file systems); the file is our own.
        if error.errno in {errno.EPERM, errno.ENOSYS}:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path) from error
        raise


def _reserve(descriptor: int, size: int) -> None:
    """Take the space before the first byte, so that a full disk is known at once and not half-way."""
    if not size:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Some file systems (FUSE, old NFS) cannot reserve: they tell when they are full.
        if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}:
            raise


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
