"""Stages of a check over several ranks: one that does not end names the ranks that hold it up, then ends the process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from paro_lm.tools.reach import Endpoint, remedies


class StageError(RuntimeError):
    """A stage found something wrong; the message is all that is to be printed."""


class Stages:
    """`with stages.run("connect"): ...` ends the process with a diagnosis when the body takes longer than `timeout` seconds.

    The diagnosis goes through the store, which the ranks reached before anything else: it works when no backend does.
    """

    def __init__(self, store: dist.Store, *, endpoints: Sequence[Endpoint], rank: int, timeout: float, backend: str, master: str) -> None:
        self._store, self._timeout = store, timeout
        self._watch_store: dist.Store = store.clone()  # type: ignore[attr-defined]  # a store serves one thread at a time
        self._endpoints, self._rank, self._backend, self._master = endpoints, rank, backend, master

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Around one stage, on all ranks. Raises StageError for any failure inside."""
        watchdog = threading.Timer(self._timeout, self._expire, (name,))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            raise StageError(f"stage {name} failed on rank {self._rank}: {error}") from error
        finally:
            watchdog.cancel()
        self._store.set(f"done/{name}/{self._rank}", "1")

    def _expire(self, name: str) -> None:
        lines = self.diagnosis(name)
        if self._watch_store.add(f"told/{name}", 1) == 1:
            print("\n".join(lines), file=sys.stderr, flush=True)
        time.sleep(1)  # who tells may still need the store of this process
        os._exit(1)

    def diagnosis(self, name: str) -> list[str]:
        """Which ranks hold the stage up, their interfaces, and the variable to set."""
        missing = [item for item in self._endpoints if not self._watch_store.check([f"done/{name}/{item.rank}"])]
        lines = [f"paro-doctor: stage {name} did not end within {self._timeout:g} s; it did not end on"]
        lines += [f"  {endpoint}" for endpoint in missing]
        return lines + [f"  {remedy}" for remedy in remedies(missing, self._backend, self._master)]
