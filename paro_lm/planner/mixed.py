"""Mixed plans: a cell per unit, so that a memory budget between two uniform cells is used.

The states of a unit are additive and so, nearly, is its time: units choose among the kept cells by dynamic programming over the budget
(multiple-choice knapsack, exact up to the grid of bytes). Buffers that are shared by units (gathered parameters, whole gradients)
are not additive; the search runs with several allowances for them, and every proposal is evaluated by the full model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paro_lm.parallel.cost import UnitSize, unit_memory
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner.candidates import Candidate, Evaluator
from paro_lm.planner.inventory import UnitProfile
from paro_lm.planner.timing import UnitWork

GRID = 4000
MIN_GAIN = 0.005
"""A mixed plan is offered from this gain on: less is within what a prediction can tell."""
ALLOWANCES = 12


def best_mixed(evaluators: Sequence[Evaluator], best: Candidate, budget: float) -> Candidate | None:
    """The fastest mixed plan that fits the budget under one of these layouts; None when none is MIN_GAIN faster than `best`.

    Only without pipeline stages, whose units would each need a search of their own.
    """
    found: Candidate | None = None
    limit = best.time.total / (1 + MIN_GAIN)
    for evaluator in evaluators:
        if evaluator.layout.shape.pp > 1:
            continue
        for proposal in _proposals(evaluator, budget):
            candidate = _evaluate(evaluator, proposal, best, budget)
            if candidate.fits and candidate.time.total < limit and candidate.unit_cells:
                found, limit = candidate, candidate.time.total
    return found


def _proposals(evaluator: Evaluator, budget: float) -> list[list[Cell]]:
    """Cells per unit in forward order, from a knapsack for each allowance of shared buffers, in two orders of the blocks."""
    units = _units(evaluator)
    times, states = _tables(evaluator, units)
    uniform = [evaluator.memory(cell) for cell in KEPT_CELLS]
    buffers = [memory.total - memory.states for memory in uniform]
    result: list[list[Cell]] = []
    for allowance in np.linspace(min(buffers), max(buffers), ALLOWANCES):
        choice = knapsack(times, states, budget - float(allowance))
        if choice is None:
            continue
        cells = [KEPT_CELLS[index] for index in choice]
        blocks = [at for at, profile in enumerate(units) if profile.kind == "block"]
        for descending in (False, True):
            # Activations are at their fullest in the backward of the last blocks: it may pay to have no buffers there.
            ordered = sorted(
                (cells[at] for at in blocks), key=lambda cell: (len(cell.param), len(cell.grad), len(cell.main)), reverse=descending
            )
            arranged = list(cells)
            for at, cell in zip(blocks, ordered, strict=True):
                arranged[at] = cell
            if arranged not in result:
                result.append(arranged)
    return result


def knapsack(times: np.ndarray, weights: np.ndarray, budget: float) -> list[int] | None:
    """The choice per row that has the smallest sum of `times` with a sum of `weights` <= budget; None when there is none.

    Exact for weights rounded up to budget / GRID.
    """
    if budget <= 0 or weights.min(axis=1).sum() > budget:
        return None
    # Rounding down the common minimum keeps the rounding errors to what choices differ in.
    base = weights.min(axis=1)
    spare = budget - base.sum()
    step = max(spare / GRID, 1.0)
    sizes = np.ceil((weights - base[:, None]) / step - 1e-9).astype(np.int64)
    capacity = int(spare / step + 1e-9)
    reach = np.zeros(capacity + 1)
    picks = []
    for row_times, row_sizes in zip(times, sizes, strict=True):
        options = np.full((len(row_times), capacity + 1), np.inf)
        for index, (seconds, size) in enumerate(zip(row_times, row_sizes, strict=True)):
            if size <= capacity:
                options[index, size:] = reach[: capacity + 1 - size] + seconds
        picks.append(options.argmin(axis=0))
        reach = options.min(axis=0)
    at, result = capacity, []
    for pick, row_sizes in zip(reversed(picks), reversed(sizes), strict=True):
        index = int(pick[at])
        result.append(index)
        at -= int(row_sizes[index])
    return result[::-1]


def _units(evaluator: Evaluator) -> list[UnitProfile]:
    (_, profiles), *_ = evaluator.stages
    return [unit for profile in profiles for unit in profile.expand()]


def _tables(evaluator: Evaluator, units: Sequence[UnitProfile]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of states that each unit adds under each kept cell."""
    shape, element, work = evaluator.layout.shape, evaluator.element, evaluator.work[0]
    rows: list[tuple[list[float], list[float]]] = []
    (_, profiles), *_ = evaluator.stages
    for position, profile in enumerate(profiles):
        trainable, frozen = profile.padded(shape.dp)
        seconds, held = [], []
        for cell in KEPT_CELLS:
            one = unit_memory(UnitSize(cell=cell, trainable=trainable, frozen=frozen), shape, element)
            held.append(float(one.total))
            seconds.append(_marginal(evaluator, cell, work, position))
        rows += [(seconds, held)] * profile.count
    assert len(rows) == len(units)
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def _marginal(evaluator: Evaluator, cell: Cell, work: Sequence[UnitWork], position: int) -> float:
    """Seconds that one unit adds to a step in which every unit has this cell."""
    unit = work[position]
    whole = evaluator.time(cell).total
    if unit.count > 1:
        fewer = [*work[:position], replace(unit, count=unit.count - 1), *work[position + 1 :]]
    else:
        fewer = [*work[:position], *work[position + 1 :]]
    return whole - evaluator.time(cell, fewer).total if fewer else whole


def _evaluate(evaluator: Evaluator, cells: Sequence[Cell], best: Candidate, budget: float) -> Candidate:
    """The full model's figures of a proposal."""
    units = _units(evaluator)
    (_, profiles), *_ = evaluator.stages
    work = [replace(unit, count=1) for unit in evaluator.work[0] for _ in range(unit.count)]
    names = [unit.name for unit in units]
    counts = {cell: sum(other == cell for other in cells) for cell in cells}
    default = max(counts, key=lambda cell: counts[cell])
    return replace(
        best,
        cell=default,
        layout=evaluator.layout,
        memory=evaluator.memory(cells, units),
        budget=budget,
        time=evaluator.time(cells, work),
        unit_cells={name: cell for name, cell in zip(names, cells, strict=True) if cell != default},
    )
