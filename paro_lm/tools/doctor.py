"""`paro-doctor`, alone or under torchrun: whether a cluster can train, how fast its links are, and if not, what to set.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m paro_lm.tools.doctor folder=/shared/outputs

Stages: rendezvous, reach (plain TCP between all ranks), connect (the backend), layout, folder, links, collectives (HO-Ring against
the backend's own). Each has a time limit; one that does not end names the ranks, their interface and the variable to set.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from paro_lm.cli import EXIT_ERROR, EXIT_OK, Tool, hydra_entry
from paro_lm.config import RuntimeConfig, option


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What is looked at."""

    folder: str = option("outputs", "Folder that all nodes should share: where run folders will be.")
    group_size: int | None = option(None, "Ranks in a group; null = those of a node.", least=1)
    sizes_mib: list[float] = option([0.0625, 1.0, 16.0], "Messages whose speed is measured, MiB.")
    repeats: int = option(7, "Repetitions; the median counts.", least=1)
    stage_seconds: float = option(60.0, "Time limit of a stage.", above=0)
    device: str = option("auto", "Device of each rank.", choices="auto | cuda | mps | cpu")
    backend: str = option("auto", "Backend of the process group; auto fits the device.", choices="auto | nccl | gloo")


TOOL = Tool(
    name="paro-doctor",
    description="check a machine or, under torchrun, a cluster: versions, interfaces, shared folder, links, collectives.",
    examples=(
        "paro-doctor",
        "torchrun --nproc-per-node 4 -m paro_lm.tools.doctor",
        "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr node0 -m paro_lm.tools.doctor folder=/shared",
    ),
    schema=DoctorConfig,
    config_name="doctor",
)


HOST_DEVICES = ("cpu", "mps")  # Gloo carries their collectives


