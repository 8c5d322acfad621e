"""A model whose gradients are what a test says: each part is a vector, and its gradient is the coefficients it is called with."""

from __future__ import annotations

import torch
from torch import nn

from paro_lm.model.spec import Unit
from paro_lm.parallel.buffer import FlatShard
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.seams import Seams
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.unit_buffer import Dtypes

FP64 = Dtypes(param=torch.float64, grad=torch.float64, reduce=torch.float64, main=torch.float64)
BF16 = Dtypes(param=torch.bfloat16, grad=torch.float32, reduce=torch.float32, main=torch.float32)

Coefficients = dict[str, torch.Tensor | float | None]


class Part(nn.Module):
    """`w` with the values 1, 2, 3 .., and `spare` with -1, -2 .. that a call may leave out."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=dtype).view(shape)
        self.w, self.spare = nn.Parameter(values), nn.Parameter(-values[:1].clone())

    def forward(self, w: torch.Tensor | float, spare: float | None) -> torch.Tensor:
        loss = (self.w * w).sum() if isinstance(w, torch.Tensor) else self.w.t().sum() * w  # the latter: a gradient with stride 0
        return loss if spare is None else loss + self.spare.sum() * spare


class Bag(nn.Module):
    """Parts by name, each a unit."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.add_module(name, Part(shape, dtype))

    def forward(self, w: Coefficients, spare: Coefficients | None = None) -> torch.Tensor:
        """The sum of the parts that have coefficients; None leaves a part out."""
        spare = spare or {}
        terms = [part(w[name], spare.get(name)) for name, part in self.named_children() if w.get(name) is not None]
        return torch.stack(terms).sum()

    def units(self) -> list[Unit]:
        return [Unit(name=name, modules=(part,)) for name, part in self.named_children()]


def bag_engine(
    model: Bag,
    mesh: ParallelMesh,
    grids: tuple[GridCollectives, GridCollectives],
    cell: Cell,
    *,
    dtypes: Dtypes = FP64,
    seams: Seams | None = None,
) -> ShardingEngine:
    return ShardingEngine(
        model, model.units(), mesh=mesh, cells=cell, dtypes=dtypes, gather_collectives=grids[0], reduce_collectives=grids[1], seams=seams
    )


def backward(engine: ShardingEngine, w: Coefficients, spare: Coefficients | None = None, *, last: bool = True) -> None:
    """One micro-batch; on the last, gradients are finished."""
    with engine.micro_batch(last=last):
        engine.model(w, spare).backward()
    if last:
        engine.finish_gradients()


@torch.no_grad()
def sgd(engine: ShardingEngine, lr: float = 1.0) -> None:
    """Move what had a gradient anywhere by its finished gradient times `lr`."""
    for buffer in engine.trainable_buffers():
        assert buffer.main is not None and buffer.finished is not None
        for segment in buffer.segments(buffer.cell.main):
            if engine.used(segment.slot.name):
                segment.of(buffer.main).sub_(segment.of(buffer.finished).to(buffer.main.dtype), alpha=lr)
    engine.sync_parameters()


def finished(engine: ShardingEngine) -> dict[str, FlatShard | torch.Tensor]:
    """This rank's part of the finished gradients, by name."""
    return {
        segment.slot.name: segment.of(buffer.finished).clone()
        for buffer in engine.trainable_buffers()
        if buffer.finished is not None
        for segment in buffer.segments(buffer.cell.main)
    }


def values(engine: ShardingEngine) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    engine.wait()
    with engine.unsharded() as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def wrong(case: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float = 0.0) -> list[str]:
    """One line per parameter that differs; exactly equal is asked for by default."""
    assert got.keys() >= want.keys()
    return [
        f"{case} {name}: got {got[name].tolist()}, want {value.tolist()}"
        for name, value in want.items()
        if got[name].shape != value.shape or bool((got[name].double() - value.double()).abs().max() > atol)
    ]
