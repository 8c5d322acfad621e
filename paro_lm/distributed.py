"""Processes and devices: who this rank is, which device it computes on, which backend carries its collectives."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from paro_lm.config import RuntimeConfig
from paro_lm.rendezvous import agree

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    owns_process_group: bool
    """Whether `initialize` started the process group; a caller that had one keeps it."""


def launcher_world_size() -> int:
    """World size that the launcher (torchrun, SLURM through torchrun) announces; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher_local_world_size() -> int:
    """Ranks on this node; a launcher that does not say so means that all ranks are on one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def pick_device(name: str, local_rank: int, world_size: int) -> torch.device:
    """The device that `runtime.device` means on this rank; auto = cuda, else mps (one process only), else cpu.

    Raises ValueError when the named device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available() and world_size == 1:
            name = "mps"
        else:
            name = "cpu"
    if name == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ValueError(
                "runtime.device=cuda: torch sees no CUDA device (driver, CUDA_VISIBLE_DEVICES, a torch built for CPUs); "
                "use runtime.device=cpu or auto."
            )
        if local_rank >= count:
            raise ValueError(
                f"runtime.device=cuda: local rank {local_rank} has no device, {count} visible. "
                f"Start at most {count} processes per node (torchrun --nproc-per-node {count}), or use runtime.device=cpu."
            )
        return torch.device("cuda", local_rank)
    if name == "mps":
        if not torch.backends.mps.is_available() or world_size > 1:
            raise ValueError(f"runtime.device=mps needs an Apple GPU and one process (got {world_size}); use runtime.device=cpu.")
        return torch.device("mps")
    return torch.device("cpu")


def initialize(runtime: RuntimeConfig) -> World:
    """Start the process group (also for one process), choose and set the device.

    Ranks come from the environment that torchrun sets. NCCL carries collectives of CUDA devices, Gloo all others;
    with NCCL a Gloo backend for CPU tensors stands beside it. Raises ValueError when the device is not there.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), launcher_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(runtime.device, local_rank, world_size)
    backend = runtime.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "fake":
        raise ValueError("runtime.backend=fake only describes a training run (paro-train); use auto, nccl or gloo here.")
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"runtime.backend=nccl needs CUDA devices, got {device.type}; use runtime.backend=auto.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    local_world_size = launcher_local_world_size()
    threads = runtime.num_threads
    if threads is None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    if runtime.deterministic:
        torch.use_deterministic_algorithms(True)
    owns_process_group = not dist.is_initialized()
    if owns_process_group:
        timeout = timedelta(minutes=runtime.timeout_minutes)
        name = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(name, timeout=timeout, **_meeting(rank, world_size, timeout))
        else:
            dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        backend=backend,
        owns_process_group=owns_process_group,
    )


def _meeting(rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Where the ranks meet under a torchrun that keeps its store over restarts: in a part of it that only this attempt knows, as the
    store still holds the addresses of the ranks before. Nothing, which is torch's own way, without such a torchrun.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    attempt = agree(dist.PrefixStore("paro_lm/meet", store), rank=rank, world_size=world_size, timeout=timeout)
    return {"store": dist.PrefixStore(f"paro_lm/{attempt}", store), "rank": rank, "world_size": world_size}


def shutdown(world: World, *, together: bool = True) -> None:
    """Leave the process group that `initialize` started. With NCCL that waits for the other ranks, so a rank that may be alone in
    this (`together` is false) leaves it to the end of its process: else nobody would learn that it failed.
    """
    if world.owns_process_group and dist.is_initialized() and (together or world.backend != "nccl"):
        dist.destroy_process_group()


def on_rank_zero(work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0 and give every rank its result; ValueError (the user's error) and OSError are raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def all_ranks_equal(value: str) -> bool:
    """Whether every rank of the world has the same string."""
    return len(set(gather_objects(value))) == 1


def gather_objects(value: Result) -> list[Result]:
    """The values of all ranks, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch; weights and data order use generators of their own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's generators of this rank, as tensors that a checkpoint can hold."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
