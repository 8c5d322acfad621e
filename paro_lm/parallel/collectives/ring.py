"""The flat ring over any set of ranks, to compare with: every one of its steps waits for its slowest link."""

from __future__ import annotations

from collections.abc import Sequence

from paro_lm.parallel.collectives.ho_ring import HoRing
from paro_lm.parallel.collectives.lane import Lane, Workspace


class Ring(HoRing):
    """A pipelined ring through all ranks of `lane`; `order[r]` is the chunk that rank r of the lane owns.

    It is an HO-Ring whose groups have one rank, so that what separates the two is the schedule and not the code.
    """

    def __init__(self, lane: Lane, order: Sequence[int], workspace: Workspace, chunk_bytes: int | None) -> None:
        super().__init__(lane, None, [[chunk] for chunk in order], workspace, chunk_bytes)
