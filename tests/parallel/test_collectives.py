"""Every algorithm, operation, axis set and rectangle gives the values of a sum or a concatenation computed in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.collectives.adapters import HoRingAllGather, HoRingState, grid_of_world, ho_ring_hook, use_ho_ring
from paro_lm.parallel.collectives.grid import ALGORITHMS
from paro_lm.parallel.collectives.lane import Pieces, Workspace, add_up
from paro_lm.parallel.collectives.streams import StreamHoRing
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.testing import run_distributed

AXES_SETS = (("dp_intra",), ("dp_inter",), DATA_AXES)
CHUNK_NUMELS = (1, 7, 1000, 4099)  # with pieces of 1000 bytes: one element, less than a piece, whole pieces, a short last piece


def nested_index(mesh: ParallelMesh, axes: tuple[str, ...], rank: int) -> int:
    """intra * g + inter over the axes asked for: the layout as design.md states it."""
    at = mesh.coordinates(rank)
    intra = at["dp_intra"] if "dp_intra" in axes else 0
    inter = at["dp_inter"] if "dp_inter" in axes else 0
    return intra * (mesh.size("dp_inter") if "dp_inter" in axes else 1) + inter


def value(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, distinct per rank, and per element as far as the dtype holds the sum of six ranks exactly (bf16: 256)."""
    small = dtype in (torch.bfloat16, torch.float16)
    elements = torch.arange(numel) % (8 if small else 10007)
    return (elements + (rank + 1) * (8 if small else 20011)).to(dtype)


def check_values(mesh: ParallelMesh, grid: GridCollectives, axes: tuple[str, ...], numel: int, dtype: torch.dtype) -> None:
    ranks = mesh.ranks(*axes)
    own = nested_index(mesh, axes, mesh.rank)
    assert own == grid.shard_index(axes)
    assert len(ranks) == grid.num_ranks(axes)
    gathered = torch.empty(numel * len(ranks), dtype=dtype)
    for rank in ranks:
        at = nested_index(mesh, axes, rank)
        gathered[at * numel : (at + 1) * numel] = value(rank, numel, dtype)
    summed = torch.stack([value(rank, numel * len(ranks), dtype) for rank in ranks]).sum(0)
    mine = slice(own * numel, (own + 1) * numel)

    output = torch.full_like(gathered, -1)
    grid.all_gather(output, value(mesh.rank, numel, dtype), axes)
    assert torch.equal(output, gathered)
    output.fill_(-1)[mine] = value(mesh.rank, numel, dtype)
    grid.all_gather(output, output[mine], axes)
    assert torch.equal(output, gathered)

    shard = torch.full((numel,), -1, dtype=dtype)
    grid.reduce_scatter(shard, value(mesh.rank, numel * len(ranks), dtype), axes)
    assert torch.equal(shard, summed[mine])
    inplace = value(mesh.rank, numel * len(ranks), dtype)
    grid.reduce_scatter(inplace[mine], inplace, axes)
    assert torch.equal(inplace[mine], summed[mine])

    for extra in (0, 1):  # all-reduce takes sizes that do not divide, too
        size = numel * len(ranks) + extra
        tensor = value(mesh.rank, size, dtype)
        grid.all_reduce(tensor, axes)
        assert torch.equal(tensor, torch.stack([value(rank, size, dtype) for rank in ranks]).sum(0))


