#!/usr/bin/env python3
"""A mixed plan against the best uniform cell for a memory budget between two cells, on an emulated cluster (root).

    scripts/check_mixed.py                            # 2 nodes x 2 ranks at 500 Mbit

paro-calibrate measures the cluster; of the budgets between neighbouring cells the one with the largest predicted gain is taken. Both
runs then train in turns: the ratio of their step times is the median over rounds with its bootstrap 95 % interval, and peak bytes of
live tensors are held against the budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from check_predictions import config, folder_of, launch, read_cluster

from paro_lm import distributed
from paro_lm.config import Config, RuntimeConfig
from paro_lm.planner.candidates import Candidate
from paro_lm.planner.report import pareto
from paro_lm.planner.search import PlanOptions, plan
from paro_lm.tools.measure import TakingTurns, interval, synthetic_data, take_turns

SHARES = (0.25, 0.5, 0.75)
"""Budgets that are tried between two neighbouring cells."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of both runs (default 15)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/check_mixed"))
    parser.add_argument("--worker", action="store_true", help="measure as one rank of a running cluster")
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.worker:
        return worker(args)
    folder = folder_of(args)
    launch(__file__, args)
    text = report(json.loads((folder / "mixed.json").read_text(encoding="utf-8")))
    (folder / "mixed.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def choose(cfg: Config, world: distributed.World) -> tuple[Candidate, Candidate] | None:
    """(best uniform cell, mixed plan) at the budget with the largest predicted gain; None when no budget has a mixed plan."""
    options = PlanOptions(
        tp=[1], pp=[1], group_size=[world.local_world_size], micro_batch_size=[1], activation_checkpointing=["none"], mixed=False
    )
    sizes = {"world_size": world.world_size, "local_world_size": world.local_world_size}
    front = pareto(plan(cfg, options=options, **sizes).candidates)  # type: ignore[arg-type]
    found = []
    for light, heavy in zip(front, front[1:], strict=False):
        for share in SHARES:
            budget = light.memory.total + share * (heavy.memory.total - light.memory.total)
            result = plan(cfg, options=replace(options, budget_gb=budget / 1e9, mixed=True), **sizes)  # type: ignore[arg-type]
            if result.best is not None and result.mixed is not None:
                found.append((result.best, result.mixed))
    return max(found, key=lambda pair: pair[0].time.total / pair[1].time.total, default=None)


def worker(args: argparse.Namespace) -> int:
    """Train both on this rank; rank 0 writes mixed.json."""
    world = distributed.initialize(RuntimeConfig(device="cpu"))
    data = distributed.on_rank_zero(lambda: synthetic_data(folder_of(args) / "data", 256))
    cfg = config("NNN", args, world.world_size, data)
    assert cfg.cluster == read_cluster(folder_of(args) / "calibrate" / "cluster" / "measured.yaml")
    pair = distributed.on_rank_zero(lambda: choose(cfg, world))
    if pair is None:
        raise ValueError("no budget between two cells has a mixed plan on this cluster; choose another rate or model.")
    runs = []
    for name, candidate in zip(("uniform", "mixed"), pair, strict=True):
        cells = {unit: str(cell) for unit, cell in candidate.unit_cells.items()}
        parallel = replace(cfg.parallel, sharding=str(candidate.cell), sharding_overrides=cells)
        runs.append(TakingTurns(name, replace(cfg, run_name=name, parallel=parallel)))
    timings = take_turns(runs, args.rounds, say=lambda text: print(text, flush=True) if world.rank == 0 else None)
    found: dict[str, Any] = {}
    for run, candidate in zip(runs, pair, strict=True):
        found[run.name] = {
            "cell": str(candidate.cell),
            "units": {unit: str(cell) for unit, cell in candidate.unit_cells.items()},
            "seconds": [each.seconds for each in timings if each.name == run.name and each.round],
            "predicted_seconds": candidate.time.total,
            "bytes": run.peak_bytes(),
            "predicted_bytes": candidate.memory.total,
            "budget": candidate.budget,
        }
    if world.rank == 0:
        (folder_of(args) / "mixed.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for run in runs:
        run.close()
    distributed.shutdown(world)
    return 0


def report(found: dict[str, Any]) -> str:
    """A line per run, then the ratio and its verdict."""
    lines = [f"Budget {found['mixed']['budget'] / (1 << 20):.1f} MiB per rank of live tensors; emulated cluster, Gloo on the CPU.", ""]
    lines += ["| run | cells | s/step measured | predicted | peak MiB measured | predicted |", "|---|---|---|---|---|---|"]
    for name, run in found.items():
        cells = ", ".join([run["cell"], *(f"{unit} {cell}" for unit, cell in run["units"].items())])
        lines.append(
            f"| {name} | {cells} | {statistics.median(run['seconds']):.3f} | {run['predicted_seconds']:.3f} | "
            f"{run['bytes'] / (1 << 20):.1f} | {run['predicted_bytes'] / (1 << 20):.1f} |"
        )
    ratios = [one / other for one, other in zip(found["uniform"]["seconds"], found["mixed"]["seconds"], strict=True)]
    middle, low, high = interval(ratios)
    predicted = found["uniform"]["predicted_seconds"] / found["mixed"]["predicted_seconds"]
    verdict = "faster" if low > 1 else "slower" if high < 1 else "no difference beyond the noise"
    measured = f"{middle:.3f} [{low:.3f}, {high:.3f}] measured, {predicted:.3f} predicted"
    return "\n".join([*lines, "", f"uniform / mixed: {measured}: the mixed plan is {verdict}"])


if __name__ == "__main__":
    sys.exit(main())
