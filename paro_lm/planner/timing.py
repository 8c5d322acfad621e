"""Time of one global step as the engine runs it, term by term.

Per micro-batch the forward gathers unit i+1 while it computes unit i; the backward gathers unit i-1 and reduces unit i+1 beside unit
i; gradients of the last micro-batch go on to the optimizer's placement beside the backward too; updated parameters travel beside the
next forward (before any other gather: the queue is first in, first out). What runs side by side takes

    max(a, b) + (1 - overlap) min(a, b)

with `overlap` of the cluster, 1 = everything hides. Tensor-parallel collectives and messages between stages hide behind nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from paro_lm.parallel.axes import AXES, DATA_AXES
from paro_lm.parallel.cost import ElementBytes, operations
from paro_lm.parallel.sharding import Cell
from paro_lm.planner.links import IDLE, Busy, Links


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """`count` equal units and what a rank computes for one of them: seconds per micro-batch, and the bytes of its tp collectives."""

    name: str
    trainable: int
    frozen: int
    gathers: int
    count: int = 1
    forward: float
    backward: float
    recompute: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step. Communication terms are full, `overlap` is what hides of them; `total` is the sum less `overlap`.

    compute (forward, backward), recompute (checkpointing), tp, p2p (between stages), param (gathers of forward and backward),
    gradient (reductions of micro-batches), sync_g (g -> os), sync_p (os -> p), optimizer, control (norm, flags, token count), bubble.
    """

    compute: float
    recompute: float = 0.0
    tp: float = 0.0
    p2p: float = 0.0
    param: float = 0.0
    gradient: float = 0.0
    sync_g: float = 0.0
    sync_p: float = 0.0
    optimizer: float = 0.0
    control: float = 0.0
    bubble: float = 0.0
    overlap: float = 0.0

    @property
    def communication(self) -> float:
        """Seconds of the data-parallel collectives, hidden or not."""
        return self.param + self.gradient + self.sync_g + self.sync_p

    @property
    def total(self) -> float:
        computing = self.compute + self.recompute + self.tp + self.p2p + self.optimizer + self.control + self.bubble
        return computing + self.communication - self.overlap

    def terms(self) -> dict[str, float]:
        """Every term by name, `overlap` negative: they add up to the total."""
        return {item.name: getattr(self, item.name) * (-1 if item.name == "overlap" else 1) for item in fields(self)}


@dataclass(frozen=True)
class UnitCosts:
    """Collectives of one unit under its cell: one gather, the reduction of a micro-batch, the two synchronisations."""

    gather: Busy
    gradient: Busy
    sync_g: Busy
    sync_p: Busy


class StageCosts:
    """Costs of units under cells on one mesh, remembered: equal units and other micro-batches ask again."""

    def __init__(self, links: Links, element: ElementBytes) -> None:
        self.links, self.element = links, element
        self._known: dict[tuple[Cell, int, int], UnitCosts] = {}

    def of(self, unit: UnitWork, cell: Cell) -> UnitCosts:
        key = (cell, unit.trainable, unit.frozen)
        if key not in self._known:
            self._known[key] = self._of(unit, cell)
        return self._known[key]

    def _of(self, unit: UnitWork, cell: Cell) -> UnitCosts:
        costs = {"param": IDLE, "gradient": IDLE, "sync_g": IDLE, "sync_p": IDLE}
        for op in operations(cell, accumulation=1, gathers=1):
            width = self.element.reduce if op.phase in ("gradient", "sync_g") else self.element.param
            for numel in (unit.trainable, unit.frozen if op.phase == "param" else 0):
                if numel:
                    whole = numel * width / self.links.shape.size(*op.within)
                    costs[op.phase] += self.links.collective(op.operation, op.axes, whole)
        return UnitCosts(costs["param"], costs["gradient"], costs["sync_g"], costs["sync_p"])


def stage_time(
    units: Sequence[UnitWork],
    cells: Sequence[Cell],
    stage: StageCosts,
    *,
    accumulation: int,
    optimizer: float = 0.0,
    p2p: float = 0.0,
    virtual_stages: int = 1,
) -> StepTime:
    """A step of one stage; `cells` has one cell per entry of `units`. `p2p` is the time of one message between stages.

    The bubble of pp stages with v chunks is (pp - 1) / v micro-batches (1F1B and GPipe: v = 1).
    """
    assert len(units) == len(cells)
    links = stage.links
    costs = [stage.of(unit, cell) for unit, cell in zip(units, cells, strict=True)]
    hidden = links.cluster.overlap
    left, uncovered = _left_over(units, costs)
    forward = _forward(units, costs, hidden, left=left)
    first = _first_forward(units, costs, _forward(units, costs, hidden), hidden)
    backward = _backward(units, costs, hidden, last=False) - uncovered.seconds
    last = _backward(units, costs, hidden, last=True)
    elapsed = first + (accumulation - 1) * (forward + backward) + last
    pp = links.shape.pp
    messages = 2 * accumulation * p2p if pp > 1 else 0.0
    terms = {
        "compute": accumulation * sum(u.count * (u.forward + u.backward - u.recompute) for u in units),
        "recompute": accumulation * sum(u.count * u.recompute for u in units),
        "tp": accumulation * sum(u.count * (u.tp_forward + u.tp_backward) for u in units),
        "param": accumulation * sum(u.count * u.gathers * c.gather.seconds for u, c in zip(units, costs, strict=True)),
        "gradient": accumulation * sum(u.count * c.gradient.seconds for u, c in zip(units, costs, strict=True)),
        "sync_g": sum(u.count * c.sync_g.seconds for u, c in zip(units, costs, strict=True)),
        "sync_p": sum(u.count * c.sync_p.seconds for u, c in zip(units, costs, strict=True)),
    }
    return StepTime(
        **terms,
        p2p=messages,
        optimizer=optimizer,
        control=links.small_all_reduce(AXES) + 2 * links.small_all_reduce(DATA_AXES),
        bubble=(pp - 1) / virtual_stages * (forward + backward + 2 * p2p),
        overlap=sum(terms.values()) - elapsed,
    )


