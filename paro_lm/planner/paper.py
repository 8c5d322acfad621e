"""The paper's formulas with latency and computation, fitted to what its text publishes: four constants, stated with their errors.

    T = computation + t_comm(paper) + latency per message x messages

Communication is `parallel.cost.paper_time` (flat rings, B = 80, B' = 2000 Gbit/s, no sharing of the card) and adds up with
computation, which fits the text better than overlap. Parameters travel block by block, gradients in buckets of BUCKET elements; a
message over a ring of n ranks waits n - 1 times. Fitted: the efficiency of computation, the latency of an inter-group hop, and the
computation of partial and of PEFT training relative to full training (how they were trained is not published).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from paro_lm.parallel.axes import DATA_AXES, MeshShape
from paro_lm.parallel.cost import PaperCluster, operations, paper_time, paper_time_hpz
from paro_lm.parallel.sharding import Cell
from paro_lm.planner import published as paper
from paro_lm.planner.published import Claim, Setting

PEAK_FLOPS = 312e12
TOLERANCE = 0.2
"""Of the logarithm of a ratio."""
INTRA_LATENCY = 5e-6
BUCKET = 5e8
"""Elements of a gradient message (the default bucket of the baselines); parameters are gathered block by block."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted constants: share of the peak, seconds per inter-group hop, computation relative to full training."""

    efficiency: float
    latency: float
    partial: float
    peft: float


FITTED = Constants(efficiency=0.0860, latency=604e-6, partial=0.2009, peft=1.546)
"""What `fit` finds for all claims; a test holds it against a new fit."""
BOUNDS = Constants(efficiency=0.5, latency=2e-3, partial=1.0, peft=2.0)
LOWEST = Constants(efficiency=0.03, latency=1e-6, partial=0.15, peft=0.3)


@dataclass(frozen=True)
class Scenario:
    """A step without the fitted constants: seconds of communication, hops between groups, seconds of computation at the peak."""

    communication: float
    hops: float
    compute: float
    trained: str

    def seconds(self, constants: Constants) -> float:
        share = {"full": 1.0, "1/16": constants.partial, "PEFT": constants.peft}[self.trained]
        return self.communication + self.hops * constants.latency + share * self.compute / constants.efficiency


