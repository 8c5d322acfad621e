"""The backend's own collectives, in the nested layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paro_lm.parallel.collectives.lane import Lane, Workspace


def gather_single() -> Callable[..., Any]:
    """all_gather of one tensor into one tensor, by the name that this torch has for it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Callable[..., Any]:
    """reduce_scatter of one tensor into one tensor, by the name that this torch has for it."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """Calls the backend. `order[r]` is the chunk that rank r of the lane owns; other than in rank order it costs a copy.

    Bytes are counted by the ring that Gloo and NCCL use, as sent to the next rank; Gloo's reduce-scatter is an all-reduce.
    """

    def __init__(self, lane: Lane, order: Sequence[int], workspace: Workspace) -> None:
        self.lane, self.order, self.workspace = lane, tuple(order), workspace
        self.sent = lane.sent
        self.in_rank_order = self.order == tuple(range(lane.size))

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        if self.in_rank_order:
            gather_single()(output, shard, group=self.lane.group)
        else:
            by_rank = self.workspace.get("native", output.numel(), output.dtype)
            gather_single()(by_rank, shard, group=self.lane.group)
            for rank, chunk in enumerate(self.order):
                self._chunk(output, chunk).copy_(self._chunk(by_rank, rank))
        self._count(output, 1)

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor) -> None:
        if not self.in_rank_order:
            by_rank = self.workspace.get("native", input.numel(), input.dtype)
            for rank, chunk in enumerate(self.order):
                self._chunk(by_rank, rank).copy_(self._chunk(input, chunk))
            input = by_rank
        reduce_scatter_single()(shard, input, group=self.lane.group)
        self._count(input, 2 if input.device.type == "cpu" else 1)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.lane.group)
        self._count(tensor, 2)

    def _chunk(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        size = tensor.numel() // self.lane.size
        return tensor[index * size : (index + 1) * size]

    def _count(self, tensor: torch.Tensor, times: int) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        axis = self.lane.axes[(self.lane.rank + 1) % self.lane.size]
        self.sent[axis] += times * num_bytes * (self.lane.size - 1) // self.lane.size
