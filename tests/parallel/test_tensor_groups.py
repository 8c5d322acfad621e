"""Tensor parallelism with its ranks seen as groups: HO-Ring and the hierarchy give what the backend gives, and count what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from paro_lm.config import Config, ParallelConfig
from paro_lm.parallel.axes import default_tp_group_size
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.tensor import Pending, TensorParallel
from paro_lm.parallel.tensor_groups import GroupedCollectives
from paro_lm.testing import run_distributed
from paro_lm.validation import validate
from tests.parallel.test_tensor import CASES, check_case, check_counted

LAYOUTS = [("ho_ring", 1), ("ho_ring", 2), ("ho_ring", 4), ("hierarchical", 2)]


def check_operations(native: TensorParallel, grouped: TensorParallel) -> None:
    """Every operation along every dimension, blocking and launched; float64, 1e-12. Sizes that do not divide, too."""
    generator = torch.Generator().manual_seed(native.rank)

    def both(call, *shape: int) -> None:  # type: ignore[no-untyped-def]
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        kept = x.clone()
        results = []
        for tensor in (native, grouped):
            result = call(tensor, x)
            results.append(result.wait() if isinstance(result, Pending) else result)
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
        assert torch.equal(x, kept)

    for numel in (1, 3, 4, 7, 64, 1001):
        both(lambda t, x: t.all_reduce(x.clone()), numel)
        both(lambda t, x: t.start_all_reduce(x.clone()), numel)
        both(lambda t, x: t.all_reduce(x.clone(), op=dist.ReduceOp.MAX), numel)
    for dim in (0, 1, -1):
        both(lambda t, x, d=dim: t.all_gather(x, dim=d), 3, 5, 2)
        both(lambda t, x, d=dim: t.reduce_scatter(x, dim=d), 4, 8, 12)
        both(lambda t, x, d=dim: t.start_reduce_scatter(x, dim=d), 4, 8, 12)
    both(lambda t, x: t.all_reduce(x.transpose(0, 1)), 3, 5)


def run_grouped(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, tp=world_size)
    for algorithm, group_size in LAYOUTS:
        counted: Counter[str] = Counter()

        def record(operation: str, num_bytes: int, counted: Counter[str] = counted) -> None:
            counted[operation] += num_bytes

        native = TensorParallel(group=mesh.group("tp"), rank=rank, size=world_size)
        grouped = replace(
            native, record=record, grouped=GroupedCollectives(mesh, algorithm=algorithm, group_size=group_size, record=record)
        )
        check_operations(native, grouped)
        for sequence_parallel in (False, True):
            grouped.sequence_parallel = sequence_parallel
            check_counted(grouped, counted)
            if group_size == 2:
                check_case(CASES["llama"], grouped, "full" if algorithm == "ho_ring" else "none")


def test_groups_equal_the_backend() -> None:
    run_distributed(run_grouped, 4)


def run_two_models(rank: int, world_size: int) -> float:
    """tp 2 in groups of one, two data ranks: the groups of different models do not meet."""
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, tp=2)
    grouped = GroupedCollectives(mesh, algorithm="ho_ring", group_size=1)
    tensor = TensorParallel(group=mesh.group("tp"), rank=mesh.coordinate("tp"), size=2, grouped=grouped)
    with pytest.raises(ValueError, match=r"tp_group_size=3 does not divide parallel\.tp=2"):
        GroupedCollectives(mesh, algorithm="ho_ring", group_size=3)
    return tensor.all_reduce(torch.tensor([10.0**rank])).item()


def test_every_model_has_its_own_groups() -> None:
    assert run_distributed(run_two_models, 4) == [11.0, 11.0, 1100.0, 1100.0]


@pytest.mark.parametrize(("tp", "local", "expected"), [(4, 2, 2), (4, 8, 4), (8, 4, 4), (2, None, 2), (4, 1, 1)])
def test_groups_default_to_nodes(tp: int, local: int | None, expected: int) -> None:
    assert default_tp_group_size(tp, local) == expected


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tp_collectives="ho_ring"), ("parallel.tp_collectives:", "parallel.tp=1")),
        (ParallelConfig(tp=2, tp_group_size=2), ("parallel.tp_group_size:", "tp_collectives=native")),
        (ParallelConfig(tp=4, tp_collectives="ho_ring", tp_group_size=3), ("parallel.tp_group_size:", "1, 2, 4")),
        (ParallelConfig(tp=2, tp_collectives="tree"), ("parallel.tp_collectives:", "hierarchical")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(parallel: ParallelConfig, words: tuple[str, ...]) -> None:
    (problem,) = validate(Config(parallel=parallel), 4)
    assert problem.startswith(words[0])
    assert words[1] in problem
    assert validate(Config(parallel=ParallelConfig(tp=4, tp_collectives="hierarchical", tp_group_size=2)), 4) == []