def _beside(computing: float, communicating: float, overlap: float) -> float:
    shorter = min(computing, communicating)
    return computing + communicating - overlap * shorter


def _forward(units: Sequence[UnitWork], costs: Sequence[UnitCosts], overlap: float, *, left: Busy = IDLE) -> float:
    """The first gather, then every unit beside the gather of the next; `left` reductions of the backward before go on beside all."""
    total = costs[0].gather.seconds
    computing, gathering = 0.0, IDLE
    for index, (unit, cost) in enumerate(zip(units, costs, strict=True)):
        following = costs[index + 1].gather if index + 1 < len(units) else IDLE
        total += (unit.count - 1) * _beside(unit.forward, cost.gather.seconds, overlap)
        total += _beside(unit.forward, following.seconds, overlap) + unit.count * unit.tp_forward
        computing += unit.count * (unit.forward + unit.tp_forward)
        gathering += cost.gather * unit.count
    if not left.seconds:
        return total
    return max(total, _beside(computing, gathering.beside(left), overlap))


def _left_over(units: Sequence[UnitWork], costs: Sequence[UnitCosts]) -> tuple[Busy, Busy]:
    """(reductions that outlast a backward, the part of them that comes from beside the first unit's backward).

    The queue may lag behind by PENDING_REDUCTIONS: the reduction of the first unit, and what its backward does not cover of the second's.
    """
    first = next((index for index, unit in enumerate(units) if unit.gathers > 1), None)
    if first is None:
        return IDLE, IDLE
    after = costs[first].gradient if units[first].count > 1 else costs[first + 1].gradient if first + 1 < len(units) else IDLE
    uncovered = after * max(0.0, 1 - units[first].backward / after.seconds) if after.seconds else IDLE
    return costs[first].gradient + uncovered, uncovered


def _first_forward(units: Sequence[UnitWork], costs: Sequence[UnitCosts], forward: float, overlap: float) -> float:
    """The forward that updated parameters travel beside: unit i starts when it has arrived.

    Publishing comes before every gather in the queue, so the first sharded unit waits for all of it.
    """
    published = sum(unit.count * cost.sync_p.seconds for unit, cost in zip(units, costs, strict=True))
    if not published:
        return forward
    arrived, remaining, latest = 0.0, forward - costs[0].gather.seconds, forward
    for unit, cost in zip(units, costs, strict=True):
        each, step = unit.forward + unit.tp_forward, cost.sync_p.seconds
        if cost.gather.seconds:
            latest = max(latest, published + cost.gather.seconds + remaining)
        else:
            latest = max(latest, arrived + step + remaining, arrived + unit.count * step + remaining - (unit.count - 1) * each)
        arrived += unit.count * step
        remaining -= unit.count * each
    hidden = forward + published - latest
    return latest + (1 - overlap) * hidden


def _backward(units: Sequence[UnitWork], costs: Sequence[UnitCosts], overlap: float, *, last: bool) -> float:
    """The gather of the last unit, then every unit beside the gather of the one before and the reduction of the one after.

    The last micro-batch also finishes the sums, and waits for those of the first unit. Units that no backward passes take no part.
    """
    reductions = [cost.gradient + cost.sync_g if last else cost.gradient for cost in costs]
    total = costs[-1].gather.seconds if units[-1].gathers > 1 else 0.0
    for index in range(len(units) - 1, -1, -1):
        unit, own = units[index], costs[index]
        if unit.gathers < 2:
            break
        before = costs[index - 1].gather if index and units[index - 1].gathers > 1 else IDLE
        after = reductions[index + 1] if index + 1 < len(units) else IDLE
        inner = own.gather.beside(reductions[index])
        if unit.count == 1:
            total += _beside(unit.backward, before.beside(after), overlap)
        else:
            total += (unit.count - 2) * _beside(unit.backward, inner, overlap)
            total += _beside(unit.backward, own.gather.beside(after), overlap) + _beside(
                unit.backward, before.beside(reductions[index]), overlap
            )
        total += unit.count * unit.tp_backward
        if last and (index == 0 or units[index - 1].gathers < 2):
            total += reductions[index].seconds
    return total
