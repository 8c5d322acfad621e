"""Peak bytes of live tensors on one rank, term by term: states, activations, gathered parameters, gradients under way, scratch.

The peak lies in a backward: unit i is whole, unit i-1 is being gathered, the gradients of unit i are whole in the reduce type and
those of the two units before it wait for the network, and the activations of the units up to i are still there. The largest sum over
i is the peak; terms are those at that moment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.cost import ElementBytes, MemoryBytes, UnitSize, operations, unit_memory
from paro_lm.parallel.sharding import Cell
from paro_lm.planner.activations import Activations
from paro_lm.planner.inventory import UnitProfile

PENDING_REDUCTIONS = 2
"""Whole gradients that wait for the network (`engine.MAX_PENDING_REDUCTIONS`)."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of a rank at its peak.

    param, grad, main (with moments, less what is one buffer with param); gathered (whole parameters of sharded units); reducing
    (whole gradients on their way); activations (kept for backward); working (recomputation, gradients of activations and of one
    parameter); scratch (of the collectives).
    """

    param: float
    grad: float
    main: float
    gathered: float
    reducing: float
    activations: float
    working: float
    scratch: float

    @property
    def states(self) -> float:
        """What is held between steps."""
        return self.param + self.grad + self.main

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.reducing + self.activations + self.working + self.scratch

    def terms(self) -> dict[str, float]:
        """Every term by name; they add up to the total."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class _Unit:
    """What one unit (of `count` equal ones) adds while it is used."""

    count: int
    gathered: int
    reducing: int
    saved: int
    working: int


def rank_memory(
    profiles: Sequence[UnitProfile],
    cells: Sequence[Cell],
    shape: MeshShape,
    element: ElementBytes,
    held: Activations,
    *,
    micro_batches_held: int = 1,
    overlap: bool = True,
    scratch: bool = False,
) -> RankMemory:
    """Peak of a stage whose units are `profiles`, with a cell each, and `micro_batches_held` micro-batches in flight.

    `overlap`: parameters are prefetched. `scratch`: the collectives are this package's own and keep receive buffers.
    """
    param = grad = main = 0.0
    buffer = 0
    units = []
    for profile, cell in zip(profiles, cells, strict=True):
        buffers = _buffers(profile, cell, shape, element)
        param += profile.count * buffers.states.param
        grad += profile.count * buffers.states.grad
        main += profile.count * (buffers.states.main - buffers.states.shared)
        buffer = max(buffer, _scratch(buffers.whole, cell, shape) if scratch else 0)
        units.append(_unit(profile, buffers, held))
    peak = _peak(units, micro_batches_held, prefetch=overlap and shape.dp > 1)
    return RankMemory(
        param=param,
        grad=grad,
        main=main,
        gathered=peak[0],
        reducing=peak[1],
        activations=peak[2],
        working=peak[3],
        scratch=buffer,
    )


@dataclass(frozen=True)
class _Buffers:
    """Bytes of one unit's buffers: resting states, whole parameters and gradients where they are sharded, the largest parameter."""

    states: MemoryBytes
    gathered: int
    reducing: int
    whole: int
    largest: int


@functools.lru_cache(maxsize=8192)
def _buffers(profile: UnitProfile, cell: Cell, shape: MeshShape, element: ElementBytes) -> _Buffers:
    trainable, frozen = profile.padded(shape.dp)
    states = unit_memory(UnitSize(cell=cell, trainable=trainable, frozen=frozen), shape, element)
    sharded, reduced = (shape.size(*placement) > 1 for placement in (cell.param, cell.grad))
    whole = element.reduce * trainable
    gathered = element.param * (trainable + frozen) if sharded else 0
    return _Buffers(states, gathered, whole if reduced else 0, whole, element.param * max(profile.trainable, default=0))


def _unit(profile: UnitProfile, buffers: _Buffers, held: Activations) -> _Unit:
    backward = profile.gathers > 1
    return _Unit(
        count=profile.count,
        gathered=buffers.gathered,
        reducing=buffers.reducing,
        saved=held.saved(profile.kind) if backward else 0,
        working=held.working(profile.kind, buffers.largest) if backward else 0,
    )


def _peak(units: Sequence[_Unit], micro_batches_held: int, *, prefetch: bool) -> tuple[int, int, int, int]:
    """(gathered, reducing, activations, working) at the largest sum; of equal units only the first and the last two are looked at."""
    everything = sum(unit.count * unit.saved for unit in units)
    flat = [(unit, at) for unit in units for at in _ends(unit.count)]
    before = 0
    saved_until = []
    for unit in units:
        saved_until += [before + (at + 1) * unit.saved for at in _ends(unit.count)]
        before += unit.count * unit.saved
    best = (0, 0, 0, 0)
    for index, (unit, _) in enumerate(flat):
        previous = flat[index - 1][0].gathered if index and prefetch else 0
        # In a chain of backwards the two reductions before the last unit's are those of the first two units.
        waiting = [flat[(index + offset) % len(flat)][0].reducing for offset in range(1, 1 + min(PENDING_REDUCTIONS, len(flat) - 1))]
        held = (micro_batches_held - 1) * everything + saved_until[index]
        best = max(best, (unit.gathered + previous, unit.reducing + sum(waiting), held, unit.working), key=sum)
    return best


def _ends(count: int) -> list[int]:
    return list(range(count)) if count <= 4 else [0, 1, count - 2, count - 1]


@functools.lru_cache(maxsize=8192)
def _scratch(whole: int, cell: Cell, shape: MeshShape) -> int:
    """Receive buffers of HO-Ring's reductions of one unit of `whole` bytes: a chunk per ring, pieces per peer (`collectives.ho_ring`).

    Pieces are 4 MiB where there is one level of links, else a third of a chunk, 512 KiB to 2 MiB; two are in flight.
    """
    rings, peers = 0, 0
    for op in operations(cell, accumulation=1):
        if op.operation not in ("reduce_scatter", "all_reduce") or op.phase not in ("gradient", "sync_g"):
            continue
        groups, members = (shape.size(axis) if axis in op.axes else 1 for axis in ("dp_inter", "dp_intra"))
        if groups * members == 1:
            continue
        chunk = whole // shape.size(*op.within) // (groups * members)
        largest = 4 << 20 if min(groups, members) == 1 else min(max(-(-chunk // 3), 1 << 19), 2 << 20)
        piece = min(chunk, largest)
        in_flight = min(2, groups * max(1, -(-chunk // piece)))
        rings = max(rings, chunk if groups > 1 else 0)
        peers = max(peers, piece * in_flight * (members - 1))
    return rings + peers
