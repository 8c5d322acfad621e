"""First-in-first-out queues that carry collectives beside computation: a thread on CPU, a stream on CUDA."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Handle(Protocol):
    def wait(self) -> None:
        """Make what the job wrote visible to the caller; raises what the job raised."""


class CommunicationQueue(Protocol):
    def submit(self, job: Callable[[], None]) -> Handle:
        """Run `job` after all earlier jobs of this queue; it sees everything the caller computed so far."""

    def close(self) -> None:
        """Finish what was submitted and release threads."""


class _Done:
    def wait(self) -> None:
        pass


class InlineQueue:
    """Runs each job at once, in the caller: no overlap, the same numbers."""

    def submit(self, job: Callable[[], None]) -> Handle:
        job()
        return _Done()

    def close(self) -> None:
        pass


class _ThreadHandle:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadQueue:
    """One daemon thread. Gloo releases the interpreter lock while it waits, so the caller computes meanwhile."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], _ThreadHandle] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Handle:
        handle = _ThreadHandle()
        self._jobs.put((job, handle))
        return handle

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, handle = item
            if self._failure is None:
                try:
                    with torch.no_grad():
                        job()
                except BaseException as error:  # handed to whoever waits; later jobs fail alike, their peers may be gone
                    self._failure = error
            handle.finish(self._failure)


class _StreamHandle:
    def __init__(self, event: Any, module: Any) -> None:
        self._event, self._module = event, module

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)


class StreamQueue:
    """One side stream. Buffers are allocated on the compute stream before `submit` and freed on it after `wait`."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def submit(self, job: Callable[[], None]) -> Handle:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            job()
        event = self._module.Event()
        event.record(self._stream)
        return _StreamHandle(event, self._module)

    def close(self) -> None:
        self._stream.synchronize()


def make_queue(device: torch.device, *, overlap: bool, name: str) -> CommunicationQueue:
    """The queue that fits the device; without overlap, jobs run in the caller (same order, same numbers)."""
    if not overlap:
        return InlineQueue()
    if device.type == "cuda":
        return StreamQueue(device)
    return ThreadQueue(name)
