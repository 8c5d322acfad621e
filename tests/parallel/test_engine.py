"""The engine in every cell equals one process: values of all main parameters and losses, float64, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paro_lm.config import OptimConfig
from paro_lm.model.spec import Unit
from paro_lm.optim.clip import clip_coefficient, grad_norm, scale_gradients
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import ALL_CELLS, Cell
from paro_lm.parallel.unit_buffer import Dtypes
from paro_lm.testing import run_distributed

FP64 = Dtypes(param=torch.float64, grad=torch.float64, reduce=torch.float64, main=torch.float64)
OPTIM = OptimConfig(lr=0.05, weight_decay=0.1, max_norm=0.5)


class Block(nn.Module):
    """Odd sizes, a bias, and a weight that is used twice in a forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(width, inner), nn.Linear(inner, width), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)) * torch.sigmoid(self.up(x)))


class Toy(nn.Module):
    def __init__(self, *, vocab: int = 57, width: int = 5, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([Block(width, 3), Block(width, 7), Block(width, 1)])
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.tied = tied
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3

    def units(self) -> list[Unit]:
        layers = [Unit(name=f"layers.{i}", modules=(layer,)) for i, layer in enumerate(self.layers)]
        if self.tied:
            return [Unit(name="embedding", modules=(self.embedding, self.head)), *layers]
        return [Unit(name="embedding", modules=(self.embedding,)), *layers, Unit(name="head", modules=(self.head,))]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden[:-1]), tokens[1:], reduction="sum")


def batches(steps: int, samples: int, vocab: int = 57) -> torch.Tensor:
    return torch.randint(0, vocab, (steps, samples, 6), generator=torch.Generator().manual_seed(1))


def reference(make: Callable[[], Toy], data: torch.Tensor) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the plain loop on one process."""
    model = make()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    losses = []
    for samples in data:
        loss = sum(model(sample) for sample in samples) / (samples.shape[0] * 5)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if norm > OPTIM.max_norm:
            for p in model.parameters():
                p.grad *= OPTIM.max_norm / norm
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def make_grids(mesh: ParallelMesh, algorithm: str = "native") -> tuple[GridCollectives, GridCollectives]:
    first, second = (GridCollectives(mesh, algorithm=algorithm, ledger=ByteLedger()) for _ in range(2))
    return first, second


def build(
    model: Toy,
    mesh: ParallelMesh,
    grids: tuple[GridCollectives, GridCollectives],
    cells: Cell | Callable[[str], Cell],
    *,
    dtypes: Dtypes = FP64,
    overlap: bool = True,
) -> ShardingEngine:
    return ShardingEngine(
        model,
        model.units(),
        mesh=mesh,
        cells=cells,
        dtypes=dtypes,
        gather_collectives=grids[0],
        reduce_collectives=grids[1],
        overlap=overlap,
    )


def train(engine: ShardingEngine, optimizer: AdamW, data: torch.Tensor, accumulation: int) -> list[float]:
    mesh = engine.mesh
    rank, size = mesh.index(*DATA_AXES), mesh.size(*DATA_AXES)
    losses = []
    for samples in data:
        mine, total = samples[rank::size], 0.0
        for i, part in enumerate(mine.chunk(accumulation)):
            with engine.micro_batch(last=i == accumulation - 1):
                loss = sum(engine.model(sample) for sample in part) / (samples.shape[0] * 5)
                loss.backward()
                total += loss.item()
        engine.finish_gradients()
        scale_gradients(engine, clip_coefficient(grad_norm(engine), OPTIM.max_norm))
        optimizer.step(OPTIM.lr)
        engine.sync_parameters()
        losses.append(mesh.sum(total, DATA_AXES))
    engine.wait()
    return losses


def whole(engine: ShardingEngine) -> dict[str, torch.Tensor]:
    with engine.unsharded() as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _all_cells(
    rank: int, world_size: int, group_size: int, algorithm: str, data: torch.Tensor, tied: bool, accumulations: tuple[int, ...]
) -> list:
    result = []
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=group_size)
    grids = make_grids(mesh, algorithm)
    for accumulation in accumulations:
        for cell in ALL_CELLS:
            model = Toy(tied=tied)
            engine = build(model, mesh, grids, cell)
            optimizer = AdamW(engine, OPTIM, decays=lambda name: "bias" not in name and "scale" not in name)
            losses = train(engine, optimizer, data, accumulation)
            result.append((str(cell), accumulation, losses, whole(engine)))
            engine.close()
    return result


def check(world_size: int, group_size: int, algorithm: str, tied: bool, *, accumulations: tuple[int, ...] = (1, 3), steps: int = 6) -> None:
    data = batches(steps=steps, samples=3 * world_size)
    losses, parameters = reference(lambda: Toy(tied=tied), data)
    for rank_results in run_distributed(_all_cells, world_size, group_size, algorithm, data, tied, accumulations, timeout=280.0):
        assert len(rank_results) == 27 * len(accumulations)
        for cell, accumulation, got_losses, got in rank_results:
            context = f"{cell} accumulation {accumulation}"
            torch.testing.assert_close(got_losses, losses, rtol=0, atol=1e-12, msg=lambda m, c=context: f"{c}: {m}")
            assert got.keys() == parameters.keys()
            for name, value in parameters.items():
                torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12, msg=lambda m, c=context, n=name: f"{c} {n}: {m}")


def test_every_cell_equals_one_process() -> None:
    check(4, 2, "native", False, steps=3)


@pytest.mark.parametrize(("group_size", "algorithm"), [(1, "native"), (4, "native"), (2, "ho_ring")])
def test_every_cell_with_a_tied_weight_in_other_groups(group_size: int, algorithm: str) -> None:
    check(4, group_size, algorithm, True, accumulations=(3,), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("world_size", "group_size", "algorithm"),
    [(4, 1, "native"), (4, 4, "native"), (4, 2, "ho_ring"), (8, 2, "native"), (8, 4, "native"), (8, 2, "ho_ring"), (8, 4, "ho_ring")],
)
def test_every_cell_in_every_grid(world_size: int, group_size: int, algorithm: str, tied: bool) -> None:
    check(world_size, group_size, algorithm, tied)
