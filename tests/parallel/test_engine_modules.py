"""What modules may do under the engine: checkpoint, be called twice, run in another order, be frozen and thawed. Float64, 1e-12."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.testing import run_distributed
from tests.parallel.bag import BF16, Bag, backward, bag_engine, sgd
from tests.parallel.test_engine import OPTIM, Toy, batches, build, make_grids, train, whole

STEPS = 2


class Recomputing(Toy):
    """Blocks keep their inputs only."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


class Looping(Toy):
    """Blocks are called several times in one forward, one of them again after later ones."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for index in (0, 1, 0, 1, 2, 0):
            hidden = self.layers[index](hidden)
        return nn.functional.cross_entropy(self.head(hidden[:-1]), tokens[1:], reduction="sum")


class RecomputingLoop(Recomputing, Looping):
    pass


class Branching(Toy):
    """Two branches whose order is the rank's, so gradients become ready in another order on every other rank."""

    swapped = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        order = (1, 0) if self.swapped else (0, 1)
        outputs = {index: self.layers[index](hidden) for index in order}
        hidden = self.layers[2](outputs[0] + outputs[1])
        return nn.functional.cross_entropy(self.head(hidden[:-1]), tokens[1:], reduction="sum")


class Frozen(Toy):
    """Frozen: what comes first, a whole unit in the middle, half of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)


class FrozenRecomputing(Frozen, Recomputing):
    def __init__(self) -> None:
        Recomputing.__init__(self)
        self.embedding.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].up.requires_grad_(False)


def three_cells(unit: str) -> Cell:
    return Cell.parse({"embedding": "NNG", "layers.0": "IIG", "layers.1": "GGG", "layers.2": "IIG", "head": "NIG"}[unit])


def decays(name: str) -> bool:
    return "bias" not in name and "scale" not in name


def plain_steps(model: Toy, data: torch.Tensor) -> list[float]:
    """The loop on one process, with an optimizer of its own for what is trainable."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trainable.items() if decays(name) is flag], "weight_decay": decay}
        for flag, decay in ((True, OPTIM.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    losses = []
    for samples in data:
        loss = sum(model(sample) for sample in samples) / (samples.shape[0] * 5)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trainable.values()]).norm()  # type: ignore[union-attr]
        if norm > OPTIM.max_norm:
            for p in trainable.values():
                p.grad *= OPTIM.max_norm / norm
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def compare(case: str, got: tuple[list[float], dict[str, torch.Tensor]], want: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-12, msg=lambda m: f"{case}: {m}")
    assert got[1].keys() == want[1].keys(), case
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{case} {n}: {m}")


def run_plain(make: Callable[[], Toy], data: torch.Tensor) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make()
    losses = plain_steps(model, data)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


MIXED = "NNG, IIG, GGG and NIG"
CELLS = ("NNN", "NIG", "IIG", "GGN", MIXED)
CASES: dict[type[Toy], tuple[str, ...]] = {
    Recomputing: CELLS,
    Looping: CELLS,
    RecomputingLoop: ("GGG", MIXED),
    Branching: ("NNG", "NIG", "NGN"),
    Frozen: CELLS,
    FrozenRecomputing: ("GGG", MIXED),
}


def _models(rank: int, world_size: int, data: torch.Tensor) -> list:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    grids = make_grids(mesh)
    result = []
    for kind, cells in CASES.items():
        for letters in cells:
            model = kind()
            model.swapped = rank % 2 == 1  # type: ignore[attr-defined]
            engine = build(model, mesh, grids, three_cells if letters == MIXED else Cell.parse(letters))
            optimizer = AdamW(engine, OPTIM, decays=decays)
            losses = train(engine, optimizer, data, 3)
            result.append((kind, letters, losses, whole(engine), held_by_frozen(engine)))
            engine.close()
    return result


def held_by_frozen(engine: ShardingEngine) -> list[str]:
    """Frozen parameters have neither gradients nor main parameters; trainable ones have both."""
    problems = []
    frozen = {name for name, p in engine.model.named_parameters() if not p.requires_grad}
    for buffer in engine.buffers():
        names = {slot.name for slot in buffer.layout.slots}
        if buffer.trainable:
            problems += [f"{names & frozen} has gradients"] if names & frozen or buffer.grad is None or buffer.main is None else []
        else:
            problems += (
                [f"{names} holds more than parameters"] if names - frozen or buffer.grad is not None or buffer.main is not None else []
            )
    return problems


