"""What the rest of the system needs to know about a model's parameters and units, and how initial values are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NO_AXES: frozenset[str] = frozenset()
TP_AXES: frozenset[str] = frozenset({"tp"})
ROWS_PER_DRAW = 64  # rows drawn from one seed; part of the definition of the initial values


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter, as this rank holds it.

    `shape` is global (vocabularies with their padded rows); the rank's box is `offset`, `local_shape`. `partial_axes` are the mesh
    axes over which its gradient is a partial sum, `replicated_axes` those whose ranks each hold a full copy. Rows from `valid_rows`
    on are padding and stay zero.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    init: str = "normal"  # normal | zeros | ones
    std: float = 0.0
    decay: bool = True
    partial_axes: frozenset[str] = NO_AXES
    replicated_axes: frozenset[str] = NO_AXES
    valid_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered, freed and reduced as one: the parameters of `modules`, each of which is called once per forward."""

    name: str
    modules: tuple[nn.Module, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of the unit once, in the order of its modules."""
        return list({id(p): p for module in self.modules for p in module.parameters()}.values())


class SpecifiedModule(nn.Module):
    """A module that describes the parameters it holds itself (not those of its children)."""

    def specs(self) -> dict[str, ParameterSpec]:
        raise NotImplementedError


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that is a function of `parts` only; equal on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_value(name: str, spec: ParameterSpec, seed: int) -> Tensor:
    """The initial values of this rank's box of a parameter: fp32, on the CPU.

    A function of (seed, name) and the position in the global tensor only, so boxes of any layout agree bitwise. Full rows are drawn
    block by block and cut, so at most `ROWS_PER_DRAW` full rows exist at a time. Rows of padding are zero.
    """
    if spec.init == "zeros":
        return torch.zeros(spec.local_shape)
    if spec.init == "ones":
        return torch.ones(spec.local_shape)
    assert spec.init == "normal", (name, spec)
    value = torch.zeros(spec.local_shape)
    first_row, first_column = spec.offset
    columns = slice(first_column, first_column + spec.local_shape[1])
    last_row = min(first_row + spec.local_shape[0], spec.shape[0] if spec.valid_rows is None else spec.valid_rows)
    for block in range(first_row // ROWS_PER_DRAW, -(-last_row // ROWS_PER_DRAW)) if last_row > first_row else ():
        generator = torch.Generator().manual_seed(derive_seed(seed, name, block))
        drawn = torch.randn(ROWS_PER_DRAW, spec.shape[1], generator=generator)
        start, stop = max(first_row, block * ROWS_PER_DRAW), min(last_row, (block + 1) * ROWS_PER_DRAW)
        value[start - first_row : stop - first_row] = drawn[start - block * ROWS_PER_DRAW : stop - block * ROWS_PER_DRAW, columns]
    return value.mul_(spec.std)


@torch.no_grad()
def initialize(parameters: Iterable[tuple[str, nn.Parameter]], specs: Mapping[str, ParameterSpec], seed: int) -> None:
    """Fill materialised parameters, in place, with their initial values (converted to each parameter's dtype and device)."""
    for name, parameter in parameters:
        parameter.copy_(initial_value(name, specs[name], seed))
