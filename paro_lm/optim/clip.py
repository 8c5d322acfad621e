"""Global gradient norm over every axis, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import AXES, DATA_AXES


def _counted(engine: ShardingEngine, replicated: Callable[[str], frozenset[str]]) -> Iterator[torch.Tensor]:
    """Finished gradient segments that this rank counts: each logical element is counted on one rank of the world."""
    mesh = engine.mesh
    for buffer in engine.trainable_buffers():
        assert buffer.finished is not None, "finish_gradients comes before the norm"
        if any(mesh.coordinate(axis) for axis in DATA_AXES if axis not in buffer.cell.main):
            continue
        for segment in buffer.segments(buffer.cell.main):
            name = segment.slot.name
            if engine.seams.counts(name) and not any(mesh.coordinate(axis) for axis in replicated(name)):
                yield segment.of(buffer.finished)


@torch.no_grad()
def grad_norm(
    engine: ShardingEngine, *, norm_type: float = 2.0, replicated: Callable[[str], frozenset[str]] = lambda name: frozenset()
) -> float:
    """Norm of all finished gradients together, bitwise the same on every rank of the world: one all-reduce.

    replicated    axes besides the data axes on which every rank holds a parameter's whole gradient (tp for norms), by name
    """
    parts = list(_counted(engine, replicated))
    norms = _norms(parts, norm_type)
    if math.isinf(norm_type):
        return engine.mesh.max(norms.max().item(), AXES)
    return engine.mesh.sum(norms.pow(norm_type).sum().item(), AXES) ** (1.0 / norm_type)


def _norms(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of each part, float64, on the host. 16-bit gradients are summed in fp32: their norm may lie beyond their range."""
    if not parts:
        return torch.zeros(1, dtype=torch.float64)
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(parts, norm_type, dtype=dtype)).cpu().double()


@torch.no_grad()
def scale_gradients(engine: ShardingEngine, factor: float) -> None:
    """Multiply all finished gradients by a factor."""
    if factor == 1.0:
        return
    for buffer in engine.trainable_buffers():
        assert buffer.finished is not None
        buffer.finished.mul_(factor)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a norm down to max_norm; 1 when it is below, or when max_norm is 0 (off)."""
    return max_norm / norm if max_norm > 0 and norm > max_norm else 1.0
