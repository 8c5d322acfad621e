"""`paro-calibrate`, under torchrun: measure a cluster and write it as a file of the config group `cluster`.

    torchrun --nproc-per-node 8 ... -m paro_lm.tools.calibrate name=mine
    paro-plan --config-dir outputs/calibrate cluster=mine

Links: every rank hands a message to the next one of its node, then to its peer in the next node; all at once (the ranks of a node share
its cards), and one pair of nodes' first ranks alone (one card). Time over size is a line: latency plus bytes over bandwidth.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paro_lm.cli import EXIT_OK, Tool, hydra_entry
from paro_lm.config import ClusterConfig, ModelConfig, RuntimeConfig, option


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """What is measured, and where the file goes."""

    name: str = option("measured", "Name of the cluster and of its file.")
    folder: str = option("outputs/calibrate", "Folder that gets cluster/<name>.yaml and <name>.csv.")
    largest_mib: float = option(32.0, "Largest message, MiB.", above=0)
    repeats: int = option(7, "Repetitions; the median counts.", least=1)
    dtype: str = option("fp32", "Type of the matrix products, that of the parameters in training.", choices="fp64 | fp32 | bf16 | fp16")
    hidden_size: int = option(1024, "Width of the blocks whose efficiency is measured.", least=64)
    tokens: int = option(1024, "Tokens of the micro-batch whose efficiency is measured.", least=1)
    peak_tflops: float | None = option(None, "Dense peak of one device; null = known devices, else the best that is measured.", above=0)
    reserved_gb: float = option(0.5, "Device memory that is kept free of tensors, 1e9 bytes.", least=0)
    device: str = option("auto", "Device of each rank.", choices="auto | cuda | cpu")


TOOL = Tool(
    name="paro-calibrate",
    description="measure links, matrix products and overlap of a cluster, under torchrun, and write them for paro-plan.",
    examples=(
        "torchrun --nproc-per-node 8 -m paro_lm.tools.calibrate name=mine dtype=bf16 hidden_size=4096 tokens=4096",
        "paro-plan --config-dir outputs/calibrate cluster=mine",
    ),
    schema=CalibrateConfig,
    config_name="calibrate",
)


MODEL_VOCAB = 1024
"""Vocabulary of the model that is timed: small, so that its blocks dominate."""
LONG_ENOUGH = 0.1
"""Seconds of computation that one timing takes at least."""


@dataclass(frozen=True)
class Sample:
    """Median seconds of one size of message on one kind of link (intra, inter: all ranks at once; card: one pair alone)."""

    link: str
    num_bytes: int
    seconds: float


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """(latency in seconds, bytes per second): latency from the smallest message, bandwidth from the two largest."""
    ordered = sorted(samples, key=lambda sample: sample.num_bytes)
    small, large = ordered[0], ordered[-1]
    middle = max((sample for sample in ordered if sample.num_bytes <= large.num_bytes / 4), key=lambda s: s.num_bytes, default=small)
    slope = (large.seconds - middle.seconds) / (large.num_bytes - middle.num_bytes)
    if slope <= 0:  # noise: the largest message alone
        slope = large.seconds / large.num_bytes
    return max(0.0, small.seconds - slope * small.num_bytes), 1 / slope


def block_model(cfg: CalibrateConfig) -> ModelConfig:
    """The blocks whose forward and backward are timed: Llama's shape at the width in question."""
    heads = cfg.hidden_size // 64 if cfg.hidden_size % 64 == 0 else 1
    return ModelConfig(hidden_size=cfg.hidden_size, num_layers=4, num_heads=heads, max_positions=cfg.tokens)


def efficiency_from(base: ClusterConfig, seconds: float, model: ModelConfig, cfg: CalibrateConfig) -> float:
    """The efficiency with which the planner predicts these seconds for forward and backward of `model`; at most 1, at least 0.01.

    Everything that the planner's other terms do not explain (attention, elementwise work, launches beyond `unit_us`) counts here.
    """
    from paro_lm.parallel.axes import MeshShape
    from paro_lm.parallel.cost import ElementBytes
    from paro_lm.planner.inventory import DTYPE_BYTES, stage_profiles
    from paro_lm.planner.links import Links
    from paro_lm.planner.workload import Batch, stage_work

    width = DTYPE_BYTES[cfg.dtype]
    element = ElementBytes(param=width, grad=width, reduce=width, main=max(width, 4))
    batch = Batch(micro_batch_size=1, seq_length=cfg.tokens)
    profiles = stage_profiles(model, vocab_size=MODEL_VOCAB)

    def planned(efficiency: float) -> float:
        links = Links(replace(base, efficiency=efficiency), MeshShape())
        work = stage_work(model, profiles, batch, links, element, vocab_size=MODEL_VOCAB)
        return sum(unit.count * (unit.forward + unit.backward) for unit in work)

    matrices = planned(0.5) - planned(1.0)
    rest = planned(1.0) - matrices
    return min(1.0, max(0.01, matrices / max(seconds - rest, 1e-9)))