class Report:
    """Lines that rank 0 prints as they come, and whether anything is wrong."""

    def __init__(self, rank: int) -> None:
        self._rank, self.problems = rank, 0

    def say(self, text: str) -> None:
        if self._rank == 0:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Something that a run may live with."""
        self.say(f"  warning: {text}")

    def problem(self, text: str) -> None:
        """Something that makes a run fail or wrong; the exit code becomes 1."""
        self.problems += 1
        self.say(f"  PROBLEM: {text}")


def task(cfg: DoctorConfig) -> int:
    """Run all stages; 0 when nothing is wrong."""
    from paro_lm.tools.stages import StageError

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    report = Report(rank)
    try:
        if world_size == 1:
            _alone(cfg, report)
        else:
            _together(cfg, report, rank, world_size)
    except StageError as error:
        print(f"paro-doctor: {error}", file=sys.stderr, flush=True)
        time.sleep(2)  # the launcher ends the others when this one goes; let them speak
        return EXIT_ERROR
    report.say("all is well" if report.problems == 0 else f"{report.problems} problems")
    return EXIT_OK if report.problems == 0 else EXIT_ERROR


def facts(device: Any) -> dict[str, str]:
    """Versions and device of this rank."""
    import torch

    from paro_lm.parallel.verified import nccl_version

    name = torch.get_device_module(device).get_device_name(device) if device.type not in HOST_DEVICES else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": nccl_version(),
        "device": f"{device.type} ({name})",
        "cpus": str(os.cpu_count()),
    }


def _alone(cfg: DoctorConfig, report: Report) -> None:
    from paro_lm.distributed import pick_device
    from paro_lm.tools.reach import interfaces

    report.say(f"one process on {socket.gethostname()}: {_listed(facts(pick_device(cfg.device, 0, 1)))}")
    report.say(f"interfaces: {_listed(interfaces())}")
    path = Path(cfg.folder) / f".doctor-{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.unlink()
        report.say(f"folder {Path(cfg.folder).absolute()} can be written")
    except OSError as error:
        report.problem(f"folder={cfg.folder} cannot be written ({error}); choose another")
    report.say("links and collectives are checked under torchrun: torchrun --nproc-per-node 2 -m paro_lm.tools.doctor")


def _together(cfg: DoctorConfig, report: Report, rank: int, world_size: int) -> None:
    from paro_lm import distributed
    from paro_lm.parallel.mesh import ParallelMesh
    from paro_lm.tools.reach import Endpoint, exchange

    device = distributed.pick_device(cfg.device, int(os.environ.get("LOCAL_RANK", "0")), world_size)
    backend = cfg.backend if cfg.backend != "auto" else "gloo" if device.type in HOST_DEVICES else "nccl"
    store, stages, endpoints = _rendezvous(cfg, report, rank, world_size, backend)
    everybody: list[Any] = exchange(store, "facts", rank, world_size, facts(device))
    report.say(f"{world_size} ranks, backend {backend}, {_listed(everybody[0])}")
    for endpoint in endpoints:
        report.say(f"  {endpoint}")
    for name in ("python", "torch", "nccl", "device"):
        seen = sorted({item[name] for item in everybody})
        if len(seen) > 1:
            report.problem(f"{name} differs between ranks: {', '.join(seen)}; install the same on all nodes")
    with stages.run("connect"):
        runtime = RuntimeConfig(device=cfg.device, backend=cfg.backend, timeout_minutes=4 * cfg.stage_seconds / 60)
        world = distributed.initialize(runtime)
        mesh = ParallelMesh.build(
            world_size=world_size, rank=rank, group_size=cfg.group_size, local_world_size=world.local_world_size, device=device
        )
        mesh.sum(1)
    report.say("connect: every rank answered over the backend")
    nodes = {endpoint.node for endpoint in endpoints}
    assert isinstance(endpoints[0], Endpoint)
    with stages.run("layout"):
        _layout(report, mesh, len(nodes), world.local_world_size)
    with stages.run("folder"):
        _folder(report, Path(cfg.folder), endpoints)
    with stages.run("links"):
        _links(report, cfg, mesh)
    with stages.run("collectives"):
        wrong = compare_collectives(mesh)
    _judge_collectives(report, mesh, wrong, world.backend)
    distributed.shutdown(world)


def _rendezvous(cfg: DoctorConfig, report: Report, rank: int, world_size: int, backend: str) -> tuple[Any, Any, list[Any]]:
    """The store of the launcher, everybody's endpoint, and the proof that plain TCP connects all ranks."""
    import torch.distributed as dist
    from torch.distributed import rendezvous

    from paro_lm.tools import reach
    from paro_lm.tools.stages import StageError, Stages

    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    limit = timedelta(seconds=cfg.stage_seconds)
    whose = f"rank {rank} of {world_size} ({socket.gethostname()})"
    known = reach.interfaces()
    interface, address = reach.chosen(backend, known, master)
    try:
        base, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
        store = dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)
        store.set_timeout(limit)
    except (RuntimeError, OSError) as error:
        raise StageError(
            f"stage rendezvous failed on {whose}: {error}\n  every rank must be started, and reach {master[0]}:{master[1]} "
            "(MASTER_ADDR, MASTER_PORT, a port that no firewall closes)"
        ) from error
    try:
        listener = reach.Listener(address)
    except OSError as error:
        variable = reach.variable_of(backend)
        raise StageError(
            f"{whose} would offer {address}, which is not an address of its own ({error}); set {variable} to one of {_listed(known)}"
        ) from error
    own = reach.Endpoint(
        rank=rank,
        host=socket.gethostname(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        variable=reach.variable_of(backend),
        interface=interface,
        address=address,
        port=listener.port,
        others=known,
    )
    try:
        endpoints = reach.publish(store, world_size, own)
    except RuntimeError as error:
        missing = ", ".join(str(other) for other in range(world_size) if not store.check([f"endpoint/{other}"]))
        raise StageError(f"stage rendezvous failed on {whose}: ranks {missing} did not come within {cfg.stage_seconds:g} s") from error
    stages = Stages(store, endpoints=endpoints, rank=rank, timeout=cfg.stage_seconds, backend=backend, master=master[0])
    with stages.run("reach"):
        failed = {str(peer): why for peer, why in reach.try_peers(endpoints, rank, min(5.0, cfg.stage_seconds / 4)).items()}
        answers: list[Any] = reach.exchange(store, "reach", rank, world_size, failed)
    listener.close()
    lines = reach.explain(endpoints, [{int(peer): why for peer, why in answer.items()} for answer in answers], backend, master[0])
    if lines:
        if rank != 0:
            time.sleep(5)
        raise StageError("\n  ".join(["stage reach failed", *lines]) if rank == 0 else "stage reach failed, see rank 0")
    report.say("reach: plain TCP connects all ranks")
    return store, stages, endpoints


def _layout(report: Report, mesh: Any, num_nodes: int, local_world_size: int) -> None:
    """Nodes against groups."""
    m, g = mesh.size("dp_intra"), mesh.size("dp_inter")
    report.say(f"layout: {num_nodes} nodes of {local_world_size} ranks, {g} groups of {m}")
    if num_nodes > 1 and m > local_world_size:
        report.warn(f"a group of {m} ranks spans nodes of {local_world_size}: what is meant to stay inside a node crosses the network")
    if num_nodes > 1 and local_world_size % m:
        report.warn(f"groups of {m} do not divide nodes of {local_world_size} ranks; set group_size to a divisor of {local_world_size}")


def _folder(report: Report, folder: Path, endpoints: Sequence[Any]) -> None:
    """Whether what rank 0 writes is seen by all nodes."""
    import torch.distributed as dist

    from paro_lm.distributed import gather_objects, on_rank_zero

    name = f".doctor-{uuid.uuid4().hex}"

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
        return name

    name = on_rank_zero(write)
    try:
        blind = [item for item, seen in zip(endpoints, gather_objects((folder / name).exists()), strict=True) if not seen]
    finally:
        dist.barrier()
        on_rank_zero(lambda: (folder / name).unlink())
    if blind:
        nodes = ", ".join(sorted({f"{item.host} (node {item.node})" for item in blind}))
        report.problem(f"folder {folder.absolute()} is not shared: {nodes} does not see what rank 0 writes; use a folder on shared storage")
    else:
        report.say(f"folder: {folder.absolute()} is shared by all nodes")


def exchange_seconds(mesh: Any, axis: str, num_bytes: int, repeats: int) -> float:
    """Median seconds in which this rank hands a message to the next one over an axis and takes one from the rank before."""
    import torch
    import torch.distributed as dist

    ranks, at = mesh.ranks(axis), mesh.coordinate(axis)
    out, back = (torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=mesh.device) for _ in range(2))
    times = []
    for _ in range(repeats + 1):
        mesh.sum(1)
        start = time.perf_counter()
        pairs = [(dist.irecv, back, ranks[at - 1]), (dist.isend, out, ranks[(at + 1) % len(ranks)])]
        for work in dist.batch_isend_irecv([dist.P2POp(*pair) for pair in pairs]):
            work.wait()
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _links(report: Report, cfg: DoctorConfig, mesh: Any) -> None:
    """Latency and speed inside and between groups, all ranks at once; the slowest rank counts."""
    from paro_lm.distributed import gather_objects

    for axis, text in (("dp_intra", "inside groups"), ("dp_inter", "between groups")):
        if mesh.size(axis) == 1:
            continue
        latency = max(gather_objects(exchange_seconds(mesh, axis, 1, 3 * cfg.repeats)))
        report.say(f"links {text}: one byte takes {latency * 1e6:.0f} us")
        for mib in cfg.sizes_mib:
            num_bytes = int(mib * (1 << 20))
            times = gather_objects(exchange_seconds(mesh, axis, num_bytes, cfg.repeats))
            rate = 8 * num_bytes / max(times) / 1e9
            shared = f", {rate * mesh.size('dp_intra'):.3g} Gbit/s per group" if axis == "dp_inter" else ""
            report.say(f"  {mib:g} MiB: {max(times) * 1e3:.3g} ms, {rate:.3g} Gbit/s per rank{shared}")
        usual = statistics.median(times)
        slow = [str(rank) for rank, seconds in enumerate(times) if seconds > 2 * usual]
        if slow:
            report.warn(f"ranks {', '.join(slow)} take more than twice the median time {text}")