def test_modules_equal_one_process() -> None:
    data = batches(steps=STEPS, samples=12)
    want = {kind: run_plain(kind, data) for kind in CASES}
    results = run_distributed(_models, 4, data)
    for rank in (0, 3):
        assert len(results[rank]) == sum(map(len, CASES.values()))
        for kind, letters, losses, parameters, problems in results[rank]:
            compare(f"{kind.__name__} {letters}", (losses, parameters), want[kind])
            assert not problems, (kind, letters, problems)


# ------------------------------------------------------------------------------------------------ overlap


def _overlap(rank: int, world_size: int, data: torch.Tensor) -> list[str]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    problems = []
    for algorithm in ("native", "ho_ring"):
        grids = make_grids(mesh, algorithm)
        for cell in KEPT_CELLS if algorithm == "native" else map(Cell.parse, ("IIG", "GGG")):
            runs = []
            for overlap in (True, False):
                engine = build(Recomputing(), mesh, grids, cell, overlap=overlap)
                losses = train(engine, AdamW(engine, OPTIM, decays=decays), data, 2)
                runs.append((losses, whole(engine)))
                engine.close()
            same = runs[0][0] == runs[1][0] and all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
            problems += [] if same else [f"{cell} {algorithm}"]
    return problems


def test_overlap_changes_no_bit() -> None:
    for problems in run_distributed(_overlap, 4, batches(steps=2, samples=8)):
        assert not problems


# ------------------------------------------------------------------------------------------------ freezing and thawing

PHASES: tuple[Callable[[str], bool], ...] = (
    lambda name: name.startswith(("layers.2", "head")),
    lambda name: not name.startswith("layers.0.up"),
    lambda name: True,
    lambda name: name.startswith("layers"),
)


def _thaw(rank: int, world_size: int, data: torch.Tensor) -> list:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    grids = make_grids(mesh)
    result = []
    for letters in CELLS:
        for tied in (False, True) if letters in ("NIG", "GGN") else (False,):
            engine = build(Toy(tied=tied), mesh, grids, three_cells if letters == MIXED else Cell.parse(letters))
            losses, problems = [], []
            for trainable in PHASES:
                before = whole(engine)
                engine.set_trainable(trainable)
                problems += [f"{name} changed" for name, value in whole(engine).items() if not torch.equal(value, before[name])]
                losses += train(engine, AdamW(engine, OPTIM, decays=decays), data, 3)
                problems += held_by_frozen(engine)
            result.append((letters, tied, losses, whole(engine), problems))
            engine.close()
    return result


def test_parameters_are_frozen_and_thawed_between_steps() -> None:
    data = batches(steps=2, samples=12)
    want = {}
    for tied in (False, True):
        model, losses = Toy(tied=tied), []
        for trainable in PHASES:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trainable(name))
            losses += plain_steps(model, data)
        want[tied] = losses, {name: p.detach() for name, p in model.named_parameters()}
    for results in run_distributed(_thaw, 4, data):
        for letters, tied, losses, parameters, problems in results:
            compare(f"{letters} tied {tied}", (losses, parameters), want[tied])
            assert not problems, (letters, problems)


def _thaw_bf16(rank: int, world_size: int) -> list[str]:
    """Main parameters of what stays trainable are kept to the last bit, not rounded to bf16 by the way."""
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    problems = []
    for cell in KEPT_CELLS:
        model = Bag({"part": (19,), "other": (3,)}, torch.bfloat16)
        model.part.spare.requires_grad_(False)
        engine = bag_engine(model, mesh, make_grids(mesh), cell, dtypes=BF16)
        backward(engine, {"part": 1.0 if mesh.index(*DATA_AXES) == 0 else 0.0, "other": 0.0})
        sgd(engine, 2.0**-12)
        engine.set_trainable(lambda name: True)
        for shard in (shard for name, shard in engine.parameter_shards().items() if name == "part.w"):
            want = torch.arange(1, 20, dtype=torch.float32)[shard.start : shard.stop] - 2.0**-12
            problems += [] if torch.equal(shard.data, want) else [f"{cell}: {shard.data} instead of {want}"]
        engine.close()
    return problems


def test_thawing_keeps_main_parameters_exactly() -> None:
    for problems in run_distributed(_thaw_bf16, 4):
        assert not problems
