"""Write a file past the page cache: no dirty pages that stall the machine later, and the training data stay cached.

The kernel then wants whole, aligned blocks: parts are gathered into a few of them, while a thread writes the last one.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

Part = bytes | memoryview

BLOCK_BYTES = 8 * 2**20
_BLOCKS = 3
_ALIGNMENT = 4096


def write_parts(descriptor: int, parts: Iterable[Part]) -> None:
    """Write the parts one after the other from the file's start; 24 MiB of memory, whatever their size."""
    direct = _set_direct(descriptor, on=True)
    with ThreadPoolExecutor(1, thread_name_prefix="trainerd-write") as writer:
        free = deque(memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_BLOCKS))
        writing: deque[tuple[Future[None], memoryview]] = deque()
        offset = 0
        for block, length in _filled(parts, free, writing):
            whole = length - length % _ALIGNMENT if direct else length
            writing.append((writer.submit(_write_at, descriptor, block[:whole], offset), block))
            offset += whole
            if whole < length:
                _drain(writing)
                # The rest of the last block; a file may end anywhere, a direct write may not.
                _set_direct(descriptor, on=False)
                _write_at(descriptor, block[whole:length], offset)
        _drain(writing)


def _filled(
    parts: Iterable[Part], free: deque[memoryview], writing: deque[tuple[Future[None], memoryview]]
) -> Iterator[tuple[memoryview, int]]:
    """Blocks full of the parts' bytes, the last one perhaps not; a block is used again once it has been written."""
    block, length = free.popleft(), 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            taken = rest[: BLOCK_BYTES - length]
            block[length : length + len(taken)] = taken
            length, rest = length + len(taken), rest[len(taken) :]
            if length == BLOCK_BYTES:
                yield block, length
                block, length = _next_free(free, writing), 0
    if length:
        yield block, length


def _next_free(free: deque[memoryview], writing: deque[tuple[Future[None], memoryview]]) -> memoryview:
    if free:
        return free.popleft()
    written, block = writing.popleft()
    written.result()
    return block


def _drain(writing: deque[tuple[Future[None], memoryview]]) -> None:
    while writing:
        writing.popleft()[0].result()


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    # One write takes at most 2 GiB - 4 KiB on Linux and may take less than asked anywhere.
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _set_direct(descriptor: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        # Some file systems have no direct writes; they write through the cache.
        if error.errno != errno.EINVAL:
            raise
        return False
    return on
