"""The hierarchy of HO-Ring without its overlap, to compare with: between groups, then inside each group, one after the other."""

from __future__ import annotations

import torch

from paro_lm.parallel.collectives.lane import Algorithm


class Hierarchical:
    """Composes an algorithm between groups (`outer`) with one inside a group (`inner`), in the nested layout.

    Local rank `local` of `group_size` owns the chunks local * g .. local * g + g - 1, which lie side by side: its rail. Over the
    same primitives it sends the same bytes over the same links as HO-Ring.
    """

    def __init__(self, outer: Algorithm, inner: Algorithm, local: int, group_size: int) -> None:
        assert outer.sent is inner.sent
        self.outer, self.inner, self.local, self.group_size, self.sent = outer, inner, local, group_size, outer.sent

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        rail = self._rail(output)
        self.outer.all_gather(rail, shard)
        self.inner.all_gather(output, rail)

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor) -> None:
        rail = self._rail(input)
        self.inner.reduce_scatter(rail, input)
        self.outer.reduce_scatter(shard, rail)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        rail = self._rail(tensor)
        self.inner.reduce_scatter(rail, tensor)
        self.outer.all_reduce(rail)
        self.inner.all_gather(tensor, rail)

    def _rail(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() // self.group_size
        return tensor[self.local * size : (self.local + 1) * size]
