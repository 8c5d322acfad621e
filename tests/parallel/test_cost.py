"""The cost model against printed values of the method and against counting by hand.

Seconds and gigabytes are compared to the digits that are printed; byte counts exactly.
"""

from __future__ import annotations

import itertools

import pytest

from paro_lm.parallel.cost import (
    ElementBytes,
    MemoryBytes,
    PaperCluster,
    UnitSize,
    bytes_sent,
    ideal_memory,
    memory,
    operations,
    paper_time,
    paper_time_hpz,
    step_bytes,
    unit_memory,
    wire_algorithm,
)
from paro_lm.parallel.mesh import MeshShape
from paro_lm.parallel.sharding import ALL_CELLS, KEPT_CELLS, Cell

SHAPE = MeshShape(dp_inter=4, dp_intra=8)
CLUSTER = PaperCluster(shape=SHAPE)

MEMORY_7B = {
    "NNN": 112, "NNI": 38.50, "NNG": 30.62, "NII": 26.25, "INI": 26.25, "NIG": 18.38, "ING": 18.38, "NGG": 17.06, "GNG": 17.06,
    "III": 14.00, "IIG": 6.12, "IGG": 4.81, "GIG": 4.81, "GGG": 3.50,
}  # fmt: skip
MEMORY_65B = {"III": 130.0, "NIG": 170.6, "ING": 170.6, "IIG": 56.88, "IGG": 44.69, "GIG": 44.69, "GGG": 32.50}
MEMORY_7B_SIXTEENTH = {
    "NNN": 20.12, "NNI": 15.53, "NNG": 15.04, "NII": 14.77, "NIG": 14.27, "NGG": 14.19, "INI": 3.28, "ING": 2.79, "III": 2.52,
    "IIG": 2.02, "IGG": 1.94, "GNG": 1.48, "GIG": 0.71, "GGG": 0.63,
}  # fmt: skip
TIME_7B = {
    "NNI": 0.360, "NII": 0.801, "INI": 1.292, "III": 1.733, "IIG": 1.733, "NIG": 1.978, "ING": 2.467, "NNG": 2.712, "NNN": 2.712,
    "IGG": 14.674, "NGG": 14.919, "GIG": 27.746, "GNG": 28.481, "GGG": 40.688,
}  # fmt: skip
TIME_65B = {"IIG": 16.09, "III": 16.09, "IGG": 136.3, "GGG": 377.8}
TIME_7B_SIXTEENTH = {"NII": 0.050, "NIG": 0.124, "NGG": 0.932, "GGG": 27.973}
TIME_65B_PEFT = {"INI": 9.109, "III": 9.121, "IIG": 9.121, "ING": 9.141, "GGG": 252.25}


def assert_printed(values: dict[str, float], printed: dict[str, float], unit: float) -> None:
    """Equal to half a unit in the last printed digit; an exact half may have been printed either way (30.625 as 30.62)."""
    wrong = {name: (values[name], want) for name, want in printed.items() if abs(values[name] - want) > unit / 2 + 1e-9}
    assert not wrong


@pytest.mark.parametrize(
    ("num_params", "num_trainable", "printed", "unit"),
    [(7e9, 7e9, MEMORY_7B, 0.01), (65e9, 65e9, MEMORY_65B, 0.1), (7e9, 7e9 / 16, MEMORY_7B_SIXTEENTH, 0.01)],
)
def test_memory_goldens(num_params: float, num_trainable: float, printed: dict[str, float], unit: float) -> None:
    found = {
        str(cell): ideal_memory(cell, num_params=num_params, num_trainable=num_trainable, shape=SHAPE).total / 1e9 for cell in ALL_CELLS
    }
    assert_printed(found, printed, unit)


def test_only_four_cells_fit_65b() -> None:
    fits = {str(cell) for cell in KEPT_CELLS if ideal_memory(cell, num_params=65e9, shape=SHAPE).total < 80e9}
    assert fits == {"GGG", "IGG", "GIG", "IIG"}


@pytest.mark.parametrize(
    ("letters", "expected"), [("NNN", 16), ("NNG", 5.5), ("NGG", 3.75), ("GGG", 2), ("NNI", 10), ("NIG", 4.5), ("III", 8)]
)
def test_bytes_per_parameter(letters: str, expected: float) -> None:
    """The formula and the exact count of padded buffers agree where nothing is padded: bf16 gradients, 8 ranks in groups of 2."""
    shape, cell = MeshShape(dp_inter=4, dp_intra=2), Cell.parse(letters)
    assert ideal_memory(cell, num_params=1, shape=shape).total == expected
    exact = unit_memory(UnitSize(cell=cell, trainable=800), shape, ElementBytes(param=2, grad=2))
    assert exact.total == expected * 800
    assert exact.shared == 0


