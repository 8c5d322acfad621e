"""Sums that gradients need beyond the data axes, once per step on the optimizer's shards.

Under sequence parallelism the gradients of norms, and of key and value heads that all tp ranks hold, are partial over tp. A tied
weight lives on the first and the last pipeline stage, and its gradient is the sum of both. Both shards cover the same elements
(same layout, same data rank), so a sum over shards is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.unit_buffer import UnitBuffer


@dataclass(frozen=True, kw_only=True)
class Seams:
    """partial        names of parameters whose gradient is partial over tp
    shared         names of parameters that two stages hold, alone in buffers of their own
    shared_group   the two ranks that hold them; None when this rank holds none
    counts_shared  whether this rank's copy counts in the gradient norm (the first stage's does)
    record         told of every all-reduce: axis and bytes sent by this rank
    """

    partial: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    shared_group: dist.ProcessGroup | None = None
    counts_shared: bool = True
    record: Callable[[str, int], None] | None = None

    def finish(self, buffers: Sequence[UnitBuffer], mesh: ParallelMesh) -> None:
        """Complete the `finished` gradients of these buffers in place. A collective call."""
        parts = [
            segment.of(buffer.finished)
            for buffer in buffers
            for segment in buffer.segments(buffer.cell.main)
            if segment.slot.name in self.partial and buffer.finished is not None
        ]
        if parts and mesh.size("tp") > 1:
            self._sum_parts(parts, mesh.group("tp"), "tp", mesh.size("tp"))
        copies = [buffer for buffer in buffers if any(slot.name in self.shared for slot in buffer.layout.slots)]
        if self.shared_group is not None:
            self._sum_parts([buffer.finished for buffer in copies if buffer.finished is not None], self.shared_group, "pp", 2)

    def counts(self, name: str) -> bool:
        """Whether this rank's copy of a parameter counts in the gradient norm."""
        return self.counts_shared or name not in self.shared

    def _sum_parts(self, parts: list[torch.Tensor], group: dist.ProcessGroup | None, axis: str, size: int) -> None:
        if not parts:
            return
        with record_function(f"paro.seam({axis})"):
            flat = torch.cat(parts)
            dist.all_reduce(flat, group=group)
            for part, value in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(value)
            if self.record is not None:
                self.record(axis, 2 * flat.nbytes * (size - 1) // size)
