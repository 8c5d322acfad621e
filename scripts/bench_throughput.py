#!/usr/bin/env python3
"""Training steps of our cells against DDP, HSDP and FSDP2, on an emulated cluster (root).

    scripts/bench_throughput.py                             # 2 nodes x 2 ranks at 500 Mbit, all variants
    scripts/bench_throughput.py --pairs 7 --only IIG III    # fewer rounds, some variants
    scripts/bench_throughput.py --summary                   # only the tables of what <out> holds

The same model (Llama-type, about 20 M parameters, sequence 128, one sample per rank, accumulation 4, AdamW, no clipping) in every
variant, all interleaved in one run, in an order that changes from round to round; a ratio is the median over rounds with its bootstrap
95 % interval. Peers are tuned: DDP and HSDP reduce on the last micro-batch only; FSDP2 reduces every micro-batch, as whoever wants
sharded gradients must. A step of ours starts with publishing the parameters that the step before updated: that is the steady state.
Losses of all variants are compared. Without root: `torchrun ... scripts/bench_throughput.py --worker FILE` on a real cluster.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_collectives import interval, sent_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paro_lm.config import ModelConfig, OptimConfig
from paro_lm.model.transformer import Transformer
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.cost import ElementBytes, memory
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import Cell
from paro_lm.tools.emulated_cluster import EmulatedCluster

CELLS = ("NNN", "NII", "III", "IIG")
PEERS = ("DDP", "HSDP-keep", "HSDP", "FSDP2")
FIELDS = ("variant", "round", "seconds", "link_bytes", "loss", "state_bytes", "formula_bytes", "params")
LR, VOCAB = 1e-4, 8192


@dataclass(frozen=True)
class Bar:
    """`ours` must take at most `most` of the time of `peer`."""

    ours: str
    peer: str
    most: float


BARS = (Bar("IIG", "FSDP2", 0.5), Bar("III", "HSDP", 1.0), Bar("NII", "HSDP-keep", 1.0), Bar("NNN", "DDP", 1.0), Bar("IIG", "III", 1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--pairs", type=int, default=15, help="rounds (default 15)")
    parser.add_argument("--slow-pairs", type=int, default=5, help="rounds in which FSDP2 takes part (default 5)")
    parser.add_argument(
        "--only", nargs="+", default=[*CELLS, *PEERS], metavar="VARIANT", help=f"of {', '.join((*CELLS, *PEERS))}, or any cell"
    )
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--collectives", default="auto")
    parser.add_argument("--trace", type=Path, default=None, metavar="FOLDER", help="write a trace of one more step of every variant")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_throughput"))
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--worker", type=Path, default=None, metavar="CSV", help="measure as one rank of a running cluster")
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{args.nodes}x{args.ranks}-{args.rate}.csv"
    if not args.summary:
        options = {key: value for key, value in vars(args).items() if key not in ("only", "worker", "summary", "trace", "nodes", "ranks")}
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(file.absolute()), "--only", *args.only]
        command += [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        command += ["--trace", str(args.trace.absolute())] if args.trace else []
        with EmulatedCluster(args.nodes, args.rate) as cluster:
            cluster.run(command, args.ranks, timeout=3600, echo=True)
    with file.open() as lines:
        print(tables(list(csv.DictReader(lines))))
    return 0


# One rank


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train: `step()` gives this rank's mean loss; bytes held at rest are real ones, and what the formula says."""

    name: str
    step: Callable[[], torch.Tensor]
    state_bytes: int = 0
    formula_bytes: int = 0


def worker(args: argparse.Namespace) -> int:
    """Measure everything on this rank; rank 0 writes the CSV."""
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = ParallelMesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), group_size=local, device="cpu")
    data = torch.randint(0, VOCAB, (args.accumulation, 1, args.seq_length + 1), generator=torch.Generator().manual_seed(mesh.rank))
    variants = [ours(name, mesh, data, args) if name not in PEERS else peer(name, mesh, data, args) for name in args.only]
    params = sum(p.numel() for p in make_model(args).parameters())
    rows: list[dict[str, Any]] = []
    for round_ in range(args.pairs + 1):  # the first one warms up
        order = [v for v in variants if v.name != "FSDP2" or round_ <= args.slow_pairs]
        random.Random(round_).shuffle(order)
        for variant in order:
            seconds, link_bytes, loss = measure(variant, mesh)
            row = (variant.name, round_, seconds, link_bytes, loss, variant.state_bytes, variant.formula_bytes, params)
            rows.append(dict(zip(FIELDS, row, strict=True)))
        if mesh.rank == 0:
            print(
                f"round {round_}: " + ", ".join(f"{row['variant']} {row['seconds']:.2f}" for row in rows if row["round"] == round_),
                flush=True,
            )
    if mesh.rank == 0:
        with args.worker.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    if args.trace:
        trace(variants, mesh, args.trace)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(variant: Variant, mesh: ParallelMesh) -> tuple[float, int, float]:
    """Seconds of the slowest rank, bytes over the busiest link, mean loss of a step."""
    mesh.sum(1)
    before, start = sent_bytes(), time.perf_counter()
    loss = variant.step()
    seconds = mesh.max(time.perf_counter() - start)
    return seconds, mesh.max(sent_bytes() - before), mesh.sum(float(loss)) / mesh.world_size