def test_memory_of_units_with_cells_of_their_own() -> None:
    """Every number by hand: 2 groups of 3 ranks, bf16 with fp32 gradients, a LoRA unit with a frozen part, a frozen unit."""
    shape = MeshShape(dp_inter=2, dp_intra=3)
    units = [
        UnitSize(cell=Cell.parse("NIG"), trainable=600),
        UnitSize(cell=Cell.parse("IIG"), trainable=120, frozen=1200),
        UnitSize(cell=Cell.parse("GGG"), trainable=0, frozen=600, gathers=1),
    ]
    found = memory(units, shape, ElementBytes())
    assert found == MemoryBytes(param=2 * 600 + 2 * 1320 // 3 + 2 * 600 // 6, grad=4 * 200 + 4 * 40, main=12 * 100 + 12 * 20)


def test_parameters_that_are_main_count_once() -> None:
    """fp32: with equal placements the optimizer updates the parameters themselves. An axis with one rank makes no difference."""
    element = ElementBytes(param=4, grad=4)
    for letters, shape, total in (
        ("NNN", MeshShape(dp_inter=2, dp_intra=2), 16),
        ("GGG", MeshShape(dp_inter=2, dp_intra=2), 4),
        ("NNG", MeshShape(dp_inter=2, dp_intra=2), 11),
        ("NNI", MeshShape(dp_inter=4, dp_intra=1), 16),
        ("III", MeshShape(dp_inter=1, dp_intra=4), 4),
        ("GGI", MeshShape(dp_inter=1, dp_intra=4), 4),
    ):
        found = unit_memory(UnitSize(cell=Cell.parse(letters), trainable=64), shape, element)
        assert found.total == total * 64, letters
        assert (found.param, found.main) == (
            64 * 4 / shape.size(*Cell.parse(letters).param),
            3 * 64 * 4 / shape.size(*Cell.parse(letters).main),
        )


@pytest.mark.parametrize(
    ("num_params", "num_trainable", "printed", "unit"),
    [
        (7e9, 7e9, TIME_7B, 0.001),
        (65e9, 65e9, TIME_65B, 0.1),
        (7e9, 7e9 / 16, TIME_7B_SIXTEENTH, 0.001),
        (65e9, 65e9 * 3 / 1000, TIME_65B_PEFT, 0.01),
    ],
)
def test_time_goldens(num_params: float, num_trainable: float, printed: dict[str, float], unit: float) -> None:
    found = {
        str(cell): paper_time(cell, CLUSTER, num_params=num_params, num_trainable=num_trainable, accumulation=10).total
        for cell in ALL_CELLS
    }
    assert_printed(found, printed, unit)


def test_time_of_hpz() -> None:
    assert paper_time_hpz(CLUSTER, num_params=7e9, accumulation=10).total == pytest.approx(27.6, abs=0.05)


def table(letters: str, volume: float, part: float) -> tuple[float, float, float, float]:
    """The tables of the method, typed in cell by cell: t_param, t_gradient, t_sync_g, t_sync_p."""
    m, g, n, inter, intra = 8, 4, 32, 80e9, 2000e9
    p, gradient, main = letters
    inside, everywhere, across = (m - 1) / m / intra, (n - 1) / n / inter, (g - 1) / g / m / inter
    gather = {"N": 0.0, "I": inside, "G": everywhere}
    sync_g = {
        "NN": 2 * everywhere, "NI": inside + 2 * across, "NG": everywhere, "II": 2 * across, "IG": across, "GG": 0.0,
    }[gradient + main]  # fmt: skip
    sync_p = {"NN": 0.0, "II": 0.0, "GG": 0.0, "NI": inside, "NG": everywhere, "IG": across}[p + main]
    return 2 * gather[p] * volume, gather[gradient] * part, sync_g * part, sync_p * part


@pytest.mark.parametrize("cell", KEPT_CELLS, ids=str)
def test_every_term_of_the_kept_cells(cell: Cell) -> None:
    """The derived terms equal the table (relative 1e-12, rounding)."""
    time = paper_time(cell, CLUSTER, num_params=7e9, num_trainable=1e9, accumulation=10)
    assert (time.param, time.gradient, time.sync_g, time.sync_p) == pytest.approx(table(str(cell), 112e9, 16e9), rel=1e-12)
    assert time.total == pytest.approx(10 * (time.param + time.gradient) + time.sync_g + time.sync_p, rel=1e-12)


PER_STEP = {
    "NNN": "AR_G'", "NNI": "RS_I' AR_X' AG_I'", "NII": "s.RS_I' AR_X' AG_I'", "INI": "sr.AG_I RS_I' AR_X'",
    "III": "sr.AG_I s.RS_I' AR_X'", "NNG": "RS_G' AG_G'", "NIG": "s.RS_I' RS_X' AG_G'", "NGG": "s.RS_G' AG_G'",
    "ING": "sr.AG_I RS_G' AG_X'", "IIG": "sr.AG_I s.RS_I' RS_X' AG_X'", "IGG": "sr.AG_I s.RS_G' AG_X'",
    "GNG": "sr.AG_G RS_G'", "GIG": "sr.AG_G s.RS_I' RS_X'", "GGG": "sr.AG_G s.RS_G'",
}  # fmt: skip


def by_hand(text: str, shape: MeshShape, *, s: int, r: int, trainable: int, frozen: int, element: ElementBytes) -> dict[str, int]:
    """Bytes per axis from a line of the method: RS and the AR of gradients in the reduce dtype, AG in the parameter dtype."""
    m, g = shape.dp_intra, shape.dp_inter
    total = {"dp_inter": 0.0, "dp_intra": 0.0}
    for term in text.split():
        factor, _, name = term.rpartition(".")
        kind, where = name.rstrip("'").split("_")
        numel = trainable if name.endswith("'") else trainable + frozen
        whole = numel * (element.param if kind == "AG" else element.reduce) * {"": 1, "s": s, "sr": s * r}[factor]
        whole *= 2 if kind == "AR" else 1
        if where in "IG":
            total["dp_intra"] += whole * (m - 1) / m
        if where in "XG":
            total["dp_inter"] += whole / m * (g - 1) / g
    return {axis: round(value) for axis, value in total.items()}


@pytest.mark.parametrize("cell", KEPT_CELLS, ids=str)
@pytest.mark.parametrize(("s", "r"), [(1, 2), (3, 3)])
def test_bytes_of_the_kept_cells_equal_the_printed_lines(cell: Cell, s: int, r: int) -> None:
    """Including the 2 x 3 grid, groups of one rank and a single group."""
    for inter, intra in ((2, 3), (3, 2), (1, 4), (4, 1), (1, 1)):
        shape = MeshShape(dp_inter=inter, dp_intra=intra)
        trainable, frozen = 48 * shape.dp, 80 * shape.dp
        unit = UnitSize(cell=cell, trainable=trainable, frozen=frozen, gathers=r)
        expected = by_hand(PER_STEP[str(cell)], shape, s=s, r=r, trainable=trainable, frozen=frozen, element=ElementBytes())
        assert step_bytes([unit], shape, ElementBytes(), accumulation=s) == expected


def test_bytes_of_the_eliminated_cells() -> None:
    """One value per missing transition, by hand: 2 x 2 ranks, 64 elements, 4 bytes each; whole 256, half 128, quarter 64."""
    shape, element = MeshShape(dp_inter=2, dp_intra=2), ElementBytes(param=4)
    for letters, intra, inter in (
        ("NGN", 128 + 128, 64 + 64),  # RS_G', then AG_G' of the sums; publishing moves nothing
        ("NIN", 128 + 128, 2 * 64),  # RS_I', AR_X' on half, AG_I'
        ("NGI", 128 + 128, 64 + 64),  # RS_G', AG_X' on half, publish AG_I'
        ("GNN", 2 * 128 + 2 * 128, 2 * 64 + 2 * 64),  # two AG_G, AR_G', publish slices
    ):
        found = step_bytes([UnitSize(cell=Cell.parse(letters), trainable=64)], shape, element, accumulation=1)
        assert found == {"dp_inter": inter, "dp_intra": intra}, letters


def test_inter_bytes_do_not_depend_on_accumulation_exactly_without_global_shards() -> None:
    shape = MeshShape(dp_inter=2, dp_intra=2)
    for cell in ALL_CELLS:
        one, three = (step_bytes([UnitSize(cell=cell, trainable=64)], shape, ElementBytes(), accumulation=s)["dp_inter"] for s in (1, 3))
        assert (one == three) == ("dp_inter" not in cell.param | cell.grad), cell


def test_a_frozen_prefix_is_gathered_once() -> None:
    shape = MeshShape(dp_inter=1, dp_intra=2)
    units = [UnitSize(cell=Cell.parse("ING"), trainable=0, frozen=64, gathers=1)]
    assert step_bytes(units, shape, ElementBytes(), accumulation=3) == {"dp_inter": 0, "dp_intra": 3 * 64}


def simulate_ring(whole: int, ranks: int) -> int:
    """Bytes a rank sends in a ring all-gather, block by block."""
    return sum(whole // ranks for _ in range(ranks - 1))


def test_bytes_of_each_algorithm() -> None:
    shape, whole = MeshShape(dp_inter=2, dp_intra=3), 6 * 100
    for operation, factor in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        ring = factor * simulate_ring(whole, 6)
        for name in ("hierarchical", "ho_ring"):
            sent = bytes_sent(operation, ("dp_inter", "dp_intra"), whole, shape, algorithm=name)
            # between groups one of two blocks of the rail's third; inside, two of three blocks of everything
            assert sent == {"dp_inter": factor * 100, "dp_intra": factor * 400}
        assert bytes_sent(operation, ("dp_inter", "dp_intra"), whole, shape, algorithm="ring") == {"dp_intra": ring}
        assert bytes_sent(operation, ("dp_inter", "dp_intra"), whole, shape, algorithm="ring", last_of_group=True) == {"dp_inter": ring}
        assert bytes_sent(operation, ("dp_intra",), whole, shape, algorithm="ring") == {"dp_intra": factor * 400}
        assert bytes_sent(operation, ("dp_inter",), whole, shape, algorithm="ho_ring") == {"dp_inter": factor * 300}
    assert bytes_sent("reduce_scatter", ("dp_intra",), whole, shape, algorithm="gloo") == {"dp_intra": 800}
    assert bytes_sent("all_gather", ("dp_intra",), whole, shape, algorithm="gloo") == {"dp_intra": 400}


def test_the_algorithm_may_depend_on_the_message() -> None:
    shape, seen = MeshShape(dp_inter=2, dp_intra=2), []

    def choose(operation: str, axes: tuple[str, ...], num_bytes: int) -> str:
        seen.append((operation, axes, num_bytes))
        return "gloo" if num_bytes < 256 else "ho_ring"

    unit = UnitSize(cell=Cell.parse("NIG"), trainable=64)
    found = step_bytes([unit], shape, ElementBytes(), accumulation=1, algorithm=choose)
    assert [item for item in seen if item[2]] == [
        ("reduce_scatter", ("dp_intra",), 256),
        ("reduce_scatter", ("dp_inter",), 128),
        ("all_gather", ("dp_inter", "dp_intra"), 128),
    ]
    assert found == {"dp_inter": 2 * 64, "dp_intra": 128 + 96}  # gloo's scatter sends twice; its all-gather is one ring of four


def test_operations_shrink_what_crosses_groups() -> None:
    """Whatever the cell, between groups nothing moves before it is scattered inside, unless one collective does both."""
    for cell, s in itertools.product(ALL_CELLS, (1, 3)):
        for op in operations(cell, accumulation=s):
            assert "dp_intra" in op.within or "dp_intra" in op.axes, (str(cell), op)


def test_what_each_option_sends_like() -> None:
    sizes = {"all_gather": 100, "reduce_scatter": 200, "all_reduce": 300}
    for name, on_gloo, on_nccl in (("native", "gloo", "ring"), ("ring", "ring", "ring"), ("ho_ring", "ho_ring", "ho_ring")):
        assert wire_algorithm(name, gloo=True, auto_bytes=sizes) == on_gloo
        assert wire_algorithm(name, gloo=False, auto_bytes=sizes) == on_nccl
    assert wire_algorithm("auto", gloo=False, auto_bytes=sizes) == "ring"
    auto = wire_algorithm("auto", gloo=True, auto_bytes=sizes)
    assert callable(auto)
    assert [auto("reduce_scatter", ("dp_intra",), size) for size in (199, 200)] == ["gloo", "ho_ring"]
