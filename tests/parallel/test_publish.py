"""Updated parameters are published a little ahead of their use: the first unit does not queue behind all others, and none is lost."""

from __future__ import annotations

import torch

from paro_lm.config import OptimConfig
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.sharding import Cell
from paro_lm.testing import run_distributed
from tests.parallel.test_engine import Toy, batches, build, make_grids, train, whole


def _jobs(rank: int, world_size: int, cell: str) -> tuple[list[str], list[str], bool]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    engine = build(Toy(), mesh, make_grids(mesh), Cell.parse(cell))
    optimizer = AdamW(engine, OptimConfig(lr=0.1), decays=lambda name: False)
    train(engine, optimizer, batches(steps=1, samples=4), 1)
    jobs: list[str] = []
    submit = engine._gathers.submit
    engine._gathers.submit = lambda job: jobs.append(job.__name__) or submit(job)  # type: ignore[func-returns-value, method-assign]
    engine.sync_parameters()
    at_sync = list(jobs)
    with torch.no_grad():
        engine.model(batches(steps=1, samples=1)[0, 0])
    in_forward = jobs[len(at_sync) :]
    before = whole(engine)
    for buffer in engine.trainable_buffers():  # what is not used in a forward is published when somebody waits
        assert buffer.main is not None
        buffer.main.add_(1.0)
    engine.sync_parameters()
    engine.wait()
    moved = all(torch.equal(value, before[name] + 1.0) for name, value in whole(engine).items())
    engine.close()
    return at_sync, in_forward, moved


def test_sharded_units_are_published_two_ahead_of_their_gather() -> None:
    for at_sync, in_forward, moved in run_distributed(_jobs, 4, "IIG"):
        assert at_sync == ["publish"] * 2
        assert in_forward == ["gather", "publish"] * 3 + ["gather"] * 2  # of five units
        assert moved


def test_whole_parameters_are_published_at_once() -> None:
    for at_sync, in_forward, moved in run_distributed(_jobs, 4, "NIG"):
        assert at_sync == ["publish"] * 5
        assert in_forward == []
        assert moved
