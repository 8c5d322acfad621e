"""Collectives of tensor parallelism across nodes: its ranks seen as groups (nodes) of ranks, by HO-Ring or the plain hierarchy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paro_lm.parallel.axes import DATA_AXES, MeshShape
from paro_lm.parallel.collectives.grid import GridCollectives
from paro_lm.parallel.collectives.ledger import ByteLedger
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.queue import Handle, InlineQueue, make_queue


class GroupedCollectives:
    """All-gather, reduce-scatter and all-reduce (sums) over the tp ranks as groups of `group_size`, on communicators of its own.

    algorithm    "ho_ring" or "hierarchical", as in GridCollectives
    record       told of (operation, bytes that this rank sent)
    overlap      whether calls with `beside` run on a thread (CUDA: a stream) of their own; all others run in the caller

    Tensors are contiguous. At most one call is under way at a time. Making an instance is a collective call of the whole world.
    Chunk c of a gathered tensor is that of rank `ranks[c]`; rank r owns chunk `order[r]`.
    """

    def __init__(
        self, mesh: ParallelMesh, *, algorithm: str, group_size: int, record: Callable[[str, int], None] | None = None, overlap: bool = True
    ) -> None:
        tp = mesh.size("tp")
        if group_size < 1 or tp % group_size:
            raise ValueError(f"parallel.tp_group_size={group_size} does not divide parallel.tp={tp}; use a divisor of {tp}.")
        # tp is the fastest axis: naming its ranks (dp_inter, dp_intra) and everything else pp leaves all global ranks as they are
        shape = MeshShape(pp=mesh.world_size // tp, dp_inter=tp // group_size, dp_intra=group_size)
        self._grid = GridCollectives(
            mesh.renamed(shape),
            algorithm=algorithm,
            ledger=None if record is None else _OneAxisLedger(record),
            device=mesh.device,
            layout="nested" if algorithm == "hierarchical" else "rank",
        )
        self.order = self._grid.chunk_order(DATA_AXES)
        self.ranks = [self.order.index(chunk) for chunk in range(tp)]
        self.in_rank_order = self.order == list(range(tp))
        self._here, self._beside = InlineQueue(), make_queue(mesh.device, overlap=overlap, name="tp-grouped")

    def all_reduce(self, x: Tensor, *, beside: bool = False) -> Handle:
        """The sum, in place."""
        return self._queue(beside).submit(lambda: self._grid.all_reduce(x.view(-1), DATA_AXES))

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """The shards of all ranks, in the order of chunks."""
        self._grid.all_gather(output.view(-1), shard.view(-1), DATA_AXES)

    def reduce_scatter(self, shard: Tensor, x: Tensor, *, beside: bool = False) -> Handle:
        """This rank's chunk of the sum of `x`, which is scratch afterwards."""
        return self._queue(beside).submit(lambda: self._grid.reduce_scatter(shard.view(-1), x.view(-1), DATA_AXES))

    def _queue(self, beside: bool) -> InlineQueue:
        return self._beside if beside else self._here  # type: ignore[return-value]


class _OneAxisLedger(ByteLedger):
    """Passes on what is sent over either level as bytes of one axis."""

    def __init__(self, record: Callable[[str, int], None]) -> None:
        super().__init__()
        self._record = record

    def record(self, operation: str, axis: str, num_bytes: int) -> None:
        self._record(operation, num_bytes)
