"""Step times against timelines worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro_lm.config import ClusterConfig
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.cost import ElementBytes, UnitSize, step_bytes
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner.links import Links
from paro_lm.planner.timing import StageCosts, StepTime, UnitWork, stage_time

# Two ranks in one group: a gather of V bytes takes V / 2 / rate. One byte per element, 1 unit of time per 1e9 bytes moved.
PAIR = ClusterConfig(
    nodes=1, ranks_per_node=2, backend="nccl", intra_gbps=8, intra_latency_us=0, inter_gbps=8, inter_latency_us=0, overlap=1.0
)
BYTES = ElementBytes(param=1, grad=1, reduce=1, main=1)
SIZE = 2_000_000_000  # a gather or scatter: 1 second


def unit(name: str, *, forward: float, backward: float, count: int = 1, size: int = SIZE) -> UnitWork:
    return UnitWork(name=name, trainable=size, frozen=0, gathers=2, count=count, forward=forward, backward=backward)


def run(cell: str, units: list[UnitWork], *, accumulation: int = 1, overlap: float = 1.0, shape: MeshShape | None = None) -> StepTime:

    links = Links(replace(PAIR, overlap=overlap), shape or MeshShape(dp_intra=2))
    cells = [Cell.parse(cell)] * len(units)
    return stage_time(units, cells, StageCosts(links, BYTES), accumulation=accumulation)


def test_replicas_compute_then_all_reduce_beside_the_backward() -> None:
    """NNN, 3 units of backward 4: all-reduces (2 s) hide but for the last one."""
    time = run("NNN", [unit("a", forward=2, backward=4, count=3)])
    assert time.total == pytest.approx(3 * 2 + 3 * 4 + 2)
    assert (time.compute, time.sync_g, time.overlap) == (18, 6, 4)


def test_a_slow_network_is_what_remains() -> None:
    """NNN with backward 1: 1 s, then two units of max(1, 2), then the last all-reduce."""
    time = run("NNN", [unit("a", forward=2, backward=1, count=3)])
    assert time.total == pytest.approx(6 + 1 + 2 + 2 + 2)


def test_without_overlap_everything_adds_up() -> None:
    time = run("III", [unit("a", forward=2, backward=4, count=3)], accumulation=2, overlap=0.0)
    assert time.overlap == pytest.approx(0)
    assert time.total == pytest.approx(2 * (18 + 6 * 1 + 3 * 1))
    assert time.param == pytest.approx(12)
    assert time.gradient == pytest.approx(6)


def test_sharded_parameters_are_prefetched_one_ahead() -> None:
    """III, one micro-batch, forward 2, backward 4: first gathers of both passes and the last reduction (1 s each) stay visible."""
    time = run("III", [unit("a", forward=2, backward=4, count=3)])
    assert time.total == pytest.approx((1 + 6) + (1 + 12) + 1)
    bound = run("III", [unit("a", forward=0.5, backward=0.5, count=3)])
    # forward: 1 + 1 + 1 + .5; backward: 1, then gather and scatter share one link: max(.5, 1), max(.5, 2), max(.5, 1), then 1
    assert bound.total == pytest.approx(3.5 + 1 + 1 + 2 + 1 + 1)


def test_updated_parameters_travel_beside_the_next_forward() -> None:
    """NNI over two ranks: publishing takes 1 s a unit; forwards of 2 hide all but the first, forwards of .5 none."""
    units = [unit("a", forward=2, backward=100, count=3)]
    assert run("NNI", units).total == pytest.approx(1 + 6 + 300 + 1)
    assert run("NNI", [unit("a", forward=0.5, backward=100, count=3)]).total == pytest.approx(3 + 0.5 + 300 + 1)


def test_terms_add_up_and_mixed_units_are_in_between() -> None:
    shape = MeshShape(dp_inter=2, dp_intra=2)
    units = [
        unit("embedding", forward=1, backward=1, size=SIZE // 2),
        unit("a", forward=2, backward=4, count=5),
        unit("head", forward=3, backward=6),
    ]
    links = Links(replace(PAIR, nodes=2, intra_gbps=80, overlap=0.7), shape, collectives="ho_ring")
    stage, totals = StageCosts(links, BYTES), {}
    for cell in KEPT_CELLS:
        time = stage_time(units, [cell] * 3, stage, accumulation=3)
        assert sum(time.terms().values()) == pytest.approx(time.total)
        assert 0 <= time.overlap <= time.communication
        totals[str(cell)] = time.total
    assert totals["GGG"] > totals["IIG"] > totals["NIG"]
    mixed = stage_time(units, [Cell.parse(cell) for cell in ("NIG", "IIG", "GGG")], stage, accumulation=3)
    assert totals["NIG"] < mixed.total < totals["GGG"]


def test_frozen_prefix_takes_no_part_in_backward() -> None:
    prefix = UnitWork(name="p", trainable=0, frozen=SIZE, gathers=1, forward=2, backward=0)
    time = run("III", [prefix, unit("a", forward=2, backward=4)])
    assert time.total == pytest.approx(1 + 2 + 2 + 1 + 4 + 1)
    assert time.param == pytest.approx(1 + 2)


def test_bubble_of_a_pipeline() -> None:
    links = Links(PAIR, MeshShape(pp=4, dp_intra=2))
    units = [unit("a", forward=2, backward=4, count=3, size=0)]
    time = stage_time(units, [Cell.parse("NNN")], StageCosts(links, BYTES), accumulation=8, p2p=0.0)
    assert time.bubble == pytest.approx(3 * 18)
    assert time.total - time.control == pytest.approx((8 + 3) * 18)


@pytest.mark.parametrize("cell", KEPT_CELLS, ids=str)
def test_seconds_are_the_bytes_of_the_ledger_over_the_bandwidth(cell: Cell) -> None:
    """Without latency and with one rank per link, the sum of all occupancies equals `step_bytes` over the rates, exactly."""

    shape = MeshShape(dp_inter=3, dp_intra=2)
    cluster = replace(PAIR, nodes=3, inter_gbps=4, cards_per_node=2, overlap=0.0)
    links, element = Links(cluster, shape, collectives="ho_ring"), ElementBytes()
    size = 960
    costs = StageCosts(links, element).of(unit("a", forward=0, backward=0, size=size), cell)
    inter = 3 * (2 * costs.gather.inter + costs.gradient.inter) + costs.sync_g.inter + costs.sync_p.inter
    intra = 3 * (2 * costs.gather.intra + costs.gradient.intra) + costs.sync_g.intra + costs.sync_p.intra
    sent = step_bytes([UnitSize(cell=cell, trainable=size)], shape, element, accumulation=3)
    assert inter == pytest.approx(sent["dp_inter"] / (4e9 / 8))
    assert intra == pytest.approx(sent["dp_intra"] / 1e9)
