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

Tensor-parallel ranks under `parallel.tp_collectives` are groups of their own: m = `parallel.tp_group_size`, g = tp / m.

Source: PaRO, arXiv 2310.06003, section 4, with latency and card sharing added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paro_lm.config import ClusterConfig
from paro_lm.parallel.axes import AXES, DATA_AXES, MeshShape, default_tp_group_size
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


@dataclass(frozen=True)
class Ring:
    """`size` ranks that send to each other what `flow` lets through."""

    size: int
    flow: Flow

    @property
    def latency(self) -> float:
        return (self.size - 1) * self.flow.latency

    def busy(self, num_bytes: float) -> Busy:
        """A gather or scatter of a whole of `num_bytes`."""
        seconds = (self.size - 1) / self.size * num_bytes / self.flow.bandwidth
        return Busy(seconds + self.latency, *((seconds, 0.0) if self.flow.crosses else (0.0, seconds)))


def _two_levels(inside: Ring, across: Ring, num_bytes: float, *, overlapped: bool) -> Busy:
    """Hierarchical in sequence, or HO-Ring: the first round of one level cannot hide, everything else does."""
    inner, outer = inside.busy(num_bytes), across.busy(num_bytes / inside.size)
    both = inner + outer
    if not overlapped or (inner.inter and outer.inter):  # groups larger than nodes: both levels need the same cards
        return both
    inner_busy, outer_busy = max(inner.inter, inner.intra), max(outer.inter, outer.intra)
    seconds = max(inner_busy, outer_busy + inner_busy / across.size) + inside.latency + across.latency
    return Busy(seconds, both.inter, both.intra)


class Links:
    """Collectives of one mesh on one cluster; costs are remembered, equal units ask for the same ones."""

    def __init__(
        self,
        cluster: ClusterConfig,
        shape: MeshShape,
        *,
        collectives: str = "auto",
        tp_collectives: str = "native",
        tp_group_size: int | None = None,
    ) -> None:
        self.cluster, self.shape = cluster, shape
        gloo = cluster.backend == "gloo"
        self.algorithm: Algorithm = wire_algorithm(collectives, gloo=gloo, auto_bytes=AUTO_BYTES)
        self.tensor_algorithm: Algorithm = wire_algorithm(tp_collectives, gloo=gloo, auto_bytes=AUTO_BYTES)
        self._tp_group = tp_group_size or default_tp_group_size(shape.tp, cluster.ranks_per_node)
        self._flows: dict[tuple[str, ...], Flow] = {}
        self._costs: dict[tuple[str, tuple[str, ...], float], Busy] = {}

    def flow(self, axes: Iterable[str]) -> Flow:
        """The share of the links that a communicator over `axes` (adjacent in the mesh) has while all its siblings work too."""
        key = tuple(axis for axis in AXES if axis in axes)
        if key not in self._flows:
            self._flows[key] = self._make_flow(key)
        return self._flows[key]

    def _make_flow(self, axes: tuple[str, ...]) -> Flow:
        inner = AXES[AXES.index(axes[-1]) + 1 :]
        return self._flow_of(self.shape.size(*axes), self.shape.size(*inner))

    def _flow_of(self, size: int, stride: int) -> Flow:
        """`size` ranks whose numbers are `stride` apart."""
        cluster = self.cluster
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
        algorithm = self.tensor_algorithm if live == ("tp",) else self.algorithm
        name = algorithm if isinstance(algorithm, str) else algorithm(operation, live, int(num_bytes))
        passes = 2 if operation == "all_reduce" or (name == "gloo" and operation == "reduce_scatter") else 1
        levels = self._levels(live) if name in ("hierarchical", "ho_ring") else None
        if levels is None:
            return self.ring(live, num_bytes) * passes
        return _two_levels(*levels, num_bytes, overlapped=name == "ho_ring") * passes

    def _levels(self, live: tuple[str, ...]) -> tuple[Ring, Ring] | None:
        """The rings inside and across groups; None where the ranks are one group."""
        if live == DATA_AXES:
            return self._ring(("dp_intra",)), self._ring(("dp_inter",))
        if live == ("tp",):
            inside, across = self._tp_group, self.shape.tp // self._tp_group
            return Ring(inside, self._flow_of(inside, 1)), Ring(across, self._flow_of(across, inside))
        return None

    def ring(self, axes: tuple[str, ...], num_bytes: float) -> Busy:
        """A gather or scatter over one ring of these axes."""
        return self._ring(axes).busy(num_bytes)

    def _ring(self, axes: tuple[str, ...]) -> Ring:
        return Ring(self.shape.size(*axes), self.flow(axes))

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
