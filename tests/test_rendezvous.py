"""Ranks of one attempt meet each other, whatever earlier attempts left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from paro_lm.rendezvous import agree

LIMIT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)


def attempt(server: dist.TCPStore, world_size: int, order: list[int], pause: float) -> dict[int, str]:
    """The names that ranks, started in this order one after the other, agree on."""
    names: dict[int, str] = {}

    def run(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT)
        names[rank] = agree(dist.PrefixStore("meet", store), rank=rank, world_size=world_size, timeout=LIMIT)

    threads = []
    for rank in order:
        threads.append(threading.Thread(target=run, args=(rank,)))
        threads[-1].start()
        time.sleep(pause)
    for thread in threads:
        thread.join()
    return names


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_every_attempt_has_a_name_of_its_own(server: dist.TCPStore, pause: float) -> None:
    """Rank 0 first finds all numbers of the attempt before and lists them; sizes shrink and grow."""
    found = []
    for order in ([0, 1, 2], [0, 2, 1], [2, 1, 0], [0, 1], [1, 0], [0], [3, 0, 2, 1], [0, 1, 2, 3]):
        names = attempt(server, len(order), order, pause)
        assert sorted(names) == sorted(order)
        assert len(set(names.values())) == 1
        found.append(names[0])
    assert len(set(found)) == len(found)


def test_ranks_that_do_not_come_are_named(server: dist.TCPStore) -> None:
    """Their numbers of an attempt before do not pass for them."""
    attempt(server, 3, [0, 1, 2], 0.0)
    store = dist.PrefixStore("meet", dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT))
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of 3 did not come"):
        agree(store, rank=0, world_size=3, timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="rank 2 did not meet the other 2 ranks"):
        agree(store, rank=2, world_size=3, timeout=timedelta(seconds=0.5))
