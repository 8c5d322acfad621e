"""The state of the trainable or the frozen parameters of one unit: flat buffers and the jobs that move them.

    param     parameter dtype, placement p    what rests between uses
    full      parameter dtype, whole          what forward and backward see; `param` itself when p = N
    grad      gradient dtype, placement g     accumulated, a partial sum over the axes it is not sharded on
    main      main dtype, placement os        what the optimizer updates; `param` itself when dtype and placement are equal
    finished  view or copy of grad at os      complete sums, from the end of the last micro-batch to the optimizer step

Frozen parameters have only `param` and `full`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paro_lm.parallel.buffer import FlatLayout, FlatShard, Segment, flat_shard
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import Cell, Placement, Step, accumulate_steps, finish_steps, publish_steps, transition, unshard_steps

NOWHERE: Placement = frozenset()


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Data types of parameters, accumulated gradients, gradients on the wire, and main parameters."""

    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    main: torch.dtype = torch.float32


class UnitBuffer:
    """Buffers of one unit; see the module's table. `cell` keeps only axes that have more than one rank."""

    def __init__(self, layout: FlatLayout, cell: Cell, dtypes: Dtypes, mesh: ParallelMesh, *, trainable: bool) -> None:
        live = frozenset(axis for axis in DATA_AXES if mesh.size(axis) > 1)
        self.layout, self.dtypes, self.trainable = layout, dtypes, trainable
        self.cell = Cell(cell.param & live, cell.grad & live, cell.main & live)
        self._accumulate, self._finish, self._publish, self._unshard = (
            [live_step for step in steps(self.cell) if (live_step := _live(step, live)).axes]
            for steps in (accumulate_steps, finish_steps, publish_steps, unshard_steps)
        )
        self.mesh, self.coordinates = mesh, mesh.coordinates(mesh.rank)
        self.gaps = layout.gaps()
        self.unsharded = not self.cell.param
        """Whether `full` holds the parameters now."""
        device = mesh.device
        self.param = torch.zeros(layout.shard_numel(self.cell.param), dtype=dtypes.param, device=device)
        self.full = self.param if self.unsharded else torch.empty(layout.numel, dtype=dtypes.param, device=device)
        self.grad: torch.Tensor | None = None
        self.main: torch.Tensor | None = None
        self.finished: torch.Tensor | None = None
        self.reducing: torch.Tensor | None = None
        """Gradients of the running micro-batch before their reduction, when g is not N."""
        self.accumulated = False
        """Whether `grad` holds something of this step already (sharded gradients only)."""
        self.written: set[str] = set()
        """Parameters that had a gradient on this rank in this step."""
        if trainable:
            self.grad = torch.zeros(layout.shard_numel(self.cell.grad), dtype=dtypes.grad, device=device)
            self.main = self.param
            if dtypes.main != dtypes.param or self.cell.main != self.cell.param:
                self.main = torch.zeros(layout.shard_numel(self.cell.main), dtype=dtypes.main, device=device)

    # Where this rank's shard under one placement lies in its shard under a coarser one.
    def _within(self, inner: Placement, outer: Placement, buffer: torch.Tensor) -> torch.Tensor:
        start = self.layout.shard_start(inner, self.coordinates) - self.layout.shard_start(outer, self.coordinates)
        return buffer[start : start + self.layout.shard_numel(inner)]

    def segments(self, placement: Placement) -> tuple[Segment, ...]:
        """Segments of this rank's shard under a placement of `self.cell`."""
        return self.layout.segments(placement, self.coordinates)

    def views(self) -> list[torch.Tensor]:
        """One view of `full` per slot, in its local shape."""
        # .data: writes into the buffer must not count as in-place changes of tensors that autograd saved.
        return [self.full.data[slot.start : slot.stop].view(slot.local_shape) for slot in self.layout.slots]

    def load(self, value_of: Callable[[str], torch.Tensor]) -> None:
        """Fill param and main from `value_of(name)`, the box of each parameter (local shape, any float dtype)."""
        targets = [(self.param, self.segments(self.cell.param))]
        if self.main is not None and self.main is not self.param:
            targets.append((self.main, self.segments(self.cell.main)))
        for slot in self.layout.slots:
            value = value_of(slot.name).reshape(-1)
            assert value.numel() == slot.numel, f"{slot.name}: {value.numel()} elements for {slot.local_shape}"
            for buffer, segments in targets:
                for segment in segments:
                    if segment.slot is slot:
                        segment.of(buffer).copy_(value[segment.start : segment.stop])

    def allocate_full(self) -> None:
        """Give `full` its memory back (on the compute stream, before the gather is submitted)."""
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())

    def free_full(self) -> None:
        """Drop the whole parameters; the storage stays the same object, so tensors saved by autograd see the next gather."""
        if self.cell.param:
            self.full.untyped_storage().resize_(0)
            self.unsharded = False

    def unshard(self, collectives: GridCollectives) -> None:
        """Job: p -> N."""
        (step,) = self._unshard
        own = self._within(self.cell.param, NOWHERE, self.full)
        own.copy_(self.param)
        collectives.all_gather(self.full, own, step.axes)

    def begin_reduction(self) -> torch.Tensor:
        """The whole-sized buffer that takes the gradients of this micro-batch, padding zeroed."""
        if self.reducing is None:
            self.reducing = torch.empty(self.layout.numel, dtype=self.dtypes.reduce, device=self.param.device)
            for start, stop in self.gaps:
                self.reducing[start:stop].zero_()
        return self.reducing

    def end_reduction(self, written: set[str]) -> torch.Tensor | None:
        """Hand over the gradients of this micro-batch, zero where there were none; None when gradients are not sharded."""
        if not self.cell.grad:
            return None
        reducing = self.begin_reduction()
        for slot in self.layout.slots:
            if slot.name not in written:
                reducing[slot.start : slot.stop].zero_()
        self.reducing = None
        return reducing

    def zero_unwritten(self) -> None:
        """Clear what an earlier step left of parameters that had no gradient in this one (whole gradients only)."""
        assert self.grad is not None
        if not self.cell.grad:
            for slot in self.layout.slots:
                if slot.name not in self.written:
                    self.grad[slot.start : slot.stop].zero_()

    def accumulate(self, collectives: GridCollectives, reducing: torch.Tensor) -> None:
        """Job: sum this micro-batch's gradient over the axes of g and add it to `grad`."""
        assert self.grad is not None
        (step,) = self._accumulate
        own = self._within(self.cell.grad, NOWHERE, reducing)
        collectives.reduce_scatter(own, reducing, step.axes)
        if self.accumulated:
            self.grad.add_(own)
        else:
            self.grad.copy_(own)
            self.accumulated = True

    def finish(self, collectives: GridCollectives) -> None:
        """Job: g -> os. `finished` is a range of `grad` for all cells whose states are at least as finely sharded."""
        assert self.grad is not None
        current, placement = self.grad, self.cell.grad
        if self._finish and current.dtype != self.dtypes.reduce:
            current = current.to(self.dtypes.reduce)
        for step in self._finish:
            if step.operation == "all_reduce":
                collectives.all_reduce(current, step.axes)
            elif step.operation == "reduce_scatter":
                finer = placement | set(step.axes)
                own = self._within(finer, placement, current)
                collectives.reduce_scatter(own, current, step.axes)
                current, placement = own, finer
            else:
                coarser = placement - set(step.axes)
                whole = torch.empty(self.layout.shard_numel(coarser), dtype=current.dtype, device=current.device)
                own = self._within(placement, coarser, whole)
                own.copy_(current)
                collectives.all_gather(whole, own, step.axes)
                current, placement = whole, coarser
        assert placement == self.cell.main
        self.finished = current

    def publish(self, collectives: GridCollectives) -> None:
        """Job: updated main parameters, os -> p, cast to the parameter dtype before they travel."""
        if self.main is None or self.main is self.param:
            return
        param, main = self.cell.param, self.cell.main
        if main > param:
            (step,) = self._publish
            own = self._within(main, param, self.param)
            own.copy_(self.main)
            collectives.all_gather(self.param, own, step.axes)
        else:
            self.param.copy_(self._within(param, main, self.main))

    def whole_values(self, collectives: GridCollectives) -> dict[str, torch.Tensor]:
        """Job: the box of every parameter, flat, in the type of main parameters where there are some."""
        source, placement = (self.param, self.cell.param) if self.main is None else (self.main, self.cell.main)
        whole = torch.empty(self.layout.numel, dtype=source.dtype, device=source.device)
        own = self._within(placement, NOWHERE, whole)
        own.copy_(source)
        for step in transition(placement, NOWHERE):
            collectives.all_gather(whole, own, step.axes)
        return {slot.name: whole[slot.start : slot.stop] for slot in self.layout.slots}

    def parameter_shards(self) -> dict[str, FlatShard]:
        """What a checkpoint holds: main parameters of trainable ones, parameters of frozen ones, by name."""
        shard, placement = (self.param, self.cell.param) if self.main is None else (self.main, self.cell.main)
        return {segment.slot.name: flat_shard(segment, shard) for segment in self.segments(placement)}

    def state_bytes(self) -> dict[str, int]:
        """Bytes of resting state; `shared` is what param and main are both, in one buffer."""
        grad, main = (0 if buffer is None else buffer.nbytes for buffer in (self.grad, self.main))
        return {"param": self.param.nbytes, "grad": grad, "main": main, "shared": main if self.main is self.param else 0}

    def drop_gradients(self) -> None:
        """Forget the finished sums of a step; the next micro-batch starts a new accumulation."""
        self.finished = None
        self.accumulated = False
        self.written.clear()


def _live(step: Step, live: Placement) -> Step:
    return Step(step.operation, tuple(axis for axis in step.axes if axis in live))
