"""Cells of the lattice, placements, and how a buffer gets from one placement to another.

A placement is the set of data axes over which a buffer is sharded: N = {}, I = {dp_intra}, G = {dp_intra, dp_inter}. A cell
names the placements of parameters, gradients and optimizer states. Every collective of every cell is derived here, per axis;
there is no code per strategy. Source: PaRO, arXiv 2310.06003, section 3; the axis algebra is ours.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paro_lm.parallel.axes import DATA_AXES

Placement = frozenset[str]

PLACEMENTS: dict[str, Placement] = {"N": frozenset(), "I": frozenset({"dp_intra"}), "G": frozenset({"dp_intra", "dp_inter"})}
LETTERS: dict[Placement, str] = {placement: letter for letter, placement in PLACEMENTS.items()}
ALIASES = {"ddp": "NNN", "zero1": "NNG", "zero2": "NGG", "zero3": "GGG", "fsdp": "GGG", "mics": "III", "hsdp": "III"}


@dataclass(frozen=True)
class Cell:
    """Placements of parameters, gradients and optimizer states (main parameters and moments)."""

    param: Placement
    grad: Placement
    main: Placement

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read three letters or an alias, in any case. Raises ValueError with the valid choices."""
        letters = ALIASES.get(text.lower(), text.upper())
        if len(letters) != 3 or any(letter not in PLACEMENTS for letter in letters):
            raise ValueError(f"sharding {text!r} is neither three letters of N, I, G nor one of {', '.join(ALIASES)}.")
        return cls(*(PLACEMENTS[letter] for letter in letters))

    def __str__(self) -> str:
        return LETTERS[self.param] + LETTERS[self.grad] + LETTERS[self.main]

    @property
    def is_kept(self) -> bool:
        """The paper's elimination rule: optimizer states at least as finely sharded as parameters and gradients."""
        return self.main >= self.param and self.main >= self.grad

    @property
    def dominating(self) -> Cell:
        """The kept cell that needs less memory than an eliminated one: states as fine as the finer of the other two."""
        return Cell(self.param, self.grad, self.main | self.param | self.grad)


ALL_CELLS = tuple(Cell.parse("".join(letters)) for letters in itertools.product("NIG", repeat=3))
KEPT_CELLS = tuple(cell for cell in ALL_CELLS if cell.is_kept)


def cell_of_unit(unit: str, default: Cell, overrides: Mapping[str, str]) -> Cell:
    """The cell of one unit: the last pattern (fnmatch) that matches its name, else the default."""
    result = default
    for pattern, letters in overrides.items():
        if fnmatch.fnmatchcase(unit, pattern):
            result = Cell.parse(letters)
    return result


def advice(cells: Iterable[Cell]) -> str | None:
    """The one warning about cells in use that the paper eliminates, each with the kept cell that needs less memory; None without any."""
    eliminated = sorted({(str(cell), str(cell.dominating)) for cell in cells if not cell.is_kept})
    if not eliminated:
        return None
    pairs = ", ".join(f"{cell} by {better}" for cell, better in eliminated)
    return (
        "sharding: optimizer states that are sharded more coarsely than parameters or gradients cost memory and save no bytes; "
        f"dominated: {pairs}. Set parallel.sharding (or sharding_overrides) to the better one."
    )


@dataclass(frozen=True)
class Step:
    """One collective of a transition: an operation over one axis, or over both data axes as one HO-Ring collective."""

    operation: str  # "all_gather" | "reduce_scatter" | "all_reduce" | "slice"
    axes: tuple[str, ...]


def transition(source: Placement, target: Placement, *, partial: Iterable[str] = ()) -> tuple[Step, ...]:
    """Steps that bring a buffer from placement `source` to `target`, finishing its sums over the axes in `partial`.

    An axis that leaves is gathered, one that enters is sliced; a partial sum over an axis is reduce-scattered when the target
    is sharded on that axis and all-reduced when it is not. The layout is nested with dp_intra outermost, so a scatter goes
    inside the group first and a gather between groups first. Where both axes take the same step they become one collective.
    """
    partial = set(partial)
    assert not partial & source, "a buffer cannot be partial over an axis on which it is sharded"
    gathers = [Step("all_gather", (axis,)) for axis in ("dp_inter", "dp_intra") if axis in source - target]
    scatters = [
        Step("reduce_scatter" if axis in partial else "slice", (axis,)) for axis in ("dp_intra", "dp_inter") if axis in target - source
    ]
    reduces = [Step("all_reduce", (axis,)) for axis in ("dp_intra", "dp_inter") if axis in partial - target]
    # Scatters first, gathers last: what is reduced between them is then as small as it can be.
    return _fuse(scatters) + _fuse(reduces) + _fuse(gathers)


def _fuse(steps: list[Step]) -> tuple[Step, ...]:
    if len(steps) == 2 and steps[0].operation == steps[1].operation:
        return (Step(steps[0].operation, DATA_AXES),)
    return tuple(steps)


def accumulate_steps(cell: Cell) -> tuple[Step, ...]:
    """Steps of one micro-batch: a full local gradient, partial over both data axes, into the gradient placement."""
    return tuple(Step("reduce_scatter", step.axes) for step in transition(frozenset(), cell.grad, partial=cell.grad))


def finish_steps(cell: Cell) -> tuple[Step, ...]:
    """Steps from the accumulated gradient, still partial on the axes it is not sharded on, to the optimizer placement."""
    return transition(cell.grad, cell.main, partial=frozenset(DATA_AXES) - cell.grad)


def publish_steps(cell: Cell) -> tuple[Step, ...]:
    """Steps from updated main parameters to the resting placement of the parameters."""
    return transition(cell.main, cell.param)


def unshard_steps(cell: Cell) -> tuple[Step, ...]:
    """Steps from resting parameters to whole ones, for a forward or backward."""
    return transition(cell.param, PLACEMENTS["N"])
