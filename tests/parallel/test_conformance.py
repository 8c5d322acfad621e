"""The engine in all 27 cells over groups of every size: integer-valued gradients, expectations exact unless a tolerance is stated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from paro_lm.config import OptimConfig
from paro_lm.optim.clip import clip_coefficient, grad_norm, scale_gradients
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import AXES, MeshShape, ParallelMesh
from paro_lm.parallel.seams import Seams
from paro_lm.parallel.sharding import ALL_CELLS, KEPT_CELLS, Cell
from paro_lm.testing import run_distributed
from tests.parallel.bag import BF16, Bag, Coefficients, backward, bag_engine, finished, sgd, values, wrong
from tests.parallel.test_engine import Toy, batches, build, make_grids, train, whole

SHAPES = {"one": (1,), "few": (4,), "matrix": (19, 3), "odd": (5,)}
"""Parts of 1, 4, 57 and 5 elements: none divides a padded buffer."""

Grids = tuple[GridCollectives, GridCollectives]


def ones(factor: float = 1.0) -> Coefficients:
    return dict.fromkeys(SHAPES, factor)


def every_element_moves_once(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T7: gradient 1, rate 1: what nobody owns stays, what two own moves twice."""
    engine = bag_engine(Bag(SHAPES), mesh, grids, cell)
    before = values(engine)
    backward(engine, ones(1 / mesh.world_size), ones(1 / mesh.world_size))
    sgd(engine)
    problems = wrong("moves once", values(engine), {name: value - 1 for name, value in before.items()})
    engine.close()
    return problems


