"""Ranges of flattened blocks as boxes, against brute force."""

import math
import random
from functools import cache

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from paro_lm.checkpoint.boxes import BoxedShard, common_cuts, extents, range_boxes, shard_boxes
from paro_lm.parallel.buffer import FlatShard

SHAPES = [(), (1,), (7,), (3, 5), (1, 6), (6, 1), (2, 3, 4), (3, 1, 5), (1, 1, 3), (2, 2, 2, 3)]


def elements(shape, box):
    index = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(box.offset, box.sizes, strict=True)):
        index = index.narrow(dim, offset, size)
    return index.reshape(-1).tolist()


def fewest(shape, start, stop):
    """The smallest number of contiguous boxes that make up the range, by trying every cut."""
    numel = math.prod(shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def is_box(a, b):
        if b - a == 1:
            return True
        return any(
            a % stride == 0 and b % stride == 0 and a // (stride * size) == (b - 1) // (stride * size)
            for stride, size in zip(strides, shape, strict=True)
        )

    @cache
    def count(a):
        return 0 if a == stop else 1 + min(count(b) for b in range(a + 1, stop + 1) if is_box(a, b))

    assert 0 <= start <= stop <= numel
    return count(start)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_every_range(shape):
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = range_boxes(shape, start, stop)
            assert [element for box in boxes for element in elements(shape, box)] == list(range(start, stop))
            assert len(boxes) == fewest(shape, start, stop)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_random_shards_hold_their_data():
    """Cut random blocks out of random tensors, and random ranges out of these; the boxes put every element where it belongs."""
    rng = random.Random(0)
    for _ in range(200):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        offset = tuple(rng.randint(0, size - 1) for size in shape)
        local = tuple(rng.randint(1, size - first) for size, first in zip(shape, offset, strict=True))
        start, stop = sorted(rng.choices(range(math.prod(local) + 1), k=2))
        full = torch.arange(math.prod(shape)).view(shape)
        block = full[tuple(slice(first, first + size) for first, size in zip(offset, local, strict=True))]
        shard = FlatShard(
            name="w", shape=shape, offset=offset, local_shape=local, start=start, stop=stop, data=block.reshape(-1)[start:stop].clone()
        )
        boxed = BoxedShard(shard)
        assert sum(box.numel for box in boxed.boxes) == stop - start
        for item in boxed.__create_write_items__("w", boxed):
            want = full[tuple(slice(a, a + n) for a, n in zip(item.index.offset, item.tensor_data.chunk.sizes, strict=True))]
            view = boxed.__get_tensor_shard__(item.index)
            assert torch.equal(view, want)
            view.fill_(-1)
        assert shard.data.eq(-1).all(), "boxes are views of the data and cover it"


def test_boxes_of_a_tensor_without_elements():
    empty = FlatShard(name="w", shape=(3, 0), offset=(0, 0), local_shape=(3, 0), start=0, stop=0, data=torch.empty(0))
    assert [(box.offset, box.sizes) for box in shard_boxes(empty)] == [((0, 0), (3, 0))]
    assert BoxedShard(empty).__get_tensor_shard__(MetadataIndex("w", (0, 0))).shape == (3, 0)


def test_replicas_that_are_cut_differently_share_their_pieces():
    """Two replicas of a block, cut at 12 and at 5 and 20 of 35 elements: the pieces of both are the same, and cover it once."""

    def held(ranges):
        return {
            f"rank {rank}": FlatShard(
                name="w", shape=(5, 7), offset=(0, 0), local_shape=(5, 7), start=start, stop=stop, data=torch.arange(start, stop)
            )
            for rank, (start, stop) in enumerate(ranges)
        }

    def pieces(ranges):
        shards = [{"w": shard} for shard in held(ranges).values()]
        everywhere = [extents(shard) for shard in shards]
        return [shard_boxes(shard["w"], common_cuts(extents(shard), everywhere)["w"]) for shard in shards]

    mixed = pieces([(0, 12), (12, 35), (0, 5), (5, 20), (20, 35)])
    assert mixed[0] + mixed[1] == mixed[2] + mixed[3] + mixed[4]
    assert [element for box in mixed[0] + mixed[1] for element in elements((5, 7), box)] == list(range(35))
    alike = pieces([(0, 12), (12, 35), (0, 12), (12, 35)])
    assert alike[:2] == alike[2:] == [range_boxes((5, 7), 0, 12), range_boxes((5, 7), 12, 35)]
