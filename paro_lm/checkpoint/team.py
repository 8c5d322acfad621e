"""Agreement of the ranks that write or read a checkpoint: what fails on one of them fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from paro_lm.parallel.mesh import AXES, ParallelMesh

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for the slowest writer."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or a read failed for a reason that is not the user's input."""


class Team:
    """The ranks of the mesh on a communicator of their own, on CPU, so that a background save never meets other traffic.

    With no mesh, or a mesh of one rank, everything is local and no process group is needed. A collective call.
    """

    def __init__(self, mesh: ParallelMesh | None) -> None:
        self.size = 1 if mesh is None else mesh.size(*AXES)
        self.rank = 0 if mesh is None else mesh.rank
        self.group = None if mesh is None or self.size == 1 else mesh.new_group_of(backend="gloo", timeout=TIMEOUT)

    def all_gather(self, value: T) -> list[T]:
        """The picklable value of every rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; each gets its own result.

        When it raises on any rank, every rank raises: ValueError when all errors are ValueError, else CheckpointError; the
        message names the ranks. No rank is left waiting.
        """
        error, failure = None, None
        try:
            result = action()
        except Exception as caught:
            error, failure = caught, (isinstance(caught, ValueError), _describe(caught))
        failures = {rank: failure for rank, failure in enumerate(self.all_gather(failure)) if failure is not None}
        if failures:
            kind = ValueError if all(is_value_error for is_value_error, _ in failures.values()) else CheckpointError
            raise kind(self._message({rank: text for rank, (_, text) in failures.items()})) from error
        return result

    def run_on_first(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 only; raises on every rank as `run` does."""
        self.run(lambda: action() if self.rank == 0 else None)

    def _message(self, messages: dict[int, str]) -> str:
        if self.size == 1:
            return messages[0]
        by_text: dict[str, list[int]] = {}
        for rank, text in messages.items():
            by_text.setdefault(text, []).append(rank)
        if len(by_text) == 1 and len(messages) == self.size:
            return next(iter(by_text))
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())


def _describe(error: Exception) -> str:
    if isinstance(error, ValueError | CheckpointError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