def trace(variants: Sequence[Variant], mesh: ParallelMesh, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for variant in variants:
        mesh.sum(1)
        with torch.profiler.profile() as profiler:
            variant.step()
        if mesh.rank == 0:
            profiler.export_chrome_trace(str(folder / f"{variant.name}.json"))


def make_model(args: argparse.Namespace) -> Transformer:
    cfg = ModelConfig(
        hidden_size=args.hidden, num_layers=args.layers, num_heads=args.hidden // 64, num_kv_heads=args.hidden // 64,
        ffn_size=args.hidden * 8 // 3, tie_embeddings=False,
    )  # fmt: skip
    return Transformer(cfg, vocab_size=VOCAB).initialize(0)


def loss_of(model: nn.Module, tokens: torch.Tensor, accumulation: int) -> torch.Tensor:
    """This micro-batch's part of this rank's mean loss."""
    return model(tokens[:, :-1], labels=tokens[:, 1:].contiguous()) / (tokens.shape[1] - 1) / accumulation


def ours(name: str, mesh: ParallelMesh, data: torch.Tensor, args: argparse.Namespace, ledger: ByteLedger | None = None) -> Variant:
    """A cell of the lattice."""
    grids = [GridCollectives(mesh, algorithm=args.collectives, ledger=ledger) for _ in range(2)]
    model = make_model(args)
    engine = ShardingEngine(
        model, model.units(), mesh=mesh, cells=Cell.parse(name), gather_collectives=grids[0], reduce_collectives=grids[1]
    )
    optimizer = AdamW(engine, OptimConfig(lr=LR, weight_decay=0.0), decays=lambda name: True)

    def step() -> torch.Tensor:
        engine.sync_parameters()
        losses = []
        for index, tokens in enumerate(data):
            with engine.micro_batch(last=index == len(data) - 1):
                loss = loss_of(model, tokens, len(data))
                (loss / mesh.world_size).backward()
                losses.append(loss.detach())
        engine.finish_gradients()
        optimizer.step(LR)
        return torch.stack(losses).sum()

    sizes = engine.state_bytes()
    held = sizes["param"] + sizes["grad"] + sizes["main"] - sizes["shared"] + optimizer.state_bytes()
    formula = memory(engine.unit_sizes(), mesh.shape, ElementBytes(param=4, grad=4, reduce=4, main=4))
    return Variant(name=name, step=step, state_bytes=held, formula_bytes=int(formula.total))


def peer(name: str, mesh: ParallelMesh, data: torch.Tensor, args: argparse.Namespace) -> Variant:
    """torch's own."""
    model: Any = make_model(args)
    keep = name == "HSDP-keep"
    if name == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shape = {"FSDP2": ((mesh.world_size,), ("shard",))}.get(
            name, (tuple(mesh.size(axis) for axis in DATA_AXES), ("replicate", "shard"))
        )
        device_mesh = init_device_mesh("cpu", shape[0], mesh_dim_names=shape[1])
        for block in model.layers.values():
            fully_shard(block, mesh=device_mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=device_mesh, reshard_after_forward=not keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> torch.Tensor:
        losses = []
        for index, tokens in enumerate(data):
            last = index == len(data) - 1
            if name == "DDP":
                model.require_backward_grad_sync = last
            elif name != "FSDP2":
                model.set_requires_gradient_sync(last)
                if keep:
                    model.set_reshard_after_backward(last)
            loss = loss_of(model, tokens, len(data))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return Variant(name=name, step=step)


# The summary


def tables(rows: Iterable[dict[str, str]]) -> str:
    """One line per variant, then one per bar, in Markdown."""
    by_variant: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["round"]] = row
    lines = [
        "| variant | s/step | link bytes / parameter bytes | state MiB per rank | formula | loss, last common round |",
        "|---|---|---|---|---|---|",
    ]
    common = max(set.intersection(*(set(rounds) for rounds in by_variant.values())), key=int)
    for name, rounds in by_variant.items():
        timed = [row for at, row in rounds.items() if at != "0"]
        first = timed[0]
        carried = statistics.median(float(row["link_bytes"]) for row in timed) / (4 * float(first["params"]))
        state = [f"{int(first[key]) / (1 << 20):.2f}" if int(first[key]) else "" for key in ("state_bytes", "formula_bytes")]
        seconds = statistics.median(float(row["seconds"]) for row in timed)
        lines.append(f"| {name} | {seconds:.2f} | {carried:.2f} | {state[0]} | {state[1]} | {float(rounds[common]['loss']):.5f} |")
    lines += ["", "| bar | time ratio, median [95 %] | pairs | at most | |", "|---|---|---|---|---|"]
    for bar in BARS:
        if bar.ours not in by_variant or bar.peer not in by_variant:
            continue
        mine, theirs = by_variant[bar.ours], by_variant[bar.peer]
        ratios = [float(mine[at]["seconds"]) / float(theirs[at]["seconds"]) for at in theirs if at != "0" and at in mine]
        middle, low, high = interval(ratios)
        verdict = "met" if middle <= bar.most else "falls short" if low > bar.most else "met within the noise"
        lines.append(f"| {bar.ours} / {bar.peer} | {middle:.3f} [{low:.3f}, {high:.3f}] | {len(ratios)} | {bar.most} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