def compare_collectives(mesh: Any) -> list[str]:
    """Where HO-Ring's values differ from the backend's own: three operations, odd and even sizes, dtypes. A collective call.

    Values are small whole numbers, whose sums are exact in every type and order: equality is bitwise.
    """
    import torch

    from paro_lm.parallel.collectives import GridCollectives
    from paro_lm.parallel.mesh import DATA_AXES

    native = GridCollectives(mesh, algorithm="native", device=mesh.device)
    ho_ring = GridCollectives(mesh, algorithm="ho_ring", device=mesh.device)
    n, rank = mesh.size(*DATA_AXES), mesh.index(*DATA_AXES)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for numel in (3, 1 << 10, (1 << 18) + 5):
            generator = torch.Generator().manual_seed(rank)
            full = torch.randint(-8, 9, (numel * n,), generator=generator).to(mesh.device, dtype)
            for call in (_all_gather, _reduce_scatter, _all_reduce):
                equal = torch.equal(call(native, full, numel), call(ho_ring, full, numel))
                if mesh.sum(0 if equal else 1) > 0:
                    wrong.append(f"{call.__name__[1:]} of {numel * n} {dtype}")
    return wrong


def _all_gather(grid: Any, full: Any, numel: int) -> Any:
    output = full.new_empty(full.numel())
    grid.all_gather(output, full[:numel].clone(), ("dp_inter", "dp_intra"))
    return output


def _reduce_scatter(grid: Any, full: Any, numel: int) -> Any:
    shard = full.new_empty(numel)
    grid.reduce_scatter(shard, full.clone(), ("dp_inter", "dp_intra"))
    return shard


def _all_reduce(grid: Any, full: Any, numel: int) -> Any:
    result = full[: numel + 1].clone()
    grid.all_reduce(result, ("dp_inter", "dp_intra"))
    return result


def _judge_collectives(report: Report, mesh: Any, wrong: Sequence[str], backend: str) -> None:
    from paro_lm.parallel.verified import remember

    if wrong:
        report.problem(f"HO-Ring differs from {backend}'s own: {'; '.join(wrong)}; set parallel.collectives=native and report it")
        return
    report.say(f"collectives: HO-Ring gives the values of {backend}'s own")
    try:
        report.say(f"  noted in {remember(mesh, backend)}; parallel.collectives=auto takes HO-Ring on this cluster")
    except OSError as error:
        report.warn(f"this cannot be noted ({error}); set XDG_CACHE_HOME to a folder that can be written")


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
