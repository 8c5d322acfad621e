"""The collectives of the data axes: what the sharding engine calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.profiler import record_function

from paro_lm.parallel.collectives.hierarchical import Hierarchical
from paro_lm.parallel.collectives.ho_ring import HoRing
from paro_lm.parallel.collectives.lane import Algorithm, Lane, Workspace, same_memory
from paro_lm.parallel.collectives.ledger import ByteLedger
from paro_lm.parallel.collectives.native import Native
from paro_lm.parallel.collectives.ring import Ring
from paro_lm.parallel.collectives.streams import StreamHoRing
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh

ALGORITHMS = ("native", "ring", "hierarchical", "ho_ring", "auto")
LAYOUTS = ("nested", "rank")
Axes = tuple[str, ...]

# Smallest message, in bytes, from which own code beats Gloo's on emulated nodes; below, latency decides. Gloo's all-reduce over
# one axis sends no more than a ring and is as fast, so it is never replaced.
AUTO_BYTES = {"all_gather": 1 << 16, "reduce_scatter": 1 << 16, "all_reduce": 1 << 19}


class GridCollectives:
    """All-gather, reduce-scatter and all-reduce (sums) over dp_intra, dp_inter or both, on communicators of its own.

    Tensors are 1-D and contiguous. Chunks lie in the nested layout: shard index = intra_rank * inter_size + inter_rank; with
    `layout="rank"` in the order of ranks (inter_rank * intra_size + intra_rank), which is what FSDP2 uses.

    Calls block (on CUDA: the current stream) and are made in the same order on all ranks, from one thread or stream per
    instance. Making an instance is a collective call. `algorithm="auto"` on Gloo is HO-Ring for messages from `AUTO_BYTES` on
    and the backend's own below; on NCCL it is the backend's own unless `verified` says that HO-Ring was tried on this cluster.
    `chunk_bytes` is the size of a piece of the pipeline; None = from the message size.

    Every call raises ValueError for tensors of a wrong shape, stride or dtype, and for axes that are no data axes.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        algorithm: str = "auto",
        chunk_bytes: int | None = None,
        ledger: ByteLedger | None = None,
        device: torch.device | str = "cpu",
        verified: bool = False,
        layout: str = "nested",
    ) -> None:
        _check_options(algorithm, chunk_bytes, layout)
        self.mesh, self.algorithm, self.ledger, self.layout = mesh, algorithm, ledger, layout
        self._chunk_bytes, self._verified, self.device = chunk_bytes, verified, torch.device(device)
        self._in_streams = self.device.type != "cpu"
        self._sent: Counter[str] = Counter()
        self._workspace = Workspace(self.device)
        wanted: tuple[Axes, ...] = (("dp_inter",), ("dp_intra",), DATA_AXES)
        self._lanes: dict[Axes, Lane] = {axes: self._make_lane(axes) for axes in wanted if self._effective(axes) == axes}
        self._native: dict[Axes, Algorithm] = {axes: Native(lane, self._order(axes), self._workspace) for axes, lane in self._lanes.items()}
        self._chosen: dict[Axes, Algorithm] = {axes: self._make_algorithm(axes) for axes in self._lanes}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers that the calls so far needed; they live as long as the grid."""
        return self._workspace.num_bytes

    def num_ranks(self, axes: Iterable[str]) -> int:
        """Number of ranks over the axes = number of chunks of a tensor."""
        return self.mesh.size(*self._effective(axes))

    def shard_index(self, axes: Iterable[str]) -> int:
        """Which chunk this rank owns over the axes."""
        axes = self._effective(axes)
        return self._order(axes)[self.mesh.index(*axes)] if axes else 0

    def chunk_order(self, axes: Iterable[str]) -> list[int]:
        """The chunk that each rank over the axes owns, ranks in row-major order."""
        return self._order(self._effective(axes))

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, axes: Iterable[str]) -> None:
        """output = the shards of all ranks over `axes`. `shard` may be this rank's own range of `output`."""
        axes = self._check(output, shard, axes)
        if not axes:
            _copy(output, shard)
            return
        with self._counted("all_gather", axes):
            self._pick("all_gather", axes, output).all_gather(output, shard)

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor, axes: Iterable[str]) -> None:
        """shard = this rank's chunk of the sum of `input`, which is scratch afterwards. `shard` may be its own range of `input`."""
        axes = self._check(input, shard, axes)
        if not axes:
            _copy(shard, input)
            return
        with self._counted("reduce_scatter", axes):
            self._pick("reduce_scatter", axes, input).reduce_scatter(shard, input)

    def all_reduce(self, tensor: torch.Tensor, axes: Iterable[str]) -> None:
        """Sum in place, bitwise the same on all ranks. Any number of elements."""
        axes = self._effective(axes)
        _check_tensor("tensor", tensor)
        if not axes:
            return
        size = tensor.numel() - tensor.numel() % self.mesh.size(*axes)
        with self._counted("all_reduce", axes):
            if size:
                self._pick("all_reduce", axes, tensor).all_reduce(tensor[:size])
            if size < tensor.numel():  # fewer elements than ranks: what no equal chunks can be made of
                self._native[axes].all_reduce(tensor[size:])

    def _effective(self, axes: Iterable[str]) -> Axes:
        """The axes of more than one rank, in mesh order."""
        wanted = set(axes)
        if unknown := wanted - set(DATA_AXES):
            raise ValueError(f"collectives over axes {sorted(unknown)}: only data axes have them; choose from {DATA_AXES}.")
        return tuple(axis for axis in DATA_AXES if axis in wanted and self.mesh.size(axis) > 1)

    def _check(self, full: torch.Tensor, shard: torch.Tensor, axes: Iterable[str]) -> Axes:
        effective = self._effective(axes)
        _check_tensor("full tensor", full)
        _check_tensor("shard", shard)
        ranks = self.mesh.size(*effective)
        if full.numel() != shard.numel() * ranks or full.dtype != shard.dtype:
            raise ValueError(
                f"a shard of {shard.numel()} {shard.dtype} does not fit a tensor of {full.numel()} {full.dtype} over {ranks} ranks "
                f"({'+'.join(effective) or 'no axes'}): the tensor must have {shard.numel() * ranks} elements of the same dtype."
            )
        return effective

    def _pick(self, operation: str, axes: Axes, tensor: torch.Tensor) -> Algorithm:
        if self.algorithm != "auto":
            return self._chosen[axes]
        if self._in_streams:
            return self._chosen[axes] if self._verified else self._native[axes]
        one_ring = operation == "all_reduce" and len(axes) == 1
        large = not one_ring and tensor.numel() * tensor.element_size() >= AUTO_BYTES[operation]
        return self._chosen[axes] if large else self._native[axes]

    @contextlib.contextmanager
    def _counted(self, operation: str, axes: Axes) -> Iterator[None]:
        with record_function(f"paro::{operation}[{'+'.join(axes)}]"):
            yield
        if self.ledger is not None:
            for axis, num_bytes in self._sent.items():
                self.ledger.record(operation, axis, num_bytes)
        self._sent.clear()

    def _make_lane(self, axes: Axes) -> Lane:
        group = self.mesh.new_group(*axes)
        assert group is not None
        here = self.mesh.coordinate("dp_inter")
        crossing = ["dp_intra" if self.mesh.coordinates(rank)["dp_inter"] == here else "dp_inter" for rank in self.mesh.ranks(*axes)]
        return Lane(group, crossing, self._sent)

    def _order(self, axes: Axes) -> list[int]:
        """The chunk that each rank over `axes` owns, ranks in row-major order."""
        if len(axes) < 2 or self.layout == "rank":
            return list(range(self.mesh.size(*axes)))
        g, m = (self.mesh.size(axis) for axis in DATA_AXES)
        return [local * g + group for group in range(g) for local in range(m)]

    def _make_algorithm(self, axes: Axes) -> Algorithm:
        native = self._native[axes]
        if self.algorithm == "native":
            return native
        if self._in_streams:
            return self._make_for_nccl(axes)
        if self.algorithm == "ring":
            return Ring(self._lanes[axes], self._order(axes), self._workspace, self._chunk_bytes)
        inter, intra = ("dp_inter",), ("dp_intra",)
        if self.algorithm == "hierarchical" and axes == DATA_AXES:
            return self._hierarchical(
                HoRing(self._lanes[inter], None, [[i] for i in range(self.mesh.size("dp_inter"))], self._workspace, self._chunk_bytes),
                HoRing(None, self._lanes[intra], [list(range(self.mesh.size("dp_intra")))], self._workspace, self._chunk_bytes),
            )
        lanes = {axis: self._lanes[(axis,)] if axis in axes else None for axis in DATA_AXES}
        return HoRing(lanes["dp_inter"], lanes["dp_intra"], self._rectangle(axes), self._workspace, self._chunk_bytes)

    def _make_for_nccl(self, axes: Axes) -> Algorithm:
        if self.algorithm == "ring":
            raise ValueError("parallel.collectives=ring is a comparison on Gloo; on NCCL the backend's own is a ring: use native.")
        if axes != DATA_AXES:
            return self._native[axes]
        if self.algorithm == "hierarchical":
            return self._hierarchical(self._native[("dp_inter",)], self._native[("dp_intra",)])
        inter, intra = self._lanes[("dp_inter",)], self._lanes[("dp_intra",)]
        return StreamHoRing(inter, intra, self._rectangle(axes), self._workspace, self._chunk_bytes, device=self.device)

    def _hierarchical(self, outer: Algorithm, inner: Algorithm) -> Algorithm:
        if self.layout != "nested":
            raise ValueError('collectives "hierarchical" need layout="nested": in rank order a rail is not contiguous; use "ho_ring".')
        return Hierarchical(outer, inner, self.mesh.coordinate("dp_intra"), self.mesh.size("dp_intra"))

    def _rectangle(self, axes: Axes) -> list[list[int]]:
        order = self._order(axes)
        width = self.mesh.size("dp_intra") if "dp_intra" in axes else 1
        return [order[start : start + width] for start in range(0, len(order), width)]


def _check_options(algorithm: str, chunk_bytes: int | None, layout: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"parallel.collectives={algorithm} is unknown; choose from {', '.join(ALGORITHMS)}.")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"parallel.chunk_bytes={chunk_bytes}: a piece has at least one byte; use null to have it chosen.")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose from {', '.join(LAYOUTS)}.")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)}, strides {tensor.stride()}: collectives take 1-D contiguous tensors "
            "(Gloo reads strided memory wrongly, without an error); pass tensor.contiguous().view(-1)."
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if not same_memory(target, source):
        target.copy_(source)
