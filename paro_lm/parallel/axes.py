"""The axes of the mesh and their sizes: numbers only, so that checks and plans need neither torch nor ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "dp_inter", "dp_intra", "tp")
DATA_AXES = ("dp_inter", "dp_intra")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the four axes; rank = row-major index over (pp, dp_inter, dp_intra, tp), tp fastest."""

    pp: int = 1
    dp_inter: int = 1
    dp_intra: int = 1
    tp: int = 1

    @classmethod
    def build(
        cls, *, world_size: int, tp: int = 1, pp: int = 1, group_size: int | None = None, local_world_size: int | None = None
    ) -> MeshShape:
        """Derive the data axes from the world; a group defaults to the part of the data ranks that one node holds.

        Raises ValueError when tp * pp does not divide the world or the group does not divide the data ranks.
        """
        if world_size % (tp * pp):
            raise ValueError(
                f"{world_size} ranks cannot be split into parallel.tp={tp} x parallel.pp={pp}: "
                f"the world size must be a multiple of {tp * pp}."
            )
        dp = world_size // (tp * pp)
        group = group_size or math.gcd(max(1, (local_world_size or world_size) // tp), dp)
        if dp % group:
            valid = [size for size in range(1, dp + 1) if dp % size == 0]
            raise ValueError(
                f"parallel.group_size={group} does not divide the {dp} data-parallel ranks "
                f"(world {world_size} / tp {tp} / pp {pp}); valid group sizes: {valid}."
            )
        return cls(pp=pp, dp_inter=dp // group, dp_intra=group, tp=tp)

    def size(self, *axes: str) -> int:
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def dp(self) -> int:
        return self.dp_inter * self.dp_intra

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)


def default_tp_group_size(tp: int, ranks_per_node: int | None) -> int:
    """The tensor-parallel ranks that one node holds (None: all)."""
    return math.gcd(ranks_per_node or tp, tp)