def cluster_from(base: ClusterConfig, samples: Sequence[Sample]) -> ClusterConfig:
    """`base` with latencies, bandwidths and the number of cards that the samples show."""
    by_link = {link: [s for s in samples if s.link == link] for link in ("intra", "inter", "card")}
    values: dict[str, Any] = {}
    if by_link["intra"]:
        latency, rate = line(by_link["intra"])
        values |= {"intra_gbps": 8 * rate / 1e9, "intra_latency_us": latency * 1e6}
    if by_link["inter"]:
        latency, shared = line(by_link["inter"])
        _, alone = line(by_link["card"])
        node = shared * base.ranks_per_node
        cards = min(max(1, round(node / alone)), base.ranks_per_node)
        values |= {"inter_gbps": 8 * node / cards / 1e9, "cards_per_node": cards, "inter_latency_us": latency * 1e6}
    rounded: dict[str, Any] = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    return replace(base, **rounded)


class _Bench:
    """Measurements of one rank; every method is a collective call."""

    def __init__(self, cfg: CalibrateConfig, mesh: Any) -> None:
        import torch

        from paro_lm.build import DTYPES

        self.torch, self.cfg, self.mesh, self.device = torch, cfg, mesh, mesh.device
        self.dtype = DTYPES[cfg.dtype]

    def seconds(self, work: Callable[[], None]) -> float:
        """Median over repetitions of the slowest rank's time."""
        times = []
        work()
        for _ in range(self.cfg.repeats):
            self._barrier()
            start = time.perf_counter()
            work()
            self._synchronize()
            times.append(self.mesh.max(time.perf_counter() - start))
        return statistics.median(times)

    def _barrier(self) -> None:
        self._synchronize()
        self.mesh.sum(1)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            self.torch.accelerator.synchronize(self.device)

    def exchange(self, axis: str, numel: int, *, alone: bool = False) -> Callable[[], None]:
        """Hand `numel` bytes to the next rank over `axis`; `alone`: only the first ranks of the first two nodes."""
        import torch.distributed as dist

        ranks, at = self.mesh.ranks(axis), self.mesh.coordinate(axis)
        if alone and (self.mesh.coordinate("dp_intra") or at > 1):
            return lambda: None
        following = ranks[(at + 1) % (2 if alone else len(ranks))]
        before = ranks[(at - 1) % (2 if alone else len(ranks))]
        out, back = (self.torch.zeros(numel, dtype=self.torch.uint8, device=self.device) for _ in range(2))

        def work() -> None:
            requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, following), dist.P2POp(dist.irecv, back, before)])
            for request in requests:
                request.wait()

        return work

    def links(self) -> list[Sample]:
        """Every kind of link at sizes from 1 KiB to the largest, a factor of four apart."""
        sizes, largest = [1 << 10], int(self.cfg.largest_mib * (1 << 20))
        while sizes[-1] * 4 <= largest:
            sizes.append(sizes[-1] * 4)
        kinds = [("intra", "dp_intra", False)] if self.mesh.size("dp_intra") > 1 else []
        kinds += [("inter", "dp_inter", False), ("card", "dp_inter", True)] if self.mesh.size("dp_inter") > 1 else []
        return [Sample(name, size, self.seconds(self.exchange(axis, size, alone=alone))) for name, axis, alone in kinds for size in sizes]

    def tflops(self, rows: int, inner: int, columns: int) -> float:
        """TFLOP/s of one matrix product of these sizes while all ranks compute."""
        a, b = (self.torch.randn(shape, device=self.device).to(self.dtype) for shape in ((rows, inner), (inner, columns)))
        return 2 * rows * inner * columns / self.each(lambda: self._keep(a @ b)) / 1e12

    def each(self, work: Callable[[], None]) -> float:
        """Seconds of one `work` among as many as take LONG_ENOUGH: a short one alone would measure how ranks wake up."""
        once = self.seconds(work)
        count = int(max(1, min(10_000, LONG_ENOUGH // once)))

        def repeated() -> None:
            for _ in range(count):
                work()

        return self.seconds(repeated) / count if count > 1 else once

    def _keep(self, value: Any) -> None:
        self.kept = value

    def memory_gbytes(self) -> float:
        """Bytes per second of a scaling in place, read and written."""
        x = self.torch.ones(1 << 24, dtype=self.torch.float32, device=self.device)
        return 2 * x.nbytes / self.seconds(lambda: self._keep(x.mul_(1.0001))) / 1e9

    def unit_us(self) -> float:
        """Microseconds of the forward of a block that computes next to nothing: its launches."""
        from paro_lm.model.transformer import Transformer

        model = Transformer(ModelConfig(hidden_size=64, num_layers=8, num_heads=2), vocab_size=128).to(self.device).to(self.dtype)
        tokens = self.torch.zeros(1, 4, dtype=self.torch.int64, device=self.device)

        def forward() -> None:
            with self.torch.no_grad():
                model(tokens, labels=tokens)

        return self.seconds(forward) / 10 * 1e6

    def model_seconds(self, model_cfg: ModelConfig) -> float:
        """Seconds of forward and backward of one sample of `tokens` tokens, nothing sharded, while all ranks compute."""
        from paro_lm.model.transformer import Transformer

        model = Transformer(model_cfg, vocab_size=MODEL_VOCAB).initialize(0).to(self.device).to(self.dtype)
        tokens = self.torch.zeros(1, self.cfg.tokens, dtype=self.torch.int64, device=self.device)

        def step() -> None:
            model(tokens, labels=tokens).backward()
            model.zero_grad(set_to_none=True)

        return self.each(step)

    def overlap(self) -> float | None:
        """Share of the shorter that hides when a transfer runs beside matrix products of about its length; None with one rank."""
        from paro_lm.parallel.queue import make_queue

        axis = "dp_inter" if self.mesh.size("dp_inter") > 1 else "dp_intra"
        if self.mesh.size(axis) == 1:
            return None
        transfer = self.exchange(axis, int(self.cfg.largest_mib * (1 << 20)))
        a = self.torch.randn(self.cfg.tokens, self.cfg.hidden_size, device=self.device).to(self.dtype)
        b = self.torch.randn(self.cfg.hidden_size, self.cfg.hidden_size, device=self.device).to(self.dtype)
        sending = self.seconds(transfer)
        one = self.each(lambda: self._keep(a @ b))
        count = max(1, min(10_000, round(sending / one)))

        def compute() -> None:
            for _ in range(count):
                self._keep(a @ b)

        queue = make_queue(self.device, overlap=True, name="calibrate")

        def both() -> None:
            handle = queue.submit(transfer)
            compute()
            handle.wait()

        computing, together = self.seconds(compute), self.seconds(both)
        queue.close()
        return min(1.0, max(0.0, (sending + computing - together) / min(sending, computing)))


def measure(cfg: CalibrateConfig, mesh: Any) -> tuple[ClusterConfig, list[Sample]]:
    """The cluster as this run sees it, and the samples of its links. A collective call."""
    from paro_lm.metrics import peak_tflops

    bench = _Bench(cfg, mesh)
    on_cpu = mesh.device.type == "cpu"
    hidden, size = cfg.hidden_size, 1024 if on_cpu else 8192
    block = bench.tflops(cfg.tokens, hidden, 4 * hidden)
    best = max(block, bench.tflops(size, size, size))
    peak = cfg.peak_tflops or peak_tflops(None, mesh.device, bench.dtype) or best
    overlap = bench.overlap()
    base = ClusterConfig(
        name=cfg.name,
        nodes=mesh.size("dp_inter"),
        ranks_per_node=mesh.size("dp_intra"),
        backend="gloo" if on_cpu else "nccl",
        memory_gb=float(f"{_memory_bytes(mesh) / 1e9:.4g}"),
        reserved_gb=cfg.reserved_gb,
        peak_tflops=float(f"{peak:.4g}"),
        memory_gbytes=float(f"{bench.memory_gbytes():.4g}"),
        unit_us=float(f"{bench.unit_us():.4g}"),
    )
    model = block_model(cfg)
    efficiency = efficiency_from(base, bench.model_seconds(model), model, cfg)
    base = replace(base, efficiency=float(f"{efficiency:.4g}"))
    if overlap is not None:
        base = replace(base, overlap=float(f"{overlap:.3g}"))
    samples = bench.links()
    return cluster_from(base, samples), samples


def _memory_bytes(mesh: Any) -> float:
    import torch

    if mesh.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / mesh.size("dp_intra")
    return float(torch.get_device_module(mesh.device).get_device_properties(mesh.device).total_memory)


def write(cluster: ClusterConfig, samples: Sequence[Sample], folder: Path) -> Path:
    """cluster/<name>.yaml, which --config-dir finds, and the samples beside it."""
    path = folder / "cluster" / f"{cluster.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {value}" for name, value in asdict(cluster).items()]
    path.write_text("\n".join(["# Written by paro-calibrate.", *lines]) + "\n", encoding="utf-8")
    with (folder / f"{cluster.name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["link", "bytes", "seconds"])
        writer.writerows((s.link, s.num_bytes, s.seconds) for s in samples)
    return path


def task(cfg: CalibrateConfig) -> int:
    """Measure on all ranks; rank 0 writes."""
    from paro_lm.distributed import initialize, shutdown
    from paro_lm.parallel.mesh import ParallelMesh

    world = initialize(RuntimeConfig(device=cfg.device))
    mesh = ParallelMesh.build(world_size=world.world_size, rank=world.rank, local_world_size=world.local_world_size, device=world.device)
    cluster, samples = measure(cfg, mesh)
    if world.rank == 0:
        path = write(cluster, samples, Path(cfg.folder))
        print(path.read_text(), end="")
        print(f"use it: paro-plan --config-dir {cfg.folder} cluster={cluster.name}")
    shutdown(world)
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