def expected_bytes(mesh: ParallelMesh, algorithm: str, operation: str, axes: tuple[str, ...], num_bytes: int) -> dict[str, int]:
    """The closed formulas: HO-Ring and hierarchical (m-1)/m V inside, (g-1)/g V/m between groups; rings (n-1)/n V to the next rank."""
    times = 2 if operation == "all_reduce" or (operation == "reduce_scatter" and algorithm == "native") else 1
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    n = mesh.size(*axes)
    if algorithm in ("native", "ring") or len(axes) == 1:
        following = (mesh.ranks(*axes) * 2)[mesh.ranks(*axes).index(mesh.rank) + 1]
        crosses = mesh.coordinates(following)["dp_inter"] != mesh.coordinate("dp_inter")
        return {"dp_inter" if crosses else "dp_intra": times * num_bytes * (n - 1) // n}
    g, m = mesh.size("dp_inter"), mesh.size("dp_intra")
    return {"dp_intra": times * num_bytes * (m - 1) // m, "dp_inter": times * num_bytes * (g - 1) // g // m}


def check_ledger(mesh: ParallelMesh, grid: GridCollectives, axes: tuple[str, ...]) -> None:
    assert grid.ledger is not None
    n, numel = mesh.size(*axes), 501
    full, shard = torch.ones(numel * n), torch.ones(numel)
    calls = {
        "all_gather": lambda: grid.all_gather(full, shard, axes),
        "reduce_scatter": lambda: grid.reduce_scatter(shard, full, axes),
        "all_reduce": lambda: grid.all_reduce(full, axes),
    }
    for operation, call in calls.items():
        grid.ledger.reset()
        call()
        expected = expected_bytes(mesh, grid.algorithm, operation, axes, numel * n * 4) if n > 1 else {}
        assert grid.ledger.by_axis() == expected, (operation, axes)
        assert grid.ledger.entries() == {(operation, axis): sent for axis, sent in expected.items()}


def on_rank(rank: int, world_size: int, group_sizes: tuple[int, ...]) -> None:
    for group_size in group_sizes:
        mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=group_size)
        for algorithm in ALGORITHMS:
            grid = GridCollectives(mesh, algorithm=algorithm, chunk_bytes=1000, ledger=ByteLedger())
            for axes in AXES_SETS:
                for numel in CHUNK_NUMELS if world_size < 6 else CHUNK_NUMELS[-1:]:
                    check_values(mesh, grid, axes, numel, torch.float64)
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    check_values(mesh, grid, axes, 333, dtype)
                if algorithm != "auto":
                    check_ledger(mesh, grid, axes)
        check_streams(mesh)


def check_streams(mesh: ParallelMesh) -> None:
    """The schedule for NCCL moves the same values; here without streams, one operation after the other."""
    grid = GridCollectives(mesh, algorithm="ho_ring", chunk_bytes=1000, ledger=ByteLedger())
    if DATA_AXES not in grid._lanes:
        return
    lanes = (grid._lanes[("dp_inter",)], grid._lanes[("dp_intra",)])
    ring = StreamHoRing(*lanes, grid._rectangle(DATA_AXES), grid._workspace, 1000, device=torch.device("cpu"))
    grid._chosen[DATA_AXES] = ring
    for numel in CHUNK_NUMELS:
        check_values(mesh, grid, DATA_AXES, numel, torch.float64)
    check_values(mesh, grid, DATA_AXES, 333, torch.bfloat16)
    check_ledger(mesh, grid, DATA_AXES)


def test_four_ranks() -> None:
    """2x2, 1x4 and 4x1."""
    run_distributed(on_rank, 4, (2, 4, 1))


def test_six_ranks() -> None:
    """2x3 and 3x2: the transposed layout of one is not that of the other."""
    run_distributed(on_rank, 6, (3, 2))


def bf16_on_rank(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=4)
    grid = GridCollectives(mesh, algorithm="ho_ring")
    # 1 + 3 * 2^-9: each summand alone is lost when it is added to 1.0 in bf16 (spacing 2^-7), together they round up.
    tensor = torch.full((64,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    grid.all_reduce(tensor, DATA_AXES)
    assert torch.equal(tensor, torch.full_like(tensor, 1 + 2.0**-7))
    fp32 = GridCollectives(mesh, algorithm="ho_ring")
    for dtype in (torch.float32, torch.bfloat16):
        noise = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        everywhere = torch.stack([torch.randn(1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world_size)])
        fp32.all_reduce(noise, DATA_AXES)
        torch.testing.assert_close(noise, everywhere.double().sum(0).to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        answers = [torch.empty_like(noise) for _ in range(world_size)]
        torch.distributed.all_gather(answers, noise)
        assert all(torch.equal(answer, noise) for answer in answers)


def test_sixteen_bit_sums_add_in_fp32() -> None:
    run_distributed(bf16_on_rank, 4)


@pytest.mark.parametrize("numel", [0, 1, 7, 2099, 10_000])
@pytest.mark.parametrize("piece", [1, 3, 100, 20_000])
def test_pieces_cover_a_chunk(numel: int, piece: int) -> None:
    pieces = Pieces(numel, piece, 1)
    chunk = torch.arange(numel)
    cut = [pieces.of(chunk, index) for index in range(pieces.count)]
    assert all(0 < part.numel() <= piece for part in cut)
    assert pieces.largest == max((part.numel() for part in cut), default=0)  # receive buffers are as large
    assert torch.equal(torch.cat([*cut, chunk[:0]]), chunk)


def test_add_up_rounds_once() -> None:
    terms = [torch.tensor([1.0], dtype=torch.bfloat16), *[torch.tensor([2.0**-9], dtype=torch.bfloat16)] * 512]
    out = torch.empty(1, dtype=torch.bfloat16)
    add_up(out, terms, Workspace(torch.device("cpu")))
    assert out.item() == 2.0


def refusals_on_rank(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=1)
    grid = GridCollectives(mesh)
    strided = torch.zeros(8)[::2]
    for call in (
        lambda: grid.all_reduce(strided, DATA_AXES),
        lambda: grid.all_gather(torch.zeros(16)[::2], torch.zeros(4), DATA_AXES),
        lambda: grid.reduce_scatter(strided, torch.zeros(8), DATA_AXES),
        lambda: grid.all_reduce(torch.zeros(2, 2), DATA_AXES),
    ):
        with pytest.raises(ValueError, match="1-D contiguous"):
            call()
    with pytest.raises(ValueError, match="must have 8 elements"):
        grid.all_gather(torch.zeros(9), torch.zeros(4), DATA_AXES)
    with pytest.raises(ValueError, match="same dtype"):
        grid.all_gather(torch.zeros(8), torch.zeros(4, dtype=torch.float64), DATA_AXES)
    with pytest.raises(ValueError, match="only data axes"):
        grid.all_reduce(torch.zeros(4), ("tp",))
    with pytest.raises(ValueError, match="choose from native"):
        GridCollectives(mesh, algorithm="nccl")
    with pytest.raises(ValueError, match="at least one byte"):
        GridCollectives(mesh, chunk_bytes=0)


def test_refusals() -> None:
    run_distributed(refusals_on_rank, 2)


def alone_on_rank(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(world_size=1, rank=0)
    for algorithm in ALGORITHMS:
        grid = GridCollectives(mesh, algorithm=algorithm)
        check_values(mesh, grid, DATA_AXES, 5, torch.float32)


def test_one_rank_copies() -> None:
    run_distributed(alone_on_rank, 1)


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def trained(model: torch.nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))
        model(batch).square().sum().backward()
        optimizer.step()


def trained_alone(world_size: int, steps: int = 3) -> list[torch.Tensor]:
    """The same steps in one process: the mean of the ranks' gradients."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))
            (model(batch).square().sum() / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def adapters_on_rank(rank: int, world_size: int) -> None:
    expected = trained_alone(world_size)
    grid = grid_of_world(group_size=2, device="cpu", ledger=ByteLedger())
    state = HoRingState(grid)
    ddp = torch.nn.parallel.DistributedDataParallel(small_model())
    ddp.register_comm_hook(state, ho_ring_hook)
    trained(ddp, rank)
    state.close()
    for parameter, target in zip(ddp.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), target, rtol=1e-5, atol=1e-6)
    assert grid.ledger is not None
    assert grid.ledger.by_operation().keys() == {"all_reduce"}

    ledger = ByteLedger()
    fsdp, native = small_model(), small_model()
    for model in (fsdp, native):
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)
    use_ho_ring(fsdp, group_size=2, device="cpu", ledger=ledger)
    trained(fsdp, rank)
    trained(native, rank)
    for parameter, other, target in zip(fsdp.parameters(), native.parameters(), expected, strict=True):
        assert isinstance(parameter, DTensor)
        assert isinstance(other, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), target, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parameter.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-6)
    assert ledger.by_operation().keys() == {"all_gather", "reduce_scatter"}
    with pytest.raises(ValueError, match="call fully_shard"):
        use_ho_ring(small_model(), group_size=2, device="cpu")
    with pytest.raises(ValueError, match="order of ranks"):
        HoRingAllGather(grid)


def test_adapters_for_ddp_and_fsdp2() -> None:
    """Three steps equal one process; all parameters compared."""
    run_distributed(adapters_on_rank, 4)