def mean_of_ranks(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T48: gradients 1..W have the mean (W + 1) / 2 on all ranks, three steps long; the same in 3 micro-batches."""
    n = mesh.world_size
    engine = bag_engine(Bag(SHAPES), mesh, grids, cell)
    before = values(engine)
    for _ in range(3):
        for index in range(3):
            backward(engine, ones((mesh.rank + 1) * (0.25, 0.5, 0.25)[index] / n), ones(0.0), last=index == 2)
        sgd(engine)
    want = {name: value - (3 * (n + 1) / 2 if name.endswith("w") else 0) for name, value in before.items()}
    problems = wrong("mean", values(engine), want)
    engine.close()
    return problems


def norm_counts_every_element_once(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T2: gradients [3] and [4, 0, 0, 0], on every rank a part of them: norm 5, largest 4, clipped to .6 and .8."""
    engine = bag_engine(Bag(SHAPES), mesh, grids, cell)
    before = values(engine)
    part = 1 / mesh.world_size
    backward(engine, ones(0.0) | {"one": torch.full((1,), 3 * part), "few": torch.tensor([4 * part, 0, 0, 0])})
    norms = grad_norm(engine), grad_norm(engine, norm_type=math.inf), grad_norm(engine, norm_type=1.0)
    problems = [] if norms == (5.0, 4.0, 7.0) else [f"norms {norms}"]
    scale_gradients(engine, clip_coefficient(norms[0], 1.0))
    sgd(engine)
    before["one.w"][0] -= 0.6
    before["few.w"][0] -= 0.8
    problems += wrong("clipped", values(engine), before, atol=1e-15)
    engine.close()
    return problems


def without_gradient(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T9a: unused everywhere: bitwise unchanged under decay; used on rank 0 only: its gradient over W, on every rank."""
    engine = bag_engine(Bag(SHAPES), mesh, grids, cell)
    optimizer = AdamW(engine, OptimConfig(lr=0.1, weight_decay=0.1), decays=lambda name: True)
    before = values(engine)
    for _ in range(2):
        backward(engine, ones(), last=False)
        backward(engine, ones())
        optimizer.step(0.1)
        engine.sync_parameters()
    after = values(engine)
    problems = wrong("unused", after, {name: value for name, value in before.items() if name.endswith("spare")})
    problems += [f"{name} did not move" for name in before if name.endswith("w") and bool((after[name] == before[name]).any())]
    steps = {name: step.item() for name, step in optimizer.steps.items()}
    problems += [f"steps {steps}"] if any(steps[name] != (0 if name.endswith("spare") else 2) for name in steps) else []

    spare = ones(6.0 / mesh.world_size) if mesh.rank == 0 else None
    backward(engine, ones(0.0), spare, last=False)
    backward(engine, ones(0.0))
    sgd(engine)
    want = {name: value - 6.0 / mesh.world_size if name.endswith("spare") else value for name, value in after.items()}
    problems += wrong("used on rank 0", values(engine), want)
    engine.close()
    return problems


def skipped_units(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T9a: a unit that only some ranks use: its gradient counts with p = N; it is refused by name where it is gathered."""
    problems = []
    live = {axis for axis in cell.param if mesh.size(axis) > 1}
    for name in ("few", "odd"):  # in the middle, and the last
        engine = bag_engine(Bag(SHAPES), mesh, grids, cell)
        before = values(engine)
        coefficients = ones(1.0)
        if live or mesh.rank % 2:
            coefficients[name] = None
        try:
            backward(engine, coefficients, last=False)
            backward(engine, ones(0.0))
        except ValueError as error:
            if not live or f"forward did not use {name}," not in str(error):
                problems.append(f"refused: {error}")
        else:
            sgd(engine)
            users = {part: (mesh.world_size + 1) // 2 if part == name else mesh.world_size for part in SHAPES}
            want = {f"{part}.w": before[f"{part}.w"] - users[part] for part in SHAPES}
            problems += ["not refused"] if live else wrong("skipped", values(engine), want)
        engine.close()
    return problems


def sums_keep_small_addends(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T10a: bf16 gradients: 1 and then 2^-9 many times, over micro-batches and ranks, is exact in fp32 and stays 1 in bf16."""
    engine = bag_engine(Bag(SHAPES, torch.bfloat16), mesh, grids, cell, dtypes=BF16)
    rounds = 512 // mesh.world_size if str(cell) == "NIG" else 4
    backward(engine, ones(1.0 if mesh.rank == 0 else 0.0), last=False)
    for index in range(rounds):
        backward(engine, ones(2.0**-9), last=index == rounds - 1)
    want = 1 + rounds * mesh.world_size * 2.0**-9
    got = {name: value for name, value in finished(engine).items() if name.endswith("w")}
    problems = [f"sum of {name}: {value} instead of {want}" for name, value in got.items() if bool((value != want).any())]
    problems += [f"{name} is {value.dtype}" for name, value in got.items() if value.dtype != torch.float32]
    engine.close()
    return problems


def decay_rule(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T14b: rate 1, decay .1, zero gradients, weights 1: what decays is .9, the rest 1."""
    model = Bag(SHAPES)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    engine = bag_engine(model, mesh, grids, cell)
    optimizer = AdamW(engine, OptimConfig(lr=1.0, weight_decay=0.1), decays=lambda name: name == "matrix.w")
    backward(engine, ones(0.0), ones(0.0))
    optimizer.step(1.0)
    engine.sync_parameters()
    got = values(engine)
    want = {name: torch.full_like(value, 0.9 if name == "matrix.w" else 1.0) for name, value in got.items()}
    problems = wrong("decay", got, want)
    engine.close()
    return problems


Case = Callable[[ParallelMesh, Grids, Cell], list[str]]
COMMUNICATION: tuple[Case, ...] = (every_element_moves_once, norm_counts_every_element_once)
CASES: tuple[Case, ...] = (*COMMUNICATION, mean_of_ranks, without_gradient, skipped_units, sums_keep_small_addends, decay_rule)


def _cases(rank: int, world_size: int, group_size: int, algorithm: str, cases: tuple[Case, ...]) -> list[str]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=group_size)
    grids = make_grids(mesh, algorithm)
    return [f"{cell} {case.__name__}: {problem}" for cell in ALL_CELLS for case in cases for problem in case(mesh, grids, cell)]


def check(world_size: int, group_size: int, algorithm: str, cases: tuple[Case, ...] = CASES) -> None:
    for rank, problems in enumerate(run_distributed(_cases, world_size, group_size, algorithm, cases, timeout=280.0)):
        assert not problems, f"rank {rank}, {len(problems)} problems:\n" + "\n".join(problems[:20])


def test_cases_on_two_groups_of_two() -> None:
    check(4, 2, "native")


@pytest.mark.parametrize(("group_size", "algorithm"), [(1, "native"), (4, "native"), (2, "ho_ring")])
def test_what_moves_data_in_degenerate_groups_and_over_ho_ring(group_size: int, algorithm: str) -> None:
    check(4, group_size, algorithm, COMMUNICATION)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "group_size", "algorithm"),
    [(4, 1, "native"), (4, 4, "native"), (4, 2, "ho_ring"), (8, 2, "native"), (8, 4, "native"), (8, 2, "ho_ring"), (8, 4, "ho_ring")],
)
def test_cases_in_every_grid(world_size: int, group_size: int, algorithm: str) -> None:
    check(world_size, group_size, algorithm)


def test_groups_that_do_not_divide_are_refused() -> None:
    """T7: at the start, with the numbers."""
    for group in (3, 8):
        with pytest.raises(ValueError, match=rf"group_size={group} does not divide the 4 .* valid group sizes: \[1, 2, 4\]"):
            MeshShape.build(world_size=4, group_size=group)


def _one_rank_skips(rank: int, world_size: int) -> None:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    engine = bag_engine(Bag(SHAPES), mesh, make_grids(mesh), Cell.parse("III"))
    backward(engine, ones() if rank == 0 else ones() | {"odd": None})


def test_a_unit_that_one_rank_skips_ends_the_run_with_its_name() -> None:
    """T9a: the last unit, which is known to be missing only when backward begins; the other rank waits for it."""
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*ValueError: forward did not use odd,"):
        run_distributed(_one_rank_skips, 2, timeout=30.0)


def _second_backward(rank: int, world_size: int) -> str:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank)
    engine = bag_engine(Bag(SHAPES), mesh, make_grids(mesh), Cell.parse("NGG"))
    try:
        with engine.micro_batch(last=True):
            for _ in range(2):
                engine.model(ones(), ones()).backward()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_second_backward_in_a_micro_batch_is_refused() -> None:
    """Its gradients would come after the reduction, and be lost."""
    assert "enter `with engine.micro_batch" in run_distributed(_second_backward, 1)[0]


