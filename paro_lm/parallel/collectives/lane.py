"""What all collectives stand on: lanes (counted point-to-point messages), scratch memory, pieces, and sums."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Algorithm(Protocol):
    """The three collectives over one fixed set of ranks. Tensors are 1-D and contiguous; calls block."""

    sent: Counter[str]  # bytes that this rank sent, per axis, since somebody last emptied it

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None: ...

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_reduce(self, tensor: torch.Tensor) -> None: ...


class Lane:
    """One communicator as this rank sees it. Peers are ranks of the group; `axes[peer]` is the axis a message to it travels."""

    def __init__(self, group: dist.ProcessGroup, axes: Sequence[str], sent: Counter[str]) -> None:
        assert len(axes) == dist.get_world_size(group)
        self.group, self.axes, self.sent = group, tuple(axes), sent
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending; the tensor must not change until the returned work is waited for."""
        self.count(tensor, peer)
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into a contiguous tensor."""
        work = dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)
        assert work is not None
        return work

    def count(self, tensor: torch.Tensor, peer: int) -> None:
        self.sent[self.axes[peer]] += tensor.numel() * tensor.element_size()


class Workspace:
    """Scratch buffers that live as long as their owner and only grow: fresh memory costs page faults on every use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def get(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor; the same memory at each call with the same name."""
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[name] = torch.empty(-(-num_bytes // 64) * 64, dtype=torch.uint8, device=self._device)
        return buffer[:num_bytes].view(dtype)


class Pieces:
    """A chunk of `numel` elements cut into pieces of at most `piece` elements.

    Towards both ends pieces halve, down to an eighth but not below `smallest`: the first one fills the pipeline and the last
    one drains it, and during both one of the two levels of links stands still. `largest` is the size of the largest one.
    """

    def __init__(self, numel: int, piece: int, smallest: int) -> None:
        self.numel = numel
        taper = [size for size in (piece // 8, piece // 4, piece // 2) if size >= smallest]
        middle = numel - 2 * sum(taper)
        if middle < piece:
            taper, middle = [], numel
        parts = -(-middle // piece)
        sizes = [*taper, *(middle * (at + 1) // parts - middle * at // parts for at in range(parts)), *reversed(taper)]
        self.bounds = list(itertools.accumulate(sizes, initial=0))
        self.count = len(self.bounds) - 1
        self.largest = max(sizes, default=0)

    @classmethod
    def cut(cls, numel: int, itemsize: int, chunk_bytes: int | None, *, levels: int) -> Pieces:
        """Pieces of `chunk_bytes` where given, else by the size of the chunk.

        With two levels of links a third of the chunk, from 512 KiB to 2 MiB: small pieces shorten the filling and draining of
        the pipeline, large ones save messages. That was best or within noise of it for 16 and 64 MiB on emulated nodes (2x2 and
        2x4 ranks at 500 Mbit, with fast and with slow links inside the nodes). With one level there is nothing to overlap but
        the additions: up to 4 MiB.
        """
        if chunk_bytes is not None:
            return cls(numel, max(1, chunk_bytes // itemsize), 1)
        size = 4 << 20
        if levels > 1:
            size = min(max(-(-numel * itemsize // 3 // 4096) * 4096, 1 << 19), 2 << 20)
        return cls(numel, size // itemsize, (1 << 17) // itemsize if levels > 1 else size)

    def of(self, chunk: torch.Tensor, index: int) -> torch.Tensor:
        return chunk[self.bounds[index] : self.bounds[index + 1]]


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def add_up(out: torch.Tensor, terms: Sequence[torch.Tensor], workspace: Workspace) -> None:
    """out = sum of the terms, in their order. `out` may be one of the terms. 16-bit terms add up in fp32 and are rounded once."""
    if len(terms) > 2 and out.dtype in SIXTEEN_BIT:
        total = workspace.get("fp32", out.numel(), torch.float32)
        total.copy_(terms[0])
        for term in terms[1:]:
            total.add_(term)
        out.copy_(total)
        return
    if len(terms) == 1:
        if not same_memory(out, terms[0]):
            out.copy_(terms[0])
        return
    assert not any(same_memory(out, term) for term in terms[2:])
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
