"""Faults in the file operations of a save: every write, sync, rename, folder and deletion is one numbered operation."""

import builtins
import errno
import os
from contextlib import contextmanager
from unittest import mock


class Faults:
    """Counts the operations that change files; before number `at` (from 1) it calls `action`, which raises or kills.

    A write that is hit has half of its bytes written.
    """

    def __init__(self, at=0, action=None):
        self.at, self.action, self.count = at, action or disk_full, 0

    def hit(self, before=lambda: None):
        self.count += 1
        if self.count == self.at:
            before()
            self.action()

    @contextmanager
    def installed(self):
        real_open = builtins.open

        def opened(file, mode="r", *args, **kwargs):
            if "w" not in mode:
                return real_open(file, mode, *args, **kwargs)
            self.hit()
            return _Stream(real_open(file, mode, *args, **kwargs), self)

        def counted(function):
            def call(*args, **kwargs):
                self.hit()
                return function(*args, **kwargs)

            return call

        names = ("fsync", "replace", "rename", "mkdir", "rmdir", "unlink")
        patches = [mock.patch.object(builtins, "open", opened)]
        patches += [mock.patch.object(os, name, counted(getattr(os, name))) for name in names]
        for patch in patches:
            patch.start()
        try:
            yield self
        finally:
            for patch in patches:
                patch.stop()


class _Stream:
    """A file opened for writing whose writes are counted."""

    def __init__(self, stream, faults):
        self._stream, self._faults = stream, faults

    def write(self, data):
        view = memoryview(data).cast("B")
        self._faults.hit(before=lambda: (self._stream.write(view[: view.nbytes // 2]), self._stream.flush()))
        return self._stream.write(view)

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *error):
        return self._stream.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