def shape_of(ranks: int) -> MeshShape:
    return MeshShape(dp_inter=ranks // paper.GROUP, dp_intra=paper.GROUP)


def cluster_of(ranks: int) -> PaperCluster:
    return PaperCluster(shape=shape_of(ranks), inter_bandwidth=paper.INTER_BANDWIDTH, intra_bandwidth=paper.INTRA_BANDWIDTH)


@functools.lru_cache(maxsize=1024)
def scenario(name: str, setting: Setting, *, ranks: int, samples: int, reduce_each: bool = False) -> Scenario:
    """A step of `samples` samples for a cell, a baseline's name, or hpZ.

    `reduce_each`: gradients are reduced over all ranks in every micro-batch although the cell could wait.
    """
    accumulation = samples / (ranks * paper.MICRO_BATCH)
    cluster, psi, part = cluster_of(ranks), setting.num_params, setting.num_trainable
    if name == paper.HPZ:
        time, waits = paper_time_hpz(cluster, num_params=psi, num_trainable=part, accumulation=1), _waits_hpz(cluster.shape)
    else:
        cell = Cell.parse(paper.BASELINES.get(name, name))
        time, waits = paper_time(cell, cluster, num_params=psi, num_trainable=part, accumulation=1), _waits(cell, cluster.shape)
    buckets = max(1.0, part / BUCKET)
    per_micro = accumulation * time.param + accumulation * time.gradient
    once = time.sync_p + time.sync_g * (accumulation if reduce_each else 1)
    inter, intra = (
        accumulation * ((paper.LAYERS[setting.model] + 2) * kind["param"] + buckets * kind["gradient"])
        + buckets * (kind["sync_g"] * (accumulation if reduce_each else 1) + kind["sync_p"])
        for kind in waits
    )
    passes = 8 if setting.model == "65B" else 6  # activation checkpointing for 65B only
    flops = passes * psi * samples * paper.SEQUENCE
    return Scenario(per_micro + once + intra * INTRA_LATENCY, inter, flops / ranks / PEAK_FLOPS, setting.trained)


def _waits(cell: Cell, shape: MeshShape) -> tuple[dict[str, float], dict[str, float]]:
    """Messages that one collective of each phase waits for, one after the other: between groups, and inside one."""
    inter, intra = ({"param": 0.0, "gradient": 0.0, "sync_g": 0.0, "sync_p": 0.0} for _ in range(2))
    for op in operations(cell, accumulation=1):
        steps = (shape.size(*op.axes) - 1) * (2 if op.operation == "all_reduce" else 1) * op.count
        (inter if "dp_inter" in op.axes else intra)[op.phase] += steps
    return inter, intra


def _waits_hpz(shape: MeshShape) -> tuple[dict[str, float], dict[str, float]]:
    whole = float(shape.size(*DATA_AXES) - 1)
    inter = {"param": whole, "gradient": whole, "sync_g": 0.0, "sync_p": 0.0}
    return inter, {"param": shape.dp_intra - 1.0, "gradient": 0.0, "sync_g": 0.0, "sync_p": 0.0}


def predict(claim: Claim, constants: Constants) -> float:
    """Our value of a published figure."""

    def seconds(name: str, ranks: int) -> float:
        # The text's gain over ZeRO-1 is that of not reducing in every micro-batch: its baseline did.
        step = scenario(name, claim.setting, ranks=ranks, samples=claim.samples, reduce_each=name == "ZeRO-1" and claim.name == "R8")
        return step.seconds(constants)

    def scaling(name: str) -> float:
        return seconds(name, claim.ranks) / seconds(name, claim.to_ranks) * claim.ranks / claim.to_ranks

    if claim.kind == "ratio":
        return seconds(claim.baseline, claim.ranks) / seconds(claim.cell, claim.ranks)
    if claim.kind == "scaling":
        return scaling(claim.cell)
    return scaling(claim.cell) / scaling(claim.baseline)


def deviation(claim: Claim, value: float) -> float:
    """ln ours / ln published - 1: 0 is equal, -1 is no effect at all, below -1 the wrong sign."""
    return math.log(value) / math.log(claim.published) - 1


def fit(claims: Sequence[Claim] = paper.CLAIMS, *, seed: int = 0) -> Constants:
    """Constants that bring the claims within TOLERANCE as far as they can; a seeded search, the same on every machine."""
    random = np.random.default_rng(seed)
    low, high = np.log(np.array(astuple(LOWEST))), np.log(np.array(astuple(BOUNDS)))

    def loss(point: np.ndarray) -> float:
        constants = _constants(point)
        return sum(_penalty(deviation(claim, predict(claim, constants))) for claim in claims)

    points = low + (high - low) * random.random((400, len(low)))
    best = min(points, key=loss)
    value = loss(best)
    for step in np.geomspace(0.4, 0.002, 600):
        moved = np.clip(best + step * random.standard_normal(len(best)) * (random.random(len(best)) < 0.5), low, high)
        if (new := loss(moved)) < value:
            best, value = moved, new
    return _constants(best)


def _penalty(deviation: float) -> float:
    """What lies outside the tolerance, up to 1 (a claim that the formulas cannot reach must not spoil the others), and a little inside."""
    return min(1.0, max(0.0, abs(deviation) - 0.95 * TOLERANCE)) + 0.05 * min(1.0, abs(deviation))


def _constants(point: np.ndarray) -> Constants:
    return Constants(**{item.name: float(value) for item, value in zip(fields(Constants), np.exp(point), strict=True)})


def leave_one_out(claims: Sequence[Claim] = paper.CLAIMS, *, seed: int = 0) -> dict[str, float]:
    """Deviation of every claim under constants that were fitted without it."""
    return {
        claim.name: deviation(claim, predict(claim, fit([other for other in claims if other is not claim], seed=seed))) for claim in claims
    }


def ring_seconds(ranks: int, num_bytes: float, constants: Constants) -> tuple[float, float]:
    """(flat ring, HO-Ring) seconds of an all-gather of `num_bytes` over nodes of 8 ranks with one card each.

    Between groups m rings share the card, so HO-Ring sends (g-1)/g of the bytes over it: the physical limit.
    """
    shape, bits = shape_of(ranks), 8 * num_bytes
    flat = (ranks - 1) / ranks * bits / paper.INTER_BANDWIDTH + (ranks - 1) * constants.latency
    g, m = shape.dp_inter, shape.dp_intra
    across, inside = (g - 1) / g * bits / paper.INTER_BANDWIDTH, (m - 1) / m * bits / paper.INTRA_BANDWIDTH
    latency = (g - 1) * constants.latency + (m - 1) * INTRA_LATENCY
    return flat, max(inside, across + inside / g) + latency


def guideline(setting: Setting, cells: Sequence[Cell], *, ranks: int = paper.RANKS) -> list[tuple[Cell, float, float]]:
    """(cell, t_comm, log 1/T) of the paper's guideline, the best first: formulas only, nothing fitted, no latency."""
    cluster = cluster_of(ranks)
    times = [
        (
            cell,
            paper_time(cell, cluster, num_params=setting.num_params, num_trainable=setting.num_trainable, accumulation=paper.ACCUMULATION),
        )
        for cell in cells
    ]
    ranked = sorted(times, key=lambda item: (item[1].total, str(item[0])))
    return [(cell, time.total, -math.log(time.total)) for cell, time in ranked]
