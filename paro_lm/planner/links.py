"""Seconds of one collective on a cluster: latency per message, cards shared by the ranks of a node, and the algorithm in use.

A communicator over some axes has `local` of its ranks on a node, so a node carries ranks_per_node / local such communicators at once,
and its cards are shared by them: a ring of one communicator gets local x min(B, k B / ranks_per_node) for k cards of B. Inside a node
each rank sends with B'. With a for the latency of a message, V the whole and (g, m) the grid:

    inside, AG or RS     (m-1)/m V/B' + (m-1) a'
    across, on V/m       (g-1)/g (V/m)/beta + (g-1) a
    flat ring            (n-1)/n V/beta_ring + (n-1) a
    hierarchical         across + inside
    HO-Ring              max(inside, across + inside / g), latencies once
    all-reduce           twice an all-gather

Source: PaRO, arXiv 2310.06003, section 4, with latency and card sharing added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paro_lm.config import ClusterConfig
from paro_lm.parallel.axes import AXES, DATA_AXES, MeshShape
from paro_lm.parallel.cost import Algorithm, wire_algorithm

GIGA, MICRO = 1e9, 1e-6
AUTO_BYTES = {"all_gather": 1 << 16, "reduce_scatter": 1 << 16, "all_reduce": 1 << 19}
"""Smallest message that `auto` gives to HO-Ring on Gloo (`collectives.grid.AUTO_BYTES`)."""


@dataclass(frozen=True)
class Busy:
    """Seconds of a collective, and how long it occupies the network cards and the links inside a node."""

    seconds: float = 0.0
    inter: float = 0.0
    intra: float = 0.0

    def __add__(self, other: Busy) -> Busy:
        return Busy(self.seconds + other.seconds, self.inter + other.inter, self.intra + other.intra)

    def __mul__(self, factor: float) -> Busy:
        return Busy(self.seconds * factor, self.inter * factor, self.intra * factor)

    def beside(self, other: Busy) -> float:
        """Seconds of two that run at once: each takes its time, and shared links carry both."""
        return max(self.seconds, other.seconds, self.inter + other.inter, self.intra + other.intra)


IDLE = Busy()


@dataclass(frozen=True)
class Flow:
    """What the ring of one communicator gets: bytes per second, seconds per message, whether it leaves the node."""

    bandwidth: float
    latency: float
    crosses: bool


class Links:
    """Collectives of one mesh on one cluster; costs are remembered, equal units ask for the same ones."""

    def __init__(self, cluster: ClusterConfig, shape: MeshShape, *, collectives: str = "auto") -> None:
        self.cluster, self.shape = cluster, shape
        self.algorithm: Algorithm = wire_algorithm(collectives, gloo=cluster.backend == "gloo", auto_bytes=AUTO_BYTES)
        self._flows: dict[tuple[str, ...], Flow] = {}
        self._costs: dict[tuple[str, tuple[str, ...], float], Busy] = {}

    def flow(self, axes: Iterable[str]) -> Flow:
        """The share of the links that a communicator over `axes` (adjacent in the mesh) has while all its siblings work too."""
        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._flows:
            self._flows[key] = self._make_flow(key)
        return self._flows[key]

    def _make_flow(self, axes: tuple[str, ...]) -> Flow:
        cluster, size = self.cluster, self.shape.size(*axes)
        inner = AXES[AXES.index(axes[-1]) + 1 :]
        stride = self.shape.size(*inner)
        local = min(size, max(1, cluster.ranks_per_node // stride))
        rank_rate = cluster.intra_gbps * GIGA / 8
        if local == size and stride * size <= cluster.ranks_per_node:
            return Flow(rank_rate, cluster.intra_latency_us * MICRO, False)
        card = cluster.inter_gbps * GIGA / 8
        share = local * min(card, cluster.cards_per_node * card / cluster.ranks_per_node)
        return Flow(min(share, rank_rate), cluster.inter_latency_us * MICRO, True)

    def collective(self, operation: str, axes: Iterable[str], num_bytes: float) -> Busy:
        """One collective whose whole has `num_bytes` (the output of a gather, the input of a scatter)."""
        live = tuple(axis for axis in AXES if axis in axes and self.shape.size(axis) > 1)
        if not live or num_bytes <= 0:
            return IDLE
        key = (operation, live, num_bytes)
        if key not in self._costs:
            self._costs[key] = self._collective(operation, live, num_bytes)
        return self._costs[key]

    def _collective(self, operation: str, live: tuple[str, ...], num_bytes: float) -> Busy:
        name = self.algorithm if isinstance(self.algorithm, str) else self.algorithm(operation, live, int(num_bytes))
        passes = 2 if operation == "all_reduce" or (name == "gloo" and operation == "reduce_scatter") else 1
        if live == DATA_AXES and name in ("hierarchical", "ho_ring"):
            inside = self.ring(("dp_intra",), num_bytes)
            across = self.ring(("dp_inter",), num_bytes / self.shape.dp_intra)
            return self._two_levels(inside, across, overlapped=name == "ho_ring") * passes
        return self.ring(live, num_bytes) * passes

    def ring(self, axes: tuple[str, ...], num_bytes: float) -> Busy:
        """A gather or scatter over one ring of these axes."""
        size, flow = self.shape.size(*axes), self.flow(axes)
        seconds = (size - 1) / size * num_bytes / flow.bandwidth
        return self._on(flow, seconds, seconds + (size - 1) * flow.latency)

    def _two_levels(self, inside: Busy, across: Busy, *, overlapped: bool) -> Busy:
        """Hierarchical in sequence, or HO-Ring: the first round of one level cannot hide, everything else does."""
        both = inside + across
        if not overlapped:
            return both
        latency = (self.shape.dp_intra - 1) * self.flow(("dp_intra",)).latency + (self.shape.dp_inter - 1) * self.flow(
            ("dp_inter",)
        ).latency
        inner, outer = max(inside.inter, inside.intra), max(across.inter, across.intra)
        if inside.inter and across.inter:  # groups larger than nodes: both levels need the same cards
            return Busy(both.seconds, both.inter, both.intra)
        return Busy(max(inner, outer + inner / self.shape.dp_inter) + latency, both.inter, both.intra)

    def _on(self, flow: Flow, busy: float, seconds: float) -> Busy:
        return Busy(seconds, busy, 0.0) if flow.crosses else Busy(seconds, 0.0, busy)

    def small_all_reduce(self, axes: Iterable[str]) -> float:
        """Seconds of an all-reduce of a few bytes: up and down a tree."""
        live = tuple(axis for axis in AXES if axis in axes and self.shape.size(axis) > 1)
        return 2 * math.ceil(math.log2(self.shape.size(*live))) * self._slowest(live).latency if live else 0.0

    def _slowest(self, axes: tuple[str, ...]) -> Flow:
        return max((self.flow((axis,)) for axis in axes), key=lambda flow: flow.latency)

    def point_to_point(self, num_bytes: float) -> float:
        """Seconds to hand `num_bytes` to the next pipeline stage."""
        if self.shape.pp == 1:
            return 0.0
        flow = self.flow(("pp",))
        return num_bytes / flow.bandwidth + flow.latency
