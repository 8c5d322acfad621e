"""How ranks that a launcher may have started before find each other, and not those of an earlier attempt, in a store that it keeps."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def _pause(world_size: int) -> None:
    """Between two looks into the store: a list of a thousand ranks has tens of kilobytes, and each of them reads it."""
    time.sleep(min(1.0, 0.02 + 0.001 * world_size))


def agree(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this attempt, the same on all its ranks and on those of no other. Every rank of an attempt calls it.

    The store may hold what ranks of earlier attempts left, also of other world sizes, and nobody knows which attempt this is
    (torchrun counts restarts differently on different nodes). So every rank leaves a number of its own; rank 0 lists the numbers it
    finds under a new name, until each rank has found its own one in the list and said so. One that an earlier attempt left is
    confirmed by nobody. Raises RuntimeError, naming who is missing, after `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    mine = uuid.uuid4().hex
    told = ""
    store.set(f"number/{rank}", mine)
    if rank == 0:
        return _lead(store, world_size, deadline)
    while time.monotonic() < deadline:
        if store.check(["list"]):
            name, numbers = json.loads(store.get("list"))
            if len(numbers) == world_size and numbers[rank] == mine:
                if name != told:
                    store.set(f"{name}/seen/{rank}", "")
                    told = name
                if store.check([f"{name}/complete"]):
                    return str(name)
        _pause(world_size)
    raise RuntimeError(f"rank {rank} did not meet the other {world_size - 1} ranks within {timeout}; is every node started?")


def _lead(store: dist.Store, world_size: int, deadline: float) -> str:
    others = range(1, world_size)
    listed, name = None, ""
    while time.monotonic() < deadline:
        if store.check([f"number/{rank}" for rank in range(world_size)]):
            numbers = [number.decode() for number in store.multi_get([f"number/{rank}" for rank in range(world_size)])]
            if numbers != listed:
                listed, name = numbers, uuid.uuid4().hex
                store.set("list", json.dumps([name, numbers]))
            if world_size == 1 or store.check([f"{name}/seen/{rank}" for rank in others]):
                store.set(f"{name}/complete", "")
                return name
        _pause(world_size)
    missing = [rank for rank in others if not store.check([f"{name}/seen/{rank}"])]
    raise RuntimeError(f"ranks {missing} of {world_size} did not come; is every node started, with the same number of ranks?")
