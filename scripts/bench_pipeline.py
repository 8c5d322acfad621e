"""Idle share of pipeline ranks, measured beside the formula: 1F1B (p-1)/M and interleaved (p-1)/(vM), as shares of the ideal time.

Ranks are processes of this machine, one thread each. A rank is busy while it computes a stage's forward or backward; what is left of
the step, first to last computation of any rank, is idle. Printed is idle over busy time, whose ideal is the formula.

    python scripts/bench_pipeline.py                    # p = 2, M = 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from paro_lm.build import build_engine, build_model, build_runner
from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.data.loader import MicroBatch
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import AXES, ParallelMesh
from paro_lm.parallel.pipeline import _EngineStage
from paro_lm.testing import run_distributed
from paro_lm.trainer import run_chunk

VOCAB = 512


class Busy:
    """Adds up the time in which this rank computes."""

    def __init__(self) -> None:
        self.seconds, self.first, self.last = 0.0, 0.0, 0.0

    def reset(self) -> None:
        self.seconds, self.first, self.last = 0.0, float("inf"), 0.0

    def watch(self, name: str) -> None:
        original = getattr(_EngineStage, name)

        def timed(stage: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(stage, *args, **kwargs)
            end = time.perf_counter()
            self.seconds, self.first, self.last = self.seconds + end - begin, min(self.first, begin), max(self.last, end)
            return result

        setattr(_EngineStage, name, timed)


def measure(rank: int, world_size: int, configs: list[Config], num_micro_batches: int, steps: int) -> list[list[float]]:
    """Per schedule and step the idle time of all ranks over their busy time."""
    torch.set_num_threads(1)
    busy = Busy()
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        busy.watch(name)
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, pp=world_size)
    runs = []
    for cfg in configs:
        ledger = ByteLedger()
        part = build_model(cfg, mesh, vocab_size=VOCAB, ledger=ledger)
        engine = build_engine(cfg, part, mesh, ledger=ledger)
        runs.append((engine, build_runner(cfg, part, engine, mesh, ledger=ledger)))
    batches = [
        MicroBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:])
        for tokens in torch.randint(0, VOCAB, (num_micro_batches, configs[0].micro_batch_size, configs[0].seq_length + 1))
    ]
    shares: list[list[float]] = [[] for _ in runs]
    for step in range(steps + 2):
        for index, (engine, runner) in enumerate(runs):  # schedules take turns
            mesh.sum(0.0, AXES)
            busy.reset()
            runner.forward_backward(lambda chunk, hidden, i: run_chunk(chunk, hidden, batches[i]), num_micro_batches, 1.0)
            engine.finish_gradients()
            engine.drop_gradients()
            span = mesh.max(busy.last, AXES) + mesh.max(-busy.first, AXES)  # one clock: ranks are processes of one machine
            total = mesh.sum(busy.seconds, AXES)
            if step >= 2:
                shares[index].append((span * world_size - total) / total)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--virtual", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    common = [
        "model.hidden_size=256", f"model.num_layers={4 * args.pp * args.virtual}", "seq_length=128", "micro_batch_size=2",
        f"global_batch_size={2 * args.micro_batches}", f"parallel.pp={args.pp}",
        "parallel.balance=cost", f"model.vocab_size={VOCAB}",
    ]  # fmt: skip
    schedules = {
        "gpipe": (args.pp - 1) / args.micro_batches,
        "1f1b": (args.pp - 1) / args.micro_batches,
        "interleaved_1f1b": (args.pp - 1) / (args.virtual * args.micro_batches),
        "zbv": 0.0,
    }
    configs = []
    for name in schedules:
        virtual = args.virtual if name == "interleaved_1f1b" else 1
        configs.append(load([*common, f"parallel.schedule={name}", f"parallel.virtual_stages={virtual}"]))
    shares = run_distributed(measure, args.pp, configs, args.micro_batches, args.steps, timeout=1200.0)[0]
    print(f"p = {args.pp}, M = {args.micro_batches}, v = {args.virtual}, {args.steps} steps; idle / busy time, median")
    for (name, ideal), values in zip(schedules.items(), shares, strict=True):
        print(f"{name:<18} measured {statistics.median(values):6.3f}   formula {ideal:6.3f}")


if __name__ == "__main__":
    main()