# ---------------------------------------------------------------------------------------------------- odd sizes


def _tiny_tied(rank: int, world_size: int) -> list[str]:
    data = batches(steps=1, samples=12, vocab=5)
    plain = Toy(vocab=5, width=2, tied=True)
    (sum(plain(sample) for sample in data[0]) / 60).backward()
    want = {name: p.detach() - p.grad for name, p in plain.named_parameters()}
    problems = []
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2 if world_size == 4 else world_size)
    grids = make_grids(mesh)
    for cell in ALL_CELLS:
        engine = build(Toy(vocab=5, width=2, tied=True), mesh, grids, cell)
        with engine.micro_batch(last=True):
            (sum(engine.model(sample) for sample in data[0][rank::world_size]) / 60).backward()
        engine.finish_gradients()
        sgd(engine)
        problems += [f"{cell}: {problem}" for problem in wrong("row", values(engine), want, atol=1e-12)]
        engine.close()
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_row_of_a_tiny_tied_table_moves(world_size: int) -> None:
    """T11a: vocabulary 5, hidden 2, tied; after a step of SGD every row is where one process has it."""
    for problems in run_distributed(_tiny_tied, world_size):
        assert not problems, "\n".join(problems[:20])


# ----------------------------------------------------------------------------------------- between stages and over tp


def _stage_engine(mesh: ParallelMesh, grids: Grids, cell: Cell, pair: object) -> ShardingEngine:
    """Half a pipeline: a part of its own and one, `tied`, that both stages hold."""
    names = ("first", "tied") if mesh.coordinate("pp") == 0 else ("last", "tied")
    seams = Seams(shared=frozenset({"tied.w", "tied.spare"}), shared_group=pair, counts_shared=mesh.coordinate("pp") == 0)
    return bag_engine(Bag({names[0]: (3,), "tied": (8,)}), mesh, grids, cell, seams=seams)


def tied_stages(mesh: ParallelMesh, grids: Grids, cell: Cell, pair: object) -> list[str]:
    """T1, T2: gradients of a tied part are summed over both stages, copies stay bitwise equal, the norm counts them once."""
    pp, dp, size = mesh.coordinate("pp"), mesh.index("dp_inter", "dp_intra"), mesh.size("dp_inter", "dp_intra")
    own = "last" if pp else "first"
    engine = _stage_engine(mesh, grids, cell, pair)
    before = values(engine)
    backward(engine, {own: 0.0, "tied": (1 + 2 * pp + dp) / size})
    sgd(engine)
    problems = wrong("tied gradient", values(engine), {"tied.w": before["tied.w"] - 5.0})

    backward(engine, {own: 0.0, "tied": (6.0 if pp else 4.0) / size})
    norm = grad_norm(engine)
    problems += [] if abs(norm - math.sqrt(800)) < 1e-12 else [f"norm {norm} of a tied weight with the squared sum 800"]
    sgd(engine, 0.0)
    before = values(engine)
    backward(engine, {own: torch.tensor([3.0 + pp, 0, 0]) / size, "tied": 0.0})
    norm = grad_norm(engine)
    problems += [] if norm == 5.0 else [f"norm {norm} over stages with 3 and 4"]
    scale_gradients(engine, clip_coefficient(norm, 1.0))
    sgd(engine)
    before[f"{own}.w"][0] -= 0.8 if pp else 0.6
    problems += wrong("clipped over stages", values(engine), before, atol=1e-15)

    optimizer = AdamW(engine, OptimConfig(), decays=lambda name: True)
    generator = torch.Generator().manual_seed(mesh.rank)
    for _ in range(5):
        for last in (False, True):
            noise = torch.randn(8, generator=generator, dtype=torch.float64)
            backward(engine, {own: torch.ones(3), "tied": noise}, last=last)
        optimizer.step(0.1)
        engine.sync_parameters()
    mine = values(engine)["tied.w"]
    same = mesh.max(mine, AXES).equal(mine) and mesh.max(-mine, AXES).equal(-mine)
    engine.close()
    return problems if same else [*problems, "copies of the tied weight differ"]


