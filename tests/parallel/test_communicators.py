"""Communicators of a mesh: the time limit that they are given, and that closing the mesh gives all of them back."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.tensor_groups import GroupedCollectives
from paro_lm.testing import run_distributed

LIMIT = timedelta(minutes=7)


def _limits(rank: int, world_size: int) -> tuple[list[timedelta], int, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, tp=2, timeout=LIMIT)
    GroupedCollectives(mesh, algorithm="ho_ring", group_size=1)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    mesh.close()
    return limits, before, len(dist.distributed_c10d._world.pg_map)


def test_every_communicator_has_the_limit_and_is_given_back() -> None:
    for limits, before, after in run_distributed(_limits, 2):
        assert len(limits) >= 3  # control over tp and over all, and the private ones of the ring
        assert set(limits) == {LIMIT}
        assert before == after
