"""Boxes: what a contiguous range of a flattened block is in N-D, so that any sharding can be saved and read as any other.

`torch.distributed.checkpoint` (DCP) stores tensors as N-D boxes and finds overlaps between the boxes that were saved and the
boxes that are wanted. A shard here is a range of a flattened block, which is not one box but few: a part of a first row, whole
rows, a part of a last row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from paro_lm.parallel.buffer import FlatShard


@dataclass(frozen=True)
class Box:
    """A sub-block: `offset` and `sizes` per dimension."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut the range [start, stop) of a row-major flattened block of `shape` into the fewest boxes that are contiguous in it.

    The boxes are disjoint and in the order of the range; a block of n dimensions needs at most 2 n - 1 of them (three in 2-D),
    a 0-d block is one box with no dimensions, an empty range has none.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        return _in_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(shape, last, 0, tail)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    """Boxes of a range inside the one slice `index` of the first dimension."""
    return [Box((index, *box.offset), (1, *box.sizes)) for box in range_boxes(shape[1:], start, stop)]


def shard_boxes(shard: FlatShard, cuts: Sequence[int] = ()) -> list[Box]:
    """The boxes of a shard in the coordinates of its global tensor, in the order of its data.

    cuts: ascending positions inside (start, stop) where no box may go across.
    A tensor without elements is one empty box at the origin, so that its name and shape are stored too.
    """
    if math.prod(shard.shape) == 0:
        return [Box(tuple(0 for _ in shard.shape), shard.shape)]
    ends = [shard.start, *cuts, shard.stop]
    return [
        Box(tuple(outer + inner for outer, inner in zip(shard.offset, box.offset, strict=True)), box.sizes)
        for start, stop in pairwise(ends)
        for box in range_boxes(shard.local_shape, start, stop)
    ]


Extent = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Offset and shape of a block, and the range of it that a rank holds."""


def extents(tensors: Mapping[str, object]) -> dict[str, Extent]:
    """Which part of which tensor the shards among `tensors` are; picklable."""
    return {
        name: (shard.offset, shard.local_shape, shard.start, shard.stop) for name, shard in tensors.items() if isinstance(shard, FlatShard)
    }


def common_cuts(mine: Mapping[str, Extent], by_rank: Iterable[Mapping[str, Extent]]) -> dict[str, list[int]]:
    """Where to cut the shards of this rank so that no two ranks hold ranges of a block that overlap but differ.

    Replicas are cut alike when the flat buffers around them are alike. They are not where ranks of a tensor-parallel axis have
    blocks of unequal size, or two pipeline stages share a tied weight. Then all are cut where any is, and DCP, which recognises
    replicas by name and offset, stores each piece once. Shards that are cut alike have no cuts here.
    """
    ends: dict[tuple[str, tuple[int, ...], tuple[int, ...]], set[int]] = defaultdict(set)
    for held in by_rank:
        for name, (offset, local_shape, start, stop) in held.items():
            ends[name, offset, local_shape].update((start, stop))
    return {
        name: sorted(end for end in ends[name, offset, local_shape] if start < end < stop)
        for name, (offset, local_shape, start, stop) in mine.items()
    }


class BoxedShard:
    """A FlatShard that DCP can plan with: it implements the protocol `_Checkpointable` of DCP (as DTensor does).

    DCP looks tensors up through its planner, which accepts only `torch.Tensor`; `storage.SavePlanner` and `storage.LoadPlanner`
    look up these objects. Ranks that hold the same range describe it by the same boxes, which DCP writes once.
    cuts: see `shard_boxes`.
    """

    def __init__(self, shard: FlatShard, cuts: Sequence[int] = ()) -> None:
        assert shard.data.shape == (shard.stop - shard.start,), (shard.name, shard.data.shape)
        self.shard, self.cuts = shard, cuts

    def size(self) -> torch.Size:
        return torch.Size(self.shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.data.dtype

    @cached_property
    def boxes(self) -> list[Box]:
        return shard_boxes(self.shard, self.cuts)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.sizes)) for box in self.boxes]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The view of the data that is the box at `index.offset`."""
        position = 0
        for box in self.boxes:
            if index.offset is not None and tuple(index.offset) == box.offset:
                return self.shard.data[position : position + box.numel].view(box.sizes)
            position += box.numel
        raise AssertionError(f"{index.fqn} has no box at {index.offset}")