def over_tp(mesh: ParallelMesh, grids: Grids, cell: Cell) -> list[str]:
    """T2: what tp ranks replicate counts once in the norm; partial gradients are summed over tp first."""
    tp, size = mesh.coordinate("tp"), mesh.size("dp_inter", "dp_intra")
    engine = bag_engine(Bag({"norm": (1,), "slice": (2,)}), mesh, grids, cell, seams=Seams(partial=frozenset({"norm.w"})))
    before = values(engine)
    backward(engine, {"norm": (1.0 + tp) / size, "slice": torch.tensor([0.0 if tp else 4.0, 0.0]) / size})
    norm = grad_norm(engine, replicated=lambda name: frozenset({"tp"} if name.startswith("norm") else ()))
    problems = [] if norm == 5.0 else [f"norm {norm} with tp"]
    sgd(engine)
    problems += wrong("partial over tp", values(engine), {"norm.w": before["norm.w"] - 3.0})
    engine.close()
    return problems


def _axes(rank: int, world_size: int) -> list[str]:
    problems = []
    for group_size in (1, 2):
        mesh = ParallelMesh.build(world_size=world_size, rank=rank, pp=2, group_size=group_size)
        grids, pair = make_grids(mesh), mesh.new_group("pp")
        for cell in KEPT_CELLS:
            problems += [f"{cell} groups of {group_size}: {problem}" for problem in tied_stages(mesh, grids, cell, pair)]
        mesh = ParallelMesh.build(world_size=world_size, rank=rank, tp=2, group_size=group_size)
        grids = make_grids(mesh)
        for cell in ALL_CELLS:
            problems += [f"{cell} groups of {group_size}: {problem}" for problem in over_tp(mesh, grids, cell)]
    return problems


def test_tied_weights_over_stages_and_norms_over_tp() -> None:
    for rank, problems in enumerate(run_distributed(_axes, 4)):
        assert not problems, f"rank {rank}:\n" + "\n".join(problems[:20])


# ---------------------------------------------------------------------------------------------------- real precisions


def _precisions(rank: int, world_size: int, data: torch.Tensor) -> list[tuple[str, list[float], dict[str, torch.Tensor]]]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=min(2, world_size))
    grids = make_grids(mesh)
    result = []
    for name, dtypes in (("fp32", None), ("bf16", BF16)):
        for cell in ALL_CELLS if world_size > 1 else ALL_CELLS[:1]:
            model = Toy().to(torch.float32 if dtypes is None else torch.bfloat16)
            engine = build(model, mesh, grids, cell, dtypes=dtypes)  # type: ignore[arg-type]
            optimizer = AdamW(engine, OptimConfig(eps=1e-3), decays=lambda name: True)
            losses = train(engine, optimizer, data, accumulation=3)
            result.append((f"{name} {cell}", losses, whole(engine)))
            engine.close()
    return result


def test_fp32_and_bf16_stay_near_one_process() -> None:
    """Losses of 2 steps: fp32 to 1e-5, bf16 to 2e-2 (of 4.1); parameters after them to 1e-5 and 3e-2. An eps of 1e-3 keeps Adam from
    turning rounding of tiny gradients into whole steps."""
    data = batches(steps=2, samples=12)
    references = {case.split()[0]: rest for case, *rest in run_distributed(_precisions, 1, data)[0]}
    for case, losses, parameters in run_distributed(_precisions, 4, data)[3]:
        tolerance = {"fp32": (1e-5, 1e-5), "bf16": (2e-2, 3e-2)}[case.split()[0]]
        expected_losses, expected = references[case.split()[0]]
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=tolerance[0], msg=lambda m, c=case: f"{c}: {m}")
        for name, value in expected.items():
            torch.testing.assert_close(
                parameters[name].double(), value.double(), rtol=0, atol=tolerance[1], msg=lambda m, c=case, n=name: f"{c} {n}: {m}"
            )
