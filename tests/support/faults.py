"""Faults, each a thin wrapper over the real thing and named for what goes wrong."""

import contextlib
import errno
import itertools
import os
import time
import traceback

from trainerd.checkpoint.errors import StorageUnusable
from trainerd.checkpoint.patience import Patience
from trainerd.checkpoint.remote_storage import RemoteStorage

CRASHED = 66


class CrashingStorage:
    """The real storage, whose process dies right before or right after its k-th operation (from 1)."""

    def __init__(self, storage, at, *, after):
        self._storage = storage
        self._at = at
        self._after = after
        self._numbers = itertools.count(1)

    def __getattr__(self, name):
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def operation(*args, **kwargs):
            # Several threads call: each has to know its own number, or a point would be missed.
            number = next(self._numbers)
            if number == self._at and not self._after:
                os._exit(CRASHED)
            result = value(*args, **kwargs)
            if number == self._at:
                os._exit(CRASHED)
            return result

        return operation


class CrashingSystem:
    """The `os` module as `durable` sees it; the process dies around its k-th changing call, or half-way in a write."""

    CHANGING = frozenset(
        {"open", "posix_fallocate", "write", "pwrite", "fsync", "link", "replace", "unlink", "mkdir", "rmdir"}
    )

    def __init__(self, at, when):
        self._at = at
        self._when = when
        self.calls = 0

    def __getattr__(self, name):
        value = getattr(os, name)
        if name not in self.CHANGING:
            return value

        def call(*args, **kwargs):
            self.calls += 1
            due = self.calls == self._at
            if due and self._when == "before":
                os._exit(CRASHED)
            if due and self._when == "half" and name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
                os._exit(CRASHED)
            result = value(*args, **kwargs)
            if due and self._when == "after":
                os._exit(CRASHED)
            return result

        return call


def in_child(function):
    """Run a function in a forked child; its exit status is what it returned, CRASHED, or 99 after an exception."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class FaultyStorage:
    """The real storage, whose k-th operation (from 1) goes wrong in one of the ways of FAULTS."""

    FAULTS = ("error raised", "dies before", "dies after", "dies half-way", "answer lost", "slow", "duplicated")

    def __init__(self, storage, at, fault):
        self._storage = storage
        self._at = at
        self._fault = fault
        self.calls = 0

    def __getattr__(self, name):
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def operation(*args, **kwargs):
            self.calls += 1
            if self.calls != self._at:
                return value(*args, **kwargs)
            return self._go_wrong(name, value, args, kwargs)

        return operation

    def _go_wrong(self, name, operation, args, kwargs):
        if self._fault == "error raised":
            raise StorageUnusable("reach", args[0], OSError(errno.EIO, "a fault of the test"))
        if self._fault == "dies before":
            os._exit(CRASHED)
        if self._fault == "dies half-way" and name == "write":
            path, parts, size = args
            whole = b"".join(parts)
            operation(path, [whole[: size // 2]], size // 2)
            os._exit(CRASHED)
        if self._fault == "slow":
            time.sleep(0.05)
        result = operation(*args, **kwargs)
        if self._fault in ("dies after", "dies half-way"):
            os._exit(CRASHED)
        if self._fault == "answer lost":
            raise StorageUnusable("reach", args[0], OSError(errno.ETIMEDOUT, "a fault of the test"))
        if self._fault == "duplicated":
            with contextlib.suppress(FileExistsError):
                return operation(*args, **kwargs)
        return result


class FaultyRequests(RemoteStorage):
    """A real server's storage, whose k-th request (from 1) goes wrong in one of the ways of FAULTS."""

    FAULTS = ("refused", "answer lost", "duplicated", "late")

    def __init__(self, url, options, guarantees, *, at, fault):
        super().__init__(url, options, guarantees, Patience(first_wait_seconds=0.01, longest_wait_seconds=0.02))
        self._at = at
        self._fault = fault
        self._late = None
        self.requests = 0

    def _call(self, method, *args, **kwargs):
        self.requests += 1
        if self._late is not None:
            # What had been given up arrives after all, when its sender has already tried again.
            late, self._late = self._late, None
            answer = super()._call(method, *args, **kwargs)
            with contextlib.suppress(Exception):
                super()._call(*late[0], **late[1])
            return answer
        if self.requests != self._at:
            return super()._call(method, *args, **kwargs)
        if self._fault == "late":
            self._late = ((method, *args), kwargs)
        elif self._fault != "refused":
            answer = super()._call(method, *args, **kwargs)
            if self._fault == "duplicated":
                return super()._call(method, *args, **kwargs)
        raise ConnectionResetError(errno.ECONNRESET, "a fault of the test")
