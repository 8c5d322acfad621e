"""HO-Ring for backends that work in streams (NCCL): the same positions, launched in one fixed order on two streams.

The host never waits. Each ring step and each exchange is one `batch_isend_irecv` on the communicator of its axis; waiting for
it only orders the stream it was launched on. All ranks launch the same operations in the same order, over both communicators:
two NCCL communicators that are launched in different orders on different ranks can block each other.
On a backend without streams (Gloo) the same code runs one operation after the other, which is how its values are tested.
It has not run on more than one GPU yet; `auto` takes it only where it was verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from paro_lm.parallel.collectives.ho_ring import HoRing
from paro_lm.parallel.collectives.lane import Lane, Pieces, add_up, same_memory

Message = tuple[torch.Tensor, int]  # what, and the peer in the lane


class _Stream:
    """A side stream of a device, or the order of the program where there are no streams."""

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def __enter__(self) -> None:
        self._context = contextlib.nullcontext() if self._module is None else self._module.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def mark(self) -> Any:
        """The work launched on this stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def after(self, mark: Any) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def fork(self) -> None:
        """Start after everything the caller's stream has."""
        if self._module is not None:
            self._stream.wait_stream(self._module.current_stream())

    def join(self) -> None:
        """Make the caller's stream wait for this one."""
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)


class StreamHoRing(HoRing):
    """HO-Ring over g groups of m ranks, for NCCL. Needs g > 1 and m > 1; over one axis the backend's own ring is as good."""

    def __init__(self, inter: Lane, intra: Lane, *args: Any, device: torch.device) -> None:
        super().__init__(inter, intra, *args)
        self.outer, self.inner = _Stream(device), _Stream(device)
        self.lanes = {True: inter, False: intra}

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        own = self.chunk(output, self.i, self.j)
        if not same_memory(own, shard):
            own.copy_(shard)
        with self._both_streams():
            self._gather(output, self._pieces(output))

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor) -> None:
        with self._both_streams():
            self._scatter(input, shard, self._pieces(input))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with self._both_streams():
            pieces = self._pieces(tensor)
            self._scatter(tensor, self.chunk(tensor, self.i, self.j), pieces)
            self.inner.after(self.outer.mark())
            self._gather(tensor, pieces)

    def _pieces(self, tensor: torch.Tensor) -> Pieces:
        numel = tensor.numel() // (self.groups * self.group_size)
        size = self.chunk_bytes or 4 << 20  # a launch costs tens of microseconds: larger pieces than between processes
        return Pieces.cut(numel, tensor.element_size(), size, levels=2)

    @contextlib.contextmanager
    def _both_streams(self) -> Any:
        self.outer.fork()
        self.inner.fork()
        yield
        self.outer.join()
        self.inner.join()

    def _exchange(self, between_groups: bool, sends: Iterable[Message], receives: Iterable[Message]) -> None:
        lane = self.lanes[between_groups]
        operations = []
        for tensor, peer in sends:
            lane.count(tensor, peer)
            operations.append(dist.P2POp(dist.isend, tensor, group=lane.group, group_peer=peer))
        for tensor, peer in receives:
            operations.append(dist.P2POp(dist.irecv, tensor, group=lane.group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _gather(self, buffer: torch.Tensor, pieces: Pieces) -> None:
        arrived: dict[tuple[int, int], Any] = {}
        for k in range(self.groups):
            for p in range(pieces.count):
                if k + 1 < self.groups:
                    with self.outer:
                        here = pieces.of(self.chunk(buffer, self.group_at(-k), self.j), p)
                        coming = pieces.of(self.chunk(buffer, self.group_at(-k - 1), self.j), p)
                        self._exchange(True, [(here, self.group_at(1))], [(coming, self.group_at(-1))])
                        arrived[k + 1, p] = self.outer.mark()
                with self.inner:
                    self.inner.after(arrived.pop((k, p), None))
                    parts = [pieces.of(self.chunk(buffer, self.group_at(-k), local), p) for local in range(self.group_size)]
                    own = parts[self.j]
                    self._exchange(False, [(own, peer) for peer in self.peers], [(parts[peer], peer) for peer in self.peers])

    def _scatter(self, buffer: torch.Tensor, out: torch.Tensor, pieces: Pieces) -> None:
        slots = self.workspace.get("inter", pieces.numel, buffer.dtype)
        for k in range(self.groups):
            for p in range(pieces.count):
                parts = [pieces.of(self.chunk(buffer, self.group_at(-1 - k), local), p) for local in range(self.group_size)]
                own, slot = parts[self.j], pieces.of(slots, p)
                with self.inner:
                    terms = self._receive_terms(parts, own)
                    add_up(own, terms, self.workspace)
                    added = self.inner.mark()
                with self.outer:
                    self.outer.after(added)
                    last = k == self.groups - 1
                    if k > 0:
                        torch.add(own, slot, out=pieces.of(out, p) if last else own)
                    if not last:
                        self._exchange(True, [(own, self.group_at(1))], [(slot, self.group_at(-1))])

    def _receive_terms(self, parts: list[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        """Exchange one position inside the group; the contributions to this rank's part, its own first."""
        numel = own.numel()
        scratch = self.workspace.get("intra", numel * (self.group_size - 1), own.dtype)
        terms = [scratch[at * numel : (at + 1) * numel] for at in range(self.group_size - 1)]
        receives = list(zip(terms, self.peers, strict=True))
        self._exchange(False, [(parts[peer], peer) for peer in self.peers], receives)
        return [own, *terms]
