"""Bytes that one rank sends in a training step over the axes tp and pp: what the byte ledger of a run must show there.

Collectives over tp are counted as rings: (tp-1)/tp of the whole for a gather or a scatter, twice that for an all-reduce. Pure
functions of sizes; everything is trained and dropout is off.
"""

from __future__ import annotations

from dataclasses import dataclass

from paro_lm.parallel.stages import num_stages, stages_of_rank


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The residual stream of one micro-batch: b x s tokens of `hidden_size` elements, `element` bytes each; `loss_element` bytes for
    every number of the loss (4, or 8 in fp64)."""

    tokens: int
    hidden_size: int
    element: int
    loss_element: int = 4

    @property
    def num_bytes(self) -> int:
        return self.tokens * self.hidden_size * self.element


def tp_bytes(
    stream: Activations,
    *,
    tp: int,
    blocks: int,
    has_embedding: bool,
    has_head: bool,
    micro_batches: int,
    sequence_parallel: bool = False,
    checkpointing: str = "none",
) -> int:
    """Bytes over tp in forwards and backwards of what a rank holds: `blocks` layers, embedding and head or not.

    A block has two regions of sliced weights, attention and MLP. With sequence parallelism a region is entered by a gather and left
    by a scatter, and its backward does the reverse; without, it is left by an all-reduce, and entered by one in backward.
    Recomputation stops at the last tensor that backward needs, which is before the last region is left.
    """
    gather, all_reduce = _gather(stream.num_bytes, tp), 2 * _gather(stream.num_bytes, tp)
    enter = leave = 2 * gather if sequence_parallel else all_reduce  # forward and backward together
    again = {
        "none": 0,
        "selective": gather if sequence_parallel else 0,
        "full": 3 * gather if sequence_parallel else all_reduce,
    }[checkpointing]
    total = blocks * (2 * (enter + leave) + again) + has_embedding * leave
    if has_head:
        per_token = stream.tokens * stream.loss_element
        total += enter + 2 * _gather(per_token, tp) + 2 * _gather(3 * per_token, tp)  # largest logit; three sums
    return micro_batches * total


def pp_bytes(message: int, *, schedule: str, pp: int, virtual_stages: int, rank: int, micro_batches: int) -> int:
    """Bytes of activations and their gradients that one pipeline rank sends: one message per border to another rank and direction."""
    stages = num_stages(schedule, pp, virtual_stages)
    home = {stage: owner for owner in range(pp) for stage in stages_of_rank(schedule, pp, virtual_stages, owner)}
    sends = 0
    for stage in stages_of_rank(schedule, pp, virtual_stages, rank):
        sends += stage + 1 < stages and home[stage + 1] != rank
        sends += stage > 0 and home[stage - 1] != rank
    return sends * micro_batches * message


def seam_bytes(*, tp: int, partial: int = 0, shared: int = 0, element: int = 4) -> dict[str, int]:
    """Bytes of the sums that gradients need beyond the data axes, once per step, on this rank's shard of optimizer states.

    partial    elements there of parameters whose gradients are partial over tp (norms under sequence parallelism, shared kv heads)
    shared     elements there, padding included, of what another stage holds too; 0 without
    """
    return {"tp": 2 * _gather(partial * element, tp), "pp": shared * element}


def _gather(num_bytes: int, ranks: int) -> int:
    return num_bytes * (ranks - 1) // ranks
