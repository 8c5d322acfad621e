"""Replicas that must be bitwise equal: parameters, main parameters and moments over every axis on which they replicate.

Ranks compare 64-bit digests, not the buffers themselves: one small all-reduce per axis. A digest is the sum of all bit patterns,
each times an odd number of its own, modulo 2^64: a change of one element always shows, other changes escape with odds of about 2^-60.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paro_lm.parallel.buffer import FlatShard
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import AXES, DATA_AXES, ParallelMesh
from paro_lm.parallel.seams import Seams
from paro_lm.parallel.sharding import Placement

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 22
"""Elements of a digest that are in memory as 64-bit numbers at a time."""
SPREAD = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number: neighbouring positions get unrelated factors


class ReplicaError(RuntimeError):
    """Copies of one parameter differ; the message names the parameter, the axis and the ranks."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What one rank holds of one parameter in one buffer (`kind`), and the axes over which others hold the same."""

    kind: str
    name: str
    axes: frozenset[str]
    data: torch.Tensor


def replicas(
    engine: ShardingEngine, moments: Mapping[str, object], replicated: Callable[[str], frozenset[str]] = lambda name: frozenset()
) -> Iterator[Replica]:
    """Everything this rank holds of which there are copies. `moments`: shards of optimizer states by "<kind>/<name>", at os.

    `replicated` are axes besides the data axes that hold a parameter whole, by name (tp for norms).
    """
    placements: dict[str, Placement] = {}
    for buffer in engine.buffers():
        for kind, data, placement in (("param", buffer.param, buffer.cell.param), ("main", buffer.main, buffer.cell.main)):
            if data is None or (kind == "main" and data is buffer.param):
                continue
            for segment in buffer.segments(placement):
                name = segment.slot.name
                yield Replica(kind=kind, name=name, axes=_copies(engine, name, placement, replicated), data=segment.of(data))
        placements |= {slot.name: buffer.cell.main for slot in buffer.layout.slots}
    for key, shard in moments.items():
        kind, _, name = key.partition("/")
        if isinstance(shard, FlatShard):
            yield Replica(kind=kind, name=name, axes=_copies(engine, name, placements[name], replicated), data=shard.data)


def _copies(engine: ShardingEngine, name: str, placement: Placement, replicated: Callable[[str], frozenset[str]]) -> frozenset[str]:
    ends = {"pp"} if name in engine.seams.shared else set()
    return frozenset(DATA_AXES) - placement | replicated(name) | ends


def check_replicas(mesh: ParallelMesh, held: Iterable[Replica], seams: Seams | None = None) -> None:
    """Compare every replica over every axis that replicates it. A collective call over the world.

    Raises ReplicaError on all ranks alike, with every difference that any rank saw: buffer, parameter, axis, ranks.
    """
    held = list(held)
    digests = {id(replica): digest(replica.data) for replica in held}
    found: list[str] = []
    for axis in AXES:
        shared = [replica for replica in held if axis in replica.axes]
        group, ranks = _peers(mesh, axis, seams)
        if shared and len(ranks) > 1:
            values = torch.stack([digests[id(replica)] for replica in shared])
            found += _differences(shared, values, axis, group, ranks)
    if mesh.sum(len(found), AXES) > 0:
        everywhere: list[list[str]] = [[] for _ in range(mesh.world_size)]
        dist.all_gather_object(everywhere, found)
        raise ReplicaError(_message(sorted({line for lines in everywhere for line in lines})))


@torch.no_grad()
def digest(data: torch.Tensor) -> torch.Tensor:
    """0-d int64 digest of the bits of a tensor."""
    bits = data.detach().reshape(-1).view(INTEGERS[data.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, bits.numel(), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        factors = torch.arange(start, start + block.numel(), device=data.device).mul_(SPREAD).bitwise_or_(1)
        total += factors.mul_(block).sum()
    return total


def _peers(mesh: ParallelMesh, axis: str, seams: Seams | None) -> tuple[dist.ProcessGroup | None, list[int]]:
    """Who holds copies along an axis: all its ranks, along pp the two that share a tied weight."""
    if axis != "pp":
        return mesh.group(axis), mesh.ranks(axis)
    group = seams.shared_group if seams is not None else None
    return group, dist.get_process_group_ranks(group) if group is not None else []


def _differences(
    held: Sequence[Replica], values: torch.Tensor, axis: str, group: dist.ProcessGroup | None, ranks: Sequence[int]
) -> list[str]:
    """One sentence per replica of which the ranks of one axis have different digests."""
    extremes = torch.stack([values, ~values])  # max(~x) = ~min(x)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    wrong = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not wrong:
        return []
    everybody = [torch.empty_like(values) for _ in ranks]
    dist.all_gather(everybody, values, group=group)
    lines = []
    for index in wrong:
        seen = [int(other[index]) for other in everybody]
        common, count = Counter(seen).most_common(1)[0]
        odd = [rank for rank, value in zip(ranks, seen, strict=True) if value != common or 2 * count <= len(ranks)]
        rest = [rank for rank in ranks if rank not in odd]
        than = f"from those of {_names(rest)}" if rest else "from each other"
        lines.append(f"{held[index].kind} of {held[index].name} over {axis}: the bits on {_names(odd)} differ {than}")
    return lines


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _message(lines: Sequence[str], most: int = 20) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "replicas that must be bitwise equal are not:\n  " + "\n  ".join([*lines[:most], *more])
