"""Run a function on several ranks of one machine, for tests: `run_distributed(fn, 4)`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
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
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # many groups are slow to make over a FileStore
    pipes, processes = [], []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(send, store.port, rank, world_size, timeout, dict(os.environ), list(sys.path), fn, args)
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
    pipe: Any, port: int, rank: int, world_size: int, timeout: float, env: dict[str, str], path: list[str], fn: Any, args: Any
) -> None:
    os.environ.update(env)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("localhost", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        answer = (True, fn(rank, world_size, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
