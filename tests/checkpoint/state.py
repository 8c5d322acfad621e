"""A small state for checkpoint tests, of one process."""

import torch

from paro_lm.parallel.buffer import FlatShard

SHAPES = {"embedding.weight": (13, 3), "norm.weight": (5,), "scale": ()}


def whole(name, shape, data):
    return FlatShard(
        name=name, shape=shape, offset=tuple(0 for _ in shape), local_shape=shape, start=0, stop=data.numel(), data=data.reshape(-1)
    )


def make_state(value):
    """Tensors that are all different, and different for every value."""
    state = {}
    for position, (name, shape) in enumerate(SHAPES.items()):
        for kind, factor in (("model", 1.0), ("exp_avg", 0.1), ("exp_avg_sq", 0.01)):
            generator = torch.Generator().manual_seed(position)
            state[f"{kind}/{name}"] = whole(name, shape, (torch.rand(shape, generator=generator) + value) * factor)
        state[f"step/{name}"] = torch.tensor(float(value))
    return state


def data_of(tensor):
    return tensor.data if isinstance(tensor, FlatShard) else tensor


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(data_of(left[name]), data_of(right[name])), name
