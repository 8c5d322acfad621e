"""HO-Ring for models that PyTorch's own DDP or FSDP2 train; nothing else of this package is needed.

    state = HoRingState(grid_of_world(group_size=8, device=device))
    ddp_model.register_comm_hook(state, ho_ring_hook)

    use_ho_ring(fsdp_model, group_size=8, device=device)      # after fully_shard on every layer and on the model

`group_size` is the number of ranks of one node. Scripts that run: scripts/examples/.
"""

# No `from __future__ import annotations`: DDP compares the annotation of the hook's argument with the class.

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from paro_lm.parallel.collectives.grid import GridCollectives
from paro_lm.parallel.collectives.ledger import ByteLedger
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.queue import make_queue


def grid_of_world(
    *,
    group_size: int,
    device: torch.device | str,
    algorithm: str = "ho_ring",
    layout: str = "nested",
    ledger: ByteLedger | None = None,
) -> GridCollectives:
    """Collectives over all ranks, in groups of `group_size` consecutive ones. Every rank calls it, in the same order.

    Raises ValueError when the groups do not divide the world.
    """
    mesh = ParallelMesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), group_size=group_size, device=device)
    return GridCollectives(mesh, algorithm=algorithm, device=device, layout=layout, ledger=ledger)


class HoRingState:
    """What `ho_ring_hook` needs: the collectives, and a thread (CUDA: a stream) that runs them beside the backward pass."""

    def __init__(self, grid: GridCollectives, *, average: bool = True) -> None:
        self.grid, self.average = grid, average
        self.queue = make_queue(grid.device, overlap=True, name="ho-ring-ddp")

    def close(self) -> None:
        """End the thread; what was submitted is finished."""
        self.queue.close()


def ho_ring_hook(state: HoRingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean (or, by the state, the sum) of the bucket over all ranks, by HO-Ring."""
    grid, buffer = state.grid, bucket.buffer()
    device = grid.device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=None if device.type == "cpu" else [device])

    def reduce() -> None:
        try:
            if state.average:
                buffer.div_(grid.num_ranks(DATA_AXES))
            grid.all_reduce(buffer, DATA_AXES)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # the stub of torch names the value's type
            raise
        future.set_result(buffer)

    state.queue.submit(reduce)
    return future


class _FsdpCollective(Comm):
    def __init__(self, grid: GridCollectives) -> None:
        if grid.layout != "rank":
            raise ValueError(f'FSDP2 keeps shards in the order of ranks: make the collectives with layout="rank" (got {grid.layout!r}).')
        self.grid = grid

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def check(self, group: dist.ProcessGroup) -> None:
        ranks, ours = dist.get_process_group_ranks(group), self.grid.mesh.ranks(*DATA_AXES)
        if ranks != ours:
            raise ValueError(f"FSDP2 shards over ranks {ranks}, the collectives are over {ours}: give fully_shard a mesh of these ranks.")


class HoRingAllGather(_FsdpCollective, AllGather):
    """For `FSDPModule.set_custom_all_gather`. Blocks (CUDA: the stream that FSDP2 gathers on), whatever `async_op` says."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.check(group)
        self.grid.all_gather(output_tensor, input_tensor, DATA_AXES)
        return None


class HoRingReduceScatter(_FsdpCollective, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`; sums and means. Blocks as `HoRingAllGather` does."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check(group)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"HO-Ring reduce-scatter knows SUM and AVG, got {op}: call set_force_sum_reduction_for_comms(True).")
        self.grid.reduce_scatter(output_tensor, input_tensor, DATA_AXES)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self.grid.num_ranks(DATA_AXES))
        return None


def use_ho_ring(
    model: torch.nn.Module,
    *,
    group_size: int,
    device: torch.device | str,
    algorithm: str = "ho_ring",
    ledger: ByteLedger | None = None,
) -> None:
    """Gather and reduce every FSDP2 module of `model` (sharded over all ranks, one mesh axis) by HO-Ring.

    Every rank calls it. Raises ValueError when no module is sharded or the groups do not divide the world.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("use_ho_ring: no module is an FSDPModule; call fully_shard on the layers and on the model first.")
    # FSDP2 gathers and reduces on two streams; an instance of the collectives belongs to one.
    grids = [grid_of_world(group_size=group_size, device=device, algorithm=algorithm, layout="rank", ledger=ledger) for _ in range(2)]
    all_gather, reduce_scatter = HoRingAllGather(grids[0]), HoRingReduceScatter(grids[1])
    for module in modules:
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
