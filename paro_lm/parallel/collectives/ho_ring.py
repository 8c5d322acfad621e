"""HO-Ring: a ring over groups and an exchange inside each group that work at the same time, on different pieces.

Ranks form a g x m rectangle: rank (i, j) is local rank j of group i. A tensor has g * m chunks, `order[i][j]` is the chunk
that rank (i, j) owns. Each chunk is cut into pieces. A *position* is (k, p): ring step k of g, piece p. All ranks go through
the positions in the same order.

All-gather, ring step k: piece p of the chunk of group i - k is passed on to (i + 1, j) and handed to the m - 1 local peers.
Reduce-scatter is its time reversal: at step k the group adds up the chunk of group i - 1 - k and rank (i, j) passes its part,
with what came from (i - 1, j), on to (i + 1, j); step g - 1 finishes the chunk of the group itself.
All-reduce is both: a piece starts its all-gather the moment it is finished.

No deadlock: receives are posted before anything waits, sends never block, and the message that a rank waits for at position t
was sent by its peer before that peer waited at position t. By induction over positions every wait ends.

Where the wire type has 16 bits, a rank adds the m contributions of its group and the partial sum of the groups before it in
fp32 and rounds once; so a sum is rounded at most g times (n - 1 times in a flat ring of n ranks). Reduce in fp32 to lose nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paro_lm.parallel.collectives.lane import Lane, Pieces, Workspace, add_up, same_memory

INTRA_DEPTH = 2  # pieces of the inner exchange of a reduce-scatter in flight: more delay the first one, and cost scratch memory


class HoRing:
    """The three collectives over g groups of m ranks, by point-to-point messages on Gloo.

    `inter` connects the ranks with the same j (g ranks, None when g = 1), `intra` those with the same i (None when m = 1).
    With m = 1 it is a plain ring, with g = 1 a direct exchange.
    """

    def __init__(
        self, inter: Lane | None, intra: Lane | None, order: Sequence[Sequence[int]], workspace: Workspace, chunk_bytes: int | None
    ) -> None:
        self.inter, self.intra, self.order, self.workspace, self.chunk_bytes = inter, intra, order, workspace, chunk_bytes
        self.groups, self.group_size = len(order), len(order[0])
        self.i = inter.rank if inter else 0
        self.j = intra.rank if intra else 0
        assert (inter.size if inter else 1, intra.size if intra else 1) == (self.groups, self.group_size)
        self.sent: Counter[str] = (inter or intra).sent if (inter or intra) else Counter()  # type: ignore[union-attr]

    @property
    def peers(self) -> list[int]:
        """Local peers, each rank starting with the next one, so that not all send to the same."""
        return [(self.j + step) % self.group_size for step in range(1, self.group_size)]

    def group_at(self, step: int) -> int:
        return (self.i + step) % self.groups

    def chunk(self, tensor: torch.Tensor, group: int, local: int) -> torch.Tensor:
        """The chunk of `tensor` that rank (group, local) owns."""
        size = tensor.numel() // (self.groups * self.group_size)
        start = self.order[group][local] * size
        return tensor[start : start + size]

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        own = self.chunk(output, self.i, self.j)
        if not same_memory(own, shard):
            own.copy_(shard)
        gather = _Gather(self, output, self._pieces(output), tag=0)
        for piece in range(gather.pieces.count):
            gather.send_own(piece)
        gather.finish()

    def reduce_scatter(self, shard: torch.Tensor, input: torch.Tensor) -> None:
        scatter = _Scatter(self, input, shard, self._pieces(input))
        scatter.run(lambda piece: None)
        scatter.finish()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pieces = self._pieces(tensor)
        # A peer sends the finished sum of a piece only after it received this rank's part of it, so what the receives posted
        # here write has already left this rank.
        gather = _Gather(self, tensor, pieces, tag=self.groups * pieces.count)
        scatter = _Scatter(self, tensor, self.chunk(tensor, self.i, self.j), pieces)
        scatter.run(gather.send_own)
        gather.finish()
        scatter.finish()

    def _pieces(self, tensor: torch.Tensor) -> Pieces:
        numel = tensor.numel() // (self.groups * self.group_size)
        levels = (self.groups > 1) + (self.group_size > 1)
        return Pieces.cut(numel, tensor.element_size(), self.chunk_bytes, levels=levels)


class _Gather:
    """One all-gather under way, in place in `buffer`; all receives are posted at once."""

    def __init__(self, ring: HoRing, buffer: torch.Tensor, pieces: Pieces, tag: int) -> None:
        self.ring, self.buffer, self.pieces, self.tag = ring, buffer, pieces, tag
        self.sends: list[dist.Work] = []
        self.from_ring: list[dist.Work] = []
        self.from_peers: list[dist.Work] = []
        for k in range(ring.groups):
            for p in range(pieces.count):
                if k > 0:
                    assert ring.inter is not None
                    self.from_ring.append(ring.inter.receive(self._part(k, ring.j, p), ring.group_at(-1), self._tag(k, p)))
                for peer in ring.peers:
                    assert ring.intra is not None
                    self.from_peers.append(ring.intra.receive(self._part(k, peer, p), peer, self._tag(k, p)))

    def _tag(self, k: int, p: int) -> int:
        return self.tag + k * self.pieces.count + p

    def _part(self, k: int, local: int, p: int) -> torch.Tensor:
        """Piece p of the chunk that reaches this group in ring step k."""
        return self.pieces.of(self.ring.chunk(self.buffer, self.ring.group_at(-k), local), p)

    def send_own(self, p: int) -> None:
        self._pass_on(0, p)

    def _pass_on(self, k: int, p: int) -> None:
        ring, part = self.ring, self._part(k, self.ring.j, p)
        if k < ring.groups - 1:
            assert ring.inter is not None
            self.sends.append(ring.inter.send(part, ring.group_at(1), self._tag(k + 1, p)))
        for peer in ring.peers:
            assert ring.intra is not None
            self.sends.append(ring.intra.send(part, peer, self._tag(k, p)))

    def finish(self) -> None:
        for index, work in enumerate(self.from_ring):
            work.wait()
            k, p = divmod(index, self.pieces.count)
            self._pass_on(k + 1, p)
        for work in (*self.from_peers, *self.sends):
            work.wait()


class _Scatter:
    """One reduce-scatter under way: partial sums build up in place in `buffer`, the finished chunk is written to `out`."""

    def __init__(self, ring: HoRing, buffer: torch.Tensor, out: torch.Tensor, pieces: Pieces) -> None:
        self.ring, self.buffer, self.out, self.pieces = ring, buffer, out, pieces
        self.positions = ring.groups * pieces.count
        self.sends: list[dist.Work] = []
        self.from_ring: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.from_peers: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}
        self.depth = min(INTRA_DEPTH, self.positions)
        size = pieces.largest
        self.ring_slots = ring.workspace.get("inter", pieces.numel if ring.groups > 1 else 0, buffer.dtype)
        self.peer_slots = ring.workspace.get("intra", size * self.depth * (ring.group_size - 1), buffer.dtype)

    def _part(self, t: int, local: int) -> torch.Tensor:
        k, p = divmod(t, self.pieces.count)
        return self.pieces.of(self.ring.chunk(self.buffer, self.ring.group_at(-1 - k), local), p)

    def _post_ring(self, t: int) -> None:
        """Receive the partial sum that belongs to position t, into the slot of its piece."""
        ring = self.ring
        if t < self.positions and ring.inter is not None:
            slot = self.pieces.of(self.ring_slots, t % self.pieces.count)
            self.from_ring[t] = (ring.inter.receive(slot, ring.group_at(-1), t), slot)

    def _post_peers(self, t: int) -> None:
        """Exchange position t inside the group: each peer gets its part, and sends the part of this rank."""
        ring, lane = self.ring, self.ring.intra
        if t >= self.positions or lane is None:
            return
        size, numel = self.pieces.largest, self._part(t, ring.j).numel()
        first = (t % self.depth) * (ring.group_size - 1)
        slots = [self.peer_slots[(first + at) * size :][:numel] for at in range(ring.group_size - 1)]
        self.from_peers[t] = [(lane.receive(slot, peer, t), slot) for peer, slot in zip(ring.peers, slots, strict=True)]
        self.sends += [lane.send(self._part(t, peer), peer, t) for peer in ring.peers]

    def run(self, on_finished: Callable[[int], None]) -> None:
        """Go through all positions; `on_finished(p)` is called when piece p of `out` is complete."""
        for t in range(self.depth):
            self._post_peers(t)
        for p in range(self.pieces.count):
            self._post_ring(self.pieces.count + p)
        for t in range(self.positions):
            self._add(t)
            k, p = divmod(t, self.pieces.count)
            if k == self.ring.groups - 1:
                on_finished(p)

    def _add(self, t: int) -> None:
        ring = self.ring
        k, p = divmod(t, self.pieces.count)
        own = self._part(t, ring.j)
        terms = [own]
        for work, slot in self.from_peers.pop(t, []):
            work.wait()
            terms.append(slot)
        if t in self.from_ring:
            work, slot = self.from_ring.pop(t)
            work.wait()
            terms.append(slot)
        last = k == ring.groups - 1
        add_up(self.pieces.of(self.out, p) if last else own, terms, ring.workspace)
        self._post_peers(t + self.depth)
        if not last:
            assert ring.inter is not None
            if k > 0:
                self._post_ring(t + self.pieces.count)
            self.sends.append(ring.inter.send(own, ring.group_at(1), t + self.pieces.count))

    def finish(self) -> None:
        for work in self.sends:
            work.wait()
