#!/usr/bin/env python3
"""Tensor parallelism: the sum of input gradients beside the weight gradients against one after the other, and HO-Ring against the backend.

    scripts/bench_tensor.py                                                     # 2 ranks of this machine
    scripts/emulated_cluster.py run --nodes 2 --ranks 1 --rate 1gbit -- python scripts/bench_tensor.py
    scripts/emulated_cluster.py run --nodes 2 --ranks 2 --rate 500mbit -- python scripts/bench_tensor.py --collectives

Forward and backward of one model, all variants in one run, in an order that changes from round to round; a time is that of the slowest
rank. Printed are medians, and the median of the ratios within rounds with its bootstrap 95 % interval. Under torchrun every rank
runs this script; `--collectives` takes the ranks of a node as a group.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from bench_collectives import interval

from paro_lm.config import ModelConfig, RuntimeConfig
from paro_lm.distributed import initialize
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.axes import default_tp_group_size
from paro_lm.parallel.mesh import AXES, ParallelMesh
from paro_lm.parallel.tensor import TensorParallel
from paro_lm.parallel.tensor_groups import GroupedCollectives
from paro_lm.testing import run_distributed

VOCAB = 2048


@dataclass(frozen=True, kw_only=True)
class Variant:
    sequence_parallel: bool
    overlap: bool
    collectives: str = "native"

    def __str__(self) -> str:
        words = ["sequence" if self.sequence_parallel else "replicated", self.collectives]
        return " ".join([*words, "beside" if self.overlap else "one after the other"])


def comparisons(collectives: bool) -> list[tuple[Variant, Variant]]:
    """(variant, what it is compared with)."""
    result = []
    for sequence_parallel in (False, True):
        if collectives:
            native = Variant(sequence_parallel=sequence_parallel, overlap=True)
            result += [(replace(native, collectives=name), native) for name in ("ho_ring", "hierarchical")]
        else:
            apart = Variant(sequence_parallel=sequence_parallel, overlap=False)
            result.append((replace(apart, overlap=True), apart))
    return result


def make_model(variant: Variant, mesh: ParallelMesh, cfg: ModelConfig) -> Transformer:
    tp, grouped = mesh.size("tp"), None
    if variant.collectives != "native":
        group_size = default_tp_group_size(tp, mesh.local_world_size)
        grouped = GroupedCollectives(mesh, algorithm=variant.collectives, group_size=group_size, overlap=variant.overlap)
    tensor = TensorParallel(
        group=mesh.group("tp"),
        rank=mesh.coordinate("tp"),
        size=tp,
        sequence_parallel=variant.sequence_parallel,
        overlap=variant.overlap,
        grouped=grouped,
    )
    with torch.device(mesh.device):
        return Transformer(cfg, vocab_size=VOCAB, tensor=tensor).initialize(0)


def measure(mesh: ParallelMesh, args: argparse.Namespace) -> dict[Variant, list[float]]:
    """Seconds per variant and round."""
    cfg = ModelConfig(hidden_size=args.hidden, num_layers=args.layers, num_heads=8, num_kv_heads=8)
    variants = list(dict.fromkeys(variant for pair in comparisons(args.collectives) for variant in pair))
    models = {variant: make_model(variant, mesh, cfg) for variant in variants}
    tokens = torch.randint(0, VOCAB, (args.batch, args.sequence), generator=torch.Generator().manual_seed(0)).to(mesh.device)
    seconds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    order = random.Random(0)
    for round_ in range(args.rounds + 2):
        order.shuffle(variants)
        for variant in variants:
            mesh.sum(0.0, AXES)
            begin = time.perf_counter()
            models[variant](tokens, labels=tokens).backward()
            if mesh.device.type == "cuda":
                torch.get_device_module(mesh.device).synchronize()
            elapsed = mesh.max(time.perf_counter() - begin, AXES)
            models[variant].zero_grad()
            if round_ >= 2:
                seconds[variant].append(elapsed)
    return seconds


def run_rank(rank: int, world_size: int, args: argparse.Namespace) -> dict[Variant, list[float]]:
    torch.set_num_threads(1)
    return measure(ParallelMesh.build(world_size=world_size, rank=rank, tp=world_size), args)


def run_launched(args: argparse.Namespace) -> dict[Variant, list[float]] | None:
    world = initialize(RuntimeConfig())
    mesh = ParallelMesh.build(
        world_size=world.world_size, rank=world.rank, tp=world.world_size, local_world_size=world.local_world_size, device=world.device
    )
    seconds = measure(mesh, args)
    return seconds if world.rank == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that are started here; without effect under torchrun")
    parser.add_argument("--collectives", action="store_true", help="compare algorithms instead of overlap")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    seconds = run_launched(args) if "RANK" in os.environ else run_distributed(run_rank, args.ranks, args, timeout=1200.0)[0]
    if seconds is None:
        return 0
    print(f"hidden {args.hidden}, {args.layers} layers, {args.batch} x {args.sequence} tokens, {args.rounds} rounds; ms")
    for variant, other in comparisons(args.collectives):
        ratio, low, high = interval([mine / theirs for mine, theirs in zip(seconds[variant], seconds[other], strict=True)])
        for one in (other, variant):
            print(f"{str(one):<50} {1e3 * statistics.median(seconds[one]):9.1f}")
        print(f"{'ratio':<50} {ratio:9.3f}   [{low:.3f}, {high:.3f}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
