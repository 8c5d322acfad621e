"""Flat buffers: where every parameter of a unit lies, and which range of it a placement gives to a rank.

The layout is one explicit object that the engine, the optimizer, checkpoints and the planner read. A buffer is cut first by the
rank inside the group, then by the group (shard index = intra_rank * inter_size + inter_rank), so that a G shard is a sub-range of
the I shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paro_lm.parallel.mesh import MeshShape
from paro_lm.parallel.sharding import Placement

ALIGNMENT = 16
"""Elements to which every parameter and every shard is aligned: 64 bytes in fp32."""


@dataclass(frozen=True, kw_only=True)
class FlatShard:
    """A range of one parameter, as this rank holds it.

    `data` is a 1-D view into a flat buffer with the elements [start, stop) of the row-major flattened box of `local_shape` at
    `offset` in the global tensor of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    start: int
    stop: int
    data: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter in a flat buffer: its global shape, the box of it that belongs to this tp rank, its first element."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Segment:
    """The part of a slot that lies in a shard: [start, stop) of the slot, at `position` in the shard."""

    slot: Slot
    start: int
    stop: int
    position: int

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """View of this segment in the shard's buffer."""
        return shard[self.position : self.position + self.stop - self.start]


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Slots of one flat buffer and its padded length, a multiple of inter * intra * ALIGNMENT."""

    slots: tuple[Slot, ...]
    numel: int
    mesh: MeshShape

    @classmethod
    def build(cls, boxes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]], mesh: MeshShape) -> FlatLayout:
        """Lay out (name, global shape, offset, local shape) one after the other."""
        slots, end = [], 0
        for name, shape, offset, local_shape in boxes:
            slot = Slot(name=name, shape=tuple(shape), offset=tuple(offset), local_shape=tuple(local_shape), start=end)
            slots.append(slot)
            end = math.ceil(slot.stop / ALIGNMENT) * ALIGNMENT
        multiple = mesh.dp * ALIGNMENT
        return cls(slots=tuple(slots), numel=math.ceil(end / multiple) * multiple, mesh=mesh)

    def shard_numel(self, placement: Placement) -> int:
        """Elements that one rank holds under a placement."""
        return self.numel // self.mesh.size(*placement)

    def shard_start(self, placement: Placement, coordinates: dict[str, int]) -> int:
        """First element of the shard of the rank at these mesh coordinates."""
        start, numel = 0, self.numel
        for axis in ("dp_intra", "dp_inter"):
            if axis in placement:
                numel //= self.mesh.size(axis)
                start += coordinates[axis] * numel
        return start

    def segments(self, placement: Placement, coordinates: dict[str, int]) -> tuple[Segment, ...]:
        """The parts of parameters in the shard of the rank at these coordinates, in order; empty parts are left out."""
        first = self.shard_start(placement, coordinates)
        last = first + self.shard_numel(placement)
        result = []
        for slot in self.slots:
            start, stop = max(first, slot.start), min(last, slot.stop)
            if start < stop:
                result.append(Segment(slot, start - slot.start, stop - slot.start, start - first))
        return tuple(result)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of padding, which must hold zeros."""
        result, end = [], 0
        for slot in self.slots:
            if slot.start > end:
                result.append((end, slot.start))
            end = slot.stop
        if end < self.numel:
            result.append((end, self.numel))
        return result


def flat_shard(segment: Segment, shard: torch.Tensor) -> FlatShard:
    """A segment of a buffer with the place in the global tensor that it stands for."""
    slot = segment.slot
    return FlatShard(
        name=slot.name,
        shape=slot.shape,
        offset=slot.offset,
        local_shape=slot.local_shape,
        start=segment.start,
        stop=segment.stop,
        data=segment.of(shard),
    )
