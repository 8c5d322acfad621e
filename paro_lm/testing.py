"""Run a function on several ranks of one machine, for tests: `run_distributed(fn, 4)`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` Gloo processes and return their results in rank order.

    `fn` is a top-level function of an importable module; arguments and results are picklable. Ranks are forked from a server
    that has torch loaded, so that a start takes a fraction of a second.
    Raises RuntimeError with the traceback of the first rank that failed, or that the time limit (seconds) was passed; in both
    cases no process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "paro_lm.trainer"])  # what is not there is passed over
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(send, store, rank, world_size, timeout, dict(os.environ), list(sys.path), fn, args)
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            results = _collect(pipes, processes, timeout)
            for process in processes:
                process.join(timeout=10.0)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


@contextlib.contextmanager
def reused_groups() -> Iterator[Callable[[], None]]:
    """Within, `dist.new_group` hands out the communicators of earlier runs again; call what it yields at the start of every run.

    For many small runs one after another in the same processes: they need not make communicators, which are never given back. The
    n-th request of a run for certain ranks gets the n-th communicator for them: two of one run stay two.
    """
    make, groups, requests = dist.new_group, dict[Any, Any](), Counter[Any]()

    def new_group(ranks: list[int] | None = None, **options: Any) -> Any:
        what = (None if ranks is None else tuple(ranks), tuple(sorted(options.items())))
        key = (what, requests[what])
        requests[what] += 1
        if key not in groups:
            groups[key] = make(ranks, **options)
        return groups[key]

    with unittest.mock.patch.object(dist, "new_group", new_group):
        yield requests.clear


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RuntimeError(f"ranks {missing} of {len(pipes)} did not finish within {timeout} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Any, store: str, rank: int, world_size: int, timeout: float, env: dict[str, str], path: list[str], fn: Any, args: Any
) -> None:
    os.environ.update(env)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        answer = (True, fn(rank, world_size, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
