"""Faults, each a thin wrapper over the real thing and named for what goes wrong."""

import os
import traceback

CRASHED = 66


class CrashingStorage:
    """The real storage, whose process dies right before or right after its k-th operation (from 1)."""

    def __init__(self, storage, at, *, after):
        self._storage = storage
        self._at = at
        self._after = after
        self.calls = 0

    def __getattr__(self, name):
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def operation(*args, **kwargs):
            self.calls += 1
            if self.calls == self._at and not self._after:
                os._exit(CRASHED)
            result = value(*args, **kwargs)
            if self.calls == self._at:
                os._exit(CRASHED)
            return result

        return operation


class CrashingSystem:
    """The `os` module as `durable` sees it; the process dies around its k-th changing call, or half-way in a write."""

    CHANGING = frozenset({"open", "posix_fallocate", "write", "fsync", "link", "replace", "unlink", "mkdir", "rmdir"})

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
