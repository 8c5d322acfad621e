"""The lines through samples by hand, and one real measurement of four ranks in two groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paro_lm.cli import load
from paro_lm.config import ClusterConfig, Config
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.planner.predict import predict
from paro_lm.testing import run_distributed
from paro_lm.tools.calibrate import (
    MODEL_VOCAB,
    CalibrateConfig,
    Sample,
    block_model,
    cluster_from,
    efficiency_from,
    line,
    measure,
    write,
)


def samples(link: str, latency: float, rate: float) -> list[Sample]:
    return [Sample(link, size, latency + size / rate) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)]


def test_a_line_gives_latency_and_bandwidth() -> None:
    latency, rate = line(samples("intra", 50e-6, 2e9))
    assert latency == pytest.approx(50e-6, rel=1e-6)
    assert rate == pytest.approx(2e9, rel=1e-6)


def test_noise_never_gives_a_negative_bandwidth() -> None:
    latency, rate = line([Sample("intra", 1 << 10, 5e-3), Sample("intra", 1 << 20, 4e-3)])
    assert rate == pytest.approx((1 << 20) / 4e-3)
    assert latency > 0


@pytest.mark.parametrize(("shared", "cards"), [(1e9 / 8, 1), (1e9 / 2, 4), (1e9, 8)])
def test_cards_are_what_all_ranks_get_over_what_one_gets(shared: float, cards: int) -> None:
    found = samples("intra", 5e-6, 100e9) + samples("inter", 20e-6, shared) + samples("card", 20e-6, 1e9)
    cluster = cluster_from(ClusterConfig(nodes=2, ranks_per_node=8), found)
    assert cluster.cards_per_node == cards
    assert cluster.inter_gbps == pytest.approx(8.0, rel=1e-3)
    assert (cluster.intra_gbps, cluster.inter_latency_us) == (pytest.approx(800.0), pytest.approx(20.0))


@pytest.mark.parametrize("efficiency", [0.07, 0.6])
def test_the_efficiency_is_the_one_that_predicts_what_was_measured(efficiency: float) -> None:
    """A model of the same blocks, planned as a run of one rank, takes the seconds that the efficiency came from."""
    cfg = CalibrateConfig(hidden_size=256, tokens=128)
    base = ClusterConfig(peak_tflops=0.05, memory_gbytes=20.0, unit_us=300.0)
    model = replace(block_model(cfg), vocab_size=MODEL_VOCAB)
    run = Config(model=model, seq_length=128, global_batch_size=1, micro_batch_size=1)
    time = predict(replace(run, cluster=replace(base, efficiency=efficiency)), world_size=1).time
    assert efficiency_from(base, time.compute, block_model(cfg), cfg) == pytest.approx(efficiency, rel=1e-6)
    assert efficiency_from(base, 0.0, block_model(cfg), cfg) == 1.0


def _measure(rank: int, world_size: int) -> tuple[ClusterConfig, int]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, local_world_size=2, device=torch.device("cpu"))
    cluster, found = measure(CalibrateConfig(largest_mib=0.25, repeats=1, hidden_size=64, tokens=64), mesh)
    return cluster, len(found)


def test_four_ranks_measure_the_same_cluster_and_its_file_composes(tmp_path: Path) -> None:
    results = run_distributed(_measure, 4)
    cluster, count = results[0]
    assert count == 3 * 5  # three kinds of links, 1 KiB to 256 KiB
    assert (cluster.nodes, cluster.ranks_per_node, cluster.backend) == (2, 2, "gloo")
    assert all((other.inter_gbps, other.overlap) == (cluster.inter_gbps, cluster.overlap) for other, _ in results)
    assert cluster.intra_gbps > 0
    assert 0 < cluster.efficiency <= 1
    write(cluster, samples("intra", 1e-6, 1e9), tmp_path)
    assert load([f"cluster={cluster.name}"], config_dir=tmp_path).cluster == cluster
