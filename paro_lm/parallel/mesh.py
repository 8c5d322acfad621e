"""The mesh of ranks: one rank's view of the four axes, and the process groups along them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paro_lm.parallel.axes import AXES, DATA_AXES, MeshShape

__all__ = ["AXES", "DATA_AXES", "MeshShape", "ParallelMesh"]

Value = TypeVar("Value", int, float, torch.Tensor)


@dataclass(kw_only=True)
class ParallelMesh:
    """One rank's view of the mesh, and owner of all communicators of a run, which all ranks make in the same order.

    `close` gives them back. On Gloo a communicator has threads that wake 100 times a second for as long as anything refers to it.
    """

    shape: MeshShape
    rank: int
    device: torch.device
    local_world_size: int | None = None  # ranks of a node
    timeout: timedelta | None = None  # of every collective; None = what torch has as default, whatever the process group was given
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    _made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        *,
        world_size: int,
        rank: int,
        tp: int = 1,
        pp: int = 1,
        group_size: int | None = None,
        local_world_size: int | None = None,
        device: torch.device | str = "cpu",
        timeout: timedelta | None = None,
    ) -> ParallelMesh:
        """Mesh over an initialised process group; see MeshShape.build for sizes and errors. A collective call."""
        shape = MeshShape.build(world_size=world_size, tp=tp, pp=pp, group_size=group_size, local_world_size=local_world_size)
        mesh = cls(shape=shape, rank=rank, device=torch.device(device), local_world_size=local_world_size, timeout=timeout)
        for axes in (("dp_inter",), ("dp_intra",), ("tp",), ("pp",), DATA_AXES, ("pp", *DATA_AXES), AXES):
            group = mesh.new_group(*axes)
            if group is not None:
                mesh._groups[axes] = group
        return mesh

    @property
    def world_size(self) -> int:
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Number of ranks along these axes together."""
        return self.shape.size(*axes)

    def coordinate(self, axis: str) -> int:
        """Position of this rank along one axis."""
        return self.coordinates(self.rank)[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a global rank along every axis."""
        result = {}
        for axis in reversed(AXES):
            rank, result[axis] = divmod(rank, self.size(axis))
        return result

    def index(self, *axes: str) -> int:
        """Row-major index of this rank over the axes, in the order given."""
        result = 0
        for axis in axes:
            result = result * self.size(axis) + self.coordinate(axis)
        return result

    def rank_at(self, **coordinates: int) -> int:
        """Global rank that differs from this one in the coordinates given."""
        at = self.coordinates(self.rank) | coordinates
        result = 0
        for axis in AXES:
            result = result * self.size(axis) + at[axis]
        return result

    def ranks(self, *axes: str) -> list[int]:
        """Global ranks that share this rank's coordinates on all other axes, in row-major order over `axes`."""
        return [self.rank_at(**dict(zip(axes, at, strict=True))) for at in itertools.product(*(range(self.size(axis)) for axis in axes))]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The control communicator over these axes; None when it has one rank."""
        if self.size(*axes) == 1:
            return None
        return self._groups[tuple(axis for axis in AXES if axis in axes)]

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        """A private communicator over these axes; None when it has one rank. Every rank of the world calls it."""
        if self.size(*axes) == 1:
            return None
        mine, seen = None, set()
        for rank in range(self.world_size):
            ranks = ParallelMesh(shape=self.shape, rank=rank, device=self.device).ranks(*axes)
            if ranks[0] in seen:
                continue
            seen.add(ranks[0])
            group = self.new_group_of(ranks)
            if self.rank in ranks:
                mine = group
        return mine

    def new_group_of(self, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """A private communicator of these global ranks (None = all), as dist.new_group. Every rank of the world calls it."""
        group = dist.new_group(ranks, **{"timeout": self.timeout} | options)
        if ranks is None or self.rank in ranks:
            self._made.append(group)
        return group

    def close(self) -> None:
        """Give all communicators back, when nothing is under way on them. A collective call."""
        if self._made:
            dist.barrier()
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
        self._groups.clear()

    def renamed(self, shape: MeshShape) -> ParallelMesh:
        """The same ranks under other axes. Its communicators are closed with this mesh."""
        return ParallelMesh(shape=shape, rank=self.rank, device=self.device, timeout=self.timeout, _made=self._made)

    def sum(self, value: Value, axes: Iterable[str] = AXES) -> Value:
        """Sum over the ranks of these axes, the same on all of them. Numbers travel as float64."""
        return self._reduce(value, tuple(axes), dist.ReduceOp.SUM)

    def max(self, value: Value, axes: Iterable[str] = AXES) -> Value:
        """Maximum over the ranks of these axes, the same on all of them."""
        return self._reduce(value, tuple(axes), dist.ReduceOp.MAX)

    def _reduce(self, value: Value, axes: tuple[str, ...], op: dist.ReduceOp.RedOpType) -> Value:
        group = self.group(*axes)
        if group is None:
            return value
        if isinstance(value, torch.Tensor):
            result = value.clone().contiguous()
            dist.all_reduce(result, op=op, group=group)
            return result
        scalar = torch.tensor([value], dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        dist.all_reduce(scalar, op=op, group=group)
        return type(value)(scalar.item())
