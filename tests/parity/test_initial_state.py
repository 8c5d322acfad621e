"""The first values of every parameter are bitwise the same for every layout; nothing is trained here."""

from __future__ import annotations

import itertools

import pytest
import torch

from paro_lm.build import build_engine, build_model
from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.model.spec import initial_value
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.buffer import FlatShard
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.testing import run_distributed
from paro_lm.validation import validate
from tests.parity.test_layouts import CELLS, MODELS

VOCAB = 257  # of which no tp rank of two has a whole number of rows


def make(model: str, *, tied: bool, tp: int = 1, pp: int = 1, group: int = 1, cell: str = "NNN", schedule: str = "1f1b") -> Config:
    return load(
        [
            "model=tiny",
            *MODELS[model],
            "model.num_layers=5" if schedule == "1f1b" else "model.num_layers=9",
            f"model.tie_embeddings={str(tied).lower()}",
            "precision=fp64",
            "micro_batch_size=1",
            f"parallel.tp={tp}",
            f"parallel.pp={pp}",
            f"parallel.group_size={group}",
            f"parallel.sharding={cell}",
            f"parallel.schedule={schedule}",
            f"parallel.virtual_stages={2 if schedule == 'interleaved_1f1b' else 1}",
        ]
    )


def layouts(world_size: int, cells: tuple[str, ...]) -> list[Config]:
    """Cells over every tp x pp x group that fits, models and schedules taking turns."""
    meshes = [
        (tp, pp, group)
        for tp, pp in itertools.product((1, 2, 4), (1, 2, 4))
        if world_size % (tp * pp) == 0
        for group in (1, 2, 4)
        if world_size // (tp * pp) % group == 0
    ]
    result = []
    for index, ((tp, pp, group), cell) in enumerate(itertools.product(meshes, cells)):
        schedule = ("1f1b", "interleaved_1f1b", "zbv")[index % 3] if pp > 1 else "1f1b"
        model = "gpt2" if tp == 4 else ("llama", "gpt2")[index % 2]
        tied = index // 2 % 2 == 0 and schedule != "zbv"
        cfg = make(model, tied=tied, tp=tp, pp=pp, group=group, cell=cell, schedule=schedule)
        assert not (problems := validate(cfg, world_size)), problems
        result.append(cfg)
    return result


def _build(rank: int, world_size: int, configs: list[Config]) -> list[tuple[dict[str, FlatShard], dict]]:
    result = []
    for cfg in configs:
        mesh = ParallelMesh.build(
            world_size=world_size, rank=rank, tp=cfg.parallel.tp, pp=cfg.parallel.pp, group_size=cfg.parallel.group_size
        )
        ledger = ByteLedger()
        part = build_model(cfg, mesh, vocab_size=VOCAB, ledger=ledger)
        engine = build_engine(cfg, part, mesh, ledger=ledger)
        with engine.unsharded() as model:  # what forward sees, beside what the optimizer updates
            seen = {name: (part.specs[name], p.detach().clone()) for name, p in model.named_parameters()}
        result.append((engine.parameter_shards(), seen))
        engine.close()
        mesh.close()
    return result


def assemble(shards: list[dict[str, FlatShard]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the shards of all ranks; NaN where nobody has a value; what several hold must be equal."""
    whole: dict[str, torch.Tensor] = {}
    for name, shard in ((name, shard) for part in shards for name, shard in part.items()):
        target = whole.setdefault(name, torch.full(shard.shape, torch.nan, dtype=torch.float64))
        box = target[tuple(slice(start, start + length) for start, length in zip(shard.offset, shard.local_shape, strict=True))]
        flat = box.reshape(-1)  # a copy where the box has other columns than the tensor
        known = flat[shard.start : shard.stop]
        assert bool(((known == shard.data) | known.isnan()).all()), name
        known.copy_(shard.data)
        box.copy_(flat.view(box.shape))
    return whole


def check(world_size: int, cells: tuple[str, ...]) -> None:
    configs = layouts(world_size, cells)
    per_rank = run_distributed(_build, world_size, configs, timeout=600.0)
    for index, cfg in enumerate(configs):
        with torch.device("meta"):
            specs = Transformer(cfg.model, vocab_size=VOCAB).parameter_specs()
        want = {name: initial_value(name, spec, cfg.seed).double() for name, spec in specs.items()}
        got = assemble([shards[index][0] for shards in per_rank])
        assert got.keys() == want.keys(), cfg.parallel
        for name, value in want.items():
            assert torch.equal(got[name], value), (name, cfg.parallel)
        for _, seen in (results[index] for results in per_rank):
            for name, (spec, value) in seen.items():
                box = tuple(slice(start, start + length) for start, length in zip(spec.offset, spec.local_shape, strict=True))
                assert torch.equal(value, want[name][box]), (name, cfg.parallel)
    assert sum(bool(value.count_nonzero()) for value in want.values()) > 10


def test_first_values_do_not_depend_on_the_layout() -> None:
    check(4, ("NNG", "IIG", "GGG"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [4, 8])
def test_first_values_in_every_cell(world_size: int) -> None:
    check(world_size, CELLS)
