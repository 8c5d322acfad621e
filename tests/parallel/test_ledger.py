"""What the engine sends and holds, counted while it runs, equals the formulas: exactly, in every cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from paro_lm.config import OptimConfig
from paro_lm.model.spec import Unit
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.collectives.grid import AUTO_BYTES
from paro_lm.parallel.cost import ElementBytes, UnitSize, memory, step_bytes, wire_algorithm
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import ALL_CELLS, Cell
from paro_lm.parallel.unit_buffer import Dtypes
from paro_lm.testing import run_distributed

MIXED = Dtypes(param=torch.bfloat16, grad=torch.float32, reduce=torch.float32, main=torch.float32)
FLOAT = Dtypes()
MIXED_BYTES, FLOAT_BYTES = ElementBytes(), ElementBytes(param=4)


class Toy(nn.Module):
    """A frozen prefix, a block of which half is frozen, a block whose sizes do not divide, a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix = nn.Linear(7, 5, dtype=dtype).requires_grad_(False)
        self.adapted = nn.Sequential(nn.Linear(5, 9, dtype=dtype).requires_grad_(False), nn.Linear(9, 5, dtype=dtype))
        self.block = nn.Linear(5, 57, dtype=dtype)
        self.head = nn.Linear(57, 3, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.adapted(self.prefix(x)))).sum()

    def units(self) -> list[Unit]:
        return [Unit(name=name, modules=(module,)) for name, module in self.named_children()]


def sizes_of(engine: ShardingEngine) -> list[UnitSize]:
    """Padded sizes of the units, from the layouts; every unit but the frozen prefix is needed in forward and backward."""
    names = [name for name, _ in engine.model.named_children()]
    sizes = zip(names, engine.unit_sizes(), strict=True)
    return [replace(size, gathers=1 if name == "prefix" else 2) for name, size in sizes]


def measure(
    mesh: ParallelMesh, grid: GridCollectives, cell: Cell, *, accumulation: int, dtypes: Dtypes, element: ElementBytes
) -> list[str]:
    """Train and count the last step (with one micro-batch, the second); differences between what was counted and the formulas."""
    engine = ShardingEngine(
        model := Toy(dtypes.param), model.units(), mesh=mesh, cells=cell, dtypes=dtypes, gather_collectives=grid, reduce_collectives=grid,
        overlap=False,
    )  # fmt: skip
    optimizer = AdamW(engine, OptimConfig(), decays=lambda name: True)
    assert grid.ledger is not None
    for _ in range(2 if accumulation == 1 else 1):
        engine.wait()
        grid.ledger.reset()
        for index in range(accumulation):
            with engine.micro_batch(last=index == accumulation - 1):
                engine.model(torch.ones(2, 7, dtype=dtypes.param)).backward()
        engine.finish_gradients()
        optimizer.step(0.1)
        engine.sync_parameters()
    engine.wait()
    sent = {axis: grid.ledger.by_axis().get(axis, 0) for axis in DATA_AXES}
    last_of_group = mesh.coordinate("dp_intra") == mesh.size("dp_intra") - 1
    algorithm = wire_algorithm(grid.algorithm, gloo=True, auto_bytes=AUTO_BYTES)
    units = sizes_of(engine)
    expected = step_bytes(units, mesh.shape, element, accumulation=accumulation, algorithm=algorithm, last_of_group=last_of_group)
    wrong = [] if sent == expected else [f"{cell} {grid.algorithm} accumulation {accumulation}: sent {sent}, formula {expected}"]
    held, formula = engine.state_bytes(), memory(units, mesh.shape, element)
    moments = optimizer.state_bytes()
    found = (held["param"], held["grad"], held["main"] + moments, held["shared"])
    if found != (formula.param, formula.grad, formula.main, formula.shared):
        wrong.append(f"{cell}: holds {found}, formula {formula}")
    engine.close()
    return wrong


def all_cells(rank: int, world_size: int, group_size: int) -> list[str]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=group_size)
    grid = GridCollectives(mesh, algorithm="ho_ring", ledger=ByteLedger())
    wrong = []
    for cell in ALL_CELLS:
        for accumulation in (1, 3):
            wrong += measure(mesh, grid, cell, accumulation=accumulation, dtypes=MIXED, element=MIXED_BYTES)
    for letters in ("NNN", "III", "GGG", "IIG"):  # equal dtypes: main may be the parameters themselves
        wrong += measure(mesh, grid, Cell.parse(letters), accumulation=1, dtypes=FLOAT, element=FLOAT_BYTES)
    for algorithm in ("native", "ring", "hierarchical", "auto"):
        grid = GridCollectives(mesh, algorithm=algorithm, ledger=ByteLedger())
        for letters in ("NNN", "NIG", "IGG", "GGN"):
            wrong += measure(mesh, grid, Cell.parse(letters), accumulation=2, dtypes=MIXED, element=MIXED_BYTES)
    return wrong


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_bytes_sent_and_held_equal_the_formulas(group_size: int) -> None:
    for rank, wrong in enumerate(run_distributed(all_cells, 4, group_size)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)
