"""Times of collectives against the closed formulas of the method, by hand; relative 1e-12 unless said otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro_lm.config import ClusterConfig
from paro_lm.parallel.axes import DATA_AXES, MeshShape
from paro_lm.parallel.collectives import grid
from paro_lm.planner.links import AUTO_BYTES, Busy, Links

A100 = ClusterConfig(
    nodes=4, ranks_per_node=8, backend="nccl", intra_gbps=2000, inter_gbps=80, cards_per_node=1, intra_latency_us=5, inter_latency_us=20
)
SHAPE = MeshShape(dp_inter=4, dp_intra=8)
B, BI, A, AI, V = 80e9 / 8, 2000e9 / 8, 20e-6, 5e-6, 3.2e9


def test_inside_a_group_and_across_with_a_shared_card() -> None:
    links = Links(A100, SHAPE)
    inside, across = links.collective("all_gather", ("dp_intra",), V), links.collective("reduce_scatter", ("dp_inter",), V / 8)
    assert inside.seconds == pytest.approx(7 / 8 * V / BI + 7 * AI)
    assert across.seconds == pytest.approx(3 / 4 * (V / 8) / (B / 8) + 3 * A)  # eight rings share the card
    assert (inside.inter, across.intra) == (0, 0)
    assert links.collective("all_reduce", ("dp_inter",), V / 8).seconds == pytest.approx(2 * across.seconds)


def test_more_cards_serve_more_rings() -> None:
    """k cards: a ring of one rank gets min(B, k B / m), the flat ring of a node k B."""
    for cards, rank_share in ((1, 1 / 8), (4, 1 / 2), (8, 1), (16, 1)):
        links = Links(replace(A100, cards_per_node=cards, inter_latency_us=0), SHAPE)
        assert links.flow(("dp_inter",)).bandwidth == pytest.approx(B * rank_share)
        assert links.flow(DATA_AXES).bandwidth == pytest.approx(min(8 * rank_share * B, BI))


def test_flat_ring_hierarchy_and_ho_ring() -> None:
    flat = Links(A100, SHAPE, collectives="native").collective("all_gather", DATA_AXES, V).seconds
    hierarchical = Links(A100, SHAPE, collectives="hierarchical").collective("all_gather", DATA_AXES, V).seconds
    ho = Links(A100, SHAPE, collectives="ho_ring").collective("all_gather", DATA_AXES, V).seconds
    tau_x, tau_i = (V / 32) / (B / 8), 7 * V / (32 * BI)
    assert flat == pytest.approx(31 / 32 * V / B + 31 * A)
    assert hierarchical == pytest.approx(3 * tau_x + 4 * tau_i + 3 * A + 7 * AI)
    assert ho == pytest.approx(max(4 * tau_i, 3 * tau_x + tau_i) + 3 * A + 7 * AI)
    assert ho < hierarchical < flat


def test_where_the_inside_is_slow_ho_ring_hides_the_outside() -> None:
    links = Links(replace(A100, intra_gbps=20, intra_latency_us=0, inter_latency_us=0), SHAPE, collectives="ho_ring")
    assert links.collective("all_gather", DATA_AXES, V).seconds == pytest.approx(7 / 8 * V / (20e9 / 8))


def test_tensor_parallel_ranks_stay_inside_and_share_cards_with_their_siblings() -> None:
    links = Links(A100, MeshShape(dp_inter=4, dp_intra=2, tp=4))
    assert not links.flow(("tp",)).crosses
    assert not links.flow(("dp_intra",)).crosses
    assert links.flow(("dp_inter",)).bandwidth == pytest.approx(B / 8)
    assert links.flow(DATA_AXES).bandwidth == pytest.approx(2 * B / 8)  # four such rings leave the node at once


def test_groups_larger_than_a_node_cross_it() -> None:
    links = Links(A100, MeshShape(dp_inter=2, dp_intra=16), collectives="ho_ring")
    assert links.flow(("dp_intra",)).crosses
    assert links.flow(("dp_intra",)).bandwidth == pytest.approx(B)
    both = links.collective("all_gather", DATA_AXES, V)
    assert both.seconds == pytest.approx(15 / 16 * V / B + 15 * A + 1 / 2 * (V / 16) / (B / 8) + A)


def test_tensor_parallel_ranks_of_several_nodes_are_one_ring_or_groups() -> None:
    shape = MeshShape(dp_intra=2, tp=16)
    flat = Links(A100, shape).collective("all_reduce", ("tp",), V).seconds
    assert flat == pytest.approx(2 * (15 / 16 * V / B + 15 * A))
    grouped = Links(A100, shape, tp_collectives="hierarchical").collective("all_reduce", ("tp",), V).seconds
    inside, across = 7 / 8 * V / BI + 7 * AI, 1 / 2 * (V / 8) / (B / 8) + A
    assert grouped == pytest.approx(2 * (inside + across))
    fours = Links(A100, shape, tp_collectives="hierarchical", tp_group_size=4).collective("all_gather", ("tp",), V).seconds
    assert fours == pytest.approx(3 / 4 * V / BI + 3 * AI + 3 / 4 * (V / 4) / (2 * B / 8) + 3 * A)  # two ranks of a ring on each node
    ho = Links(A100, shape, tp_collectives="ho_ring").collective("all_reduce", ("tp",), V).seconds
    assert ho == pytest.approx(2 * (1 / 2 * (V / 8) / (B / 8) + 7 / 8 * V / BI / 2 + 7 * AI + A))
    data = Links(A100, shape, tp_collectives="ho_ring", collectives="native")
    assert data.collective("all_gather", ("dp_intra",), V) == Links(A100, shape, collectives="native").collective(
        "all_gather", ("dp_intra",), V
    )


def test_gloo_scatters_send_twice_and_auto_depends_on_the_message() -> None:
    native = Links(replace(A100, backend="gloo"), SHAPE, collectives="native")
    ratio = native.collective("reduce_scatter", ("dp_intra",), V).seconds / native.collective("all_gather", ("dp_intra",), V).seconds
    assert ratio == pytest.approx(2)
    auto = Links(replace(A100, backend="gloo"), SHAPE, collectives="auto")
    assert auto.collective("reduce_scatter", ("dp_intra",), V).seconds == pytest.approx(7 / 8 * V / BI + 7 * AI)
    assert auto.collective("reduce_scatter", ("dp_intra",), 1000).seconds == pytest.approx(2 * (7 / 8 * 1000 / BI + 7 * AI))
    assert AUTO_BYTES == grid.AUTO_BYTES


def test_nothing_moves_over_one_rank() -> None:
    links = Links(A100, MeshShape())
    assert links.collective("all_reduce", DATA_AXES, V) == Busy()
    assert links.small_all_reduce(DATA_AXES) == 0
    assert links.point_to_point(V) == 0


def test_beside_shares_links() -> None:
    assert Busy(2, 2, 0).beside(Busy(3, 0, 3)) == 3
    assert Busy(2, 2, 0).beside(Busy(3, 3, 0)) == 5
