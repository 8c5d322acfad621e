#!/usr/bin/env python3
"""Step time and memory of all cells as the planner predicts them, beside what an emulated cluster measures (root).

    scripts/check_predictions.py                                  # 2 nodes x 2 ranks at 500 Mbit
    scripts/check_predictions.py --nodes 4 --rate 200mbit         # another cluster; --summary prints what <out> holds

paro-calibrate measures the cluster first; the prediction knows nothing else of it. The cells then train one after another, as a run does
alone: on Gloo the threads of every communicator in memory wake 100 times a second. Written per cluster: a table (Markdown), a CSV and a
PNG. Targets: median absolute error of the step time 15 %, the best predicted cell within 5 % of the best measured one, memory (peak bytes
of live tensors) within 5 %.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from paro_lm import distributed
from paro_lm.cli import load
from paro_lm.config import ClusterConfig, Config, RuntimeConfig
from paro_lm.parallel.sharding import KEPT_CELLS
from paro_lm.planner.predict import predict
from paro_lm.tools.emulated_cluster import EmulatedCluster
from paro_lm.tools.measure import TakingTurns, synthetic_data, take_turns, timing_overrides

VOCAB = 4096
FIELDS = ("cell", "seconds", "low", "high", "predicted_seconds", "bytes", "predicted_bytes")
TIME_ERROR, BEST_ERROR, MEMORY_ERROR = 0.15, 0.05, 0.05

Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of every cell (default 5)")
    parser.add_argument("--at-once", type=int, default=1, help="runs in memory at a time, which take turns and cost each other time")
    parser.add_argument("--cells", nargs="+", default=[str(cell) for cell in KEPT_CELLS])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/check_predictions"))
    parser.add_argument("--summary", action="store_true", help="only the tables of what <out> holds")
    parser.add_argument("--worker", action="store_true", help="measure as one rank of a running cluster")
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.worker:
        return worker(args)
    if not args.summary:
        launch(__file__, args, "--at-once", str(args.at_once), "--cells", *args.cells)
    for path in sorted(args.out.glob("*/predictions.csv")):
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        text = table(rows, path.parent.name)
        (path.parent / "predictions.md").write_text(text + "\n", encoding="utf-8")
        plot(rows, path.parent / "predictions.png", path.parent.name)
        print(text)
    return 0


def folder_of(args: argparse.Namespace) -> Path:
    return Path(args.out) / f"{args.nodes}x{args.ranks}-{args.rate}"


def launch(script: str, args: argparse.Namespace, *more: str) -> None:
    """Calibrate, then run the workers of `script` with the options of `args` and `more`, on one emulated cluster."""
    folder = folder_of(args)
    options = ("nodes", "ranks", "rate", "rounds", "hidden", "layers", "seq_length", "accumulation", "out")
    command = [sys.executable, str(Path(script).absolute()), "--worker", *more]
    command += [text for name in options for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    calibrate = [
        sys.executable, "-m", "paro_lm.tools.calibrate", "name=measured", f"folder={folder / 'calibrate'}", "largest_mib=8", "repeats=5",
        f"hidden_size={args.hidden}", f"tokens={args.seq_length}",
    ]  # fmt: skip
    with EmulatedCluster(args.nodes, args.rate) as cluster:
        cluster.run(calibrate, args.ranks, timeout=300)
        print((folder / "calibrate" / "cluster" / "measured.yaml").read_text(), flush=True)
        cluster.run(command, args.ranks, timeout=1800, echo=True)


def config(cell: str, args: argparse.Namespace, world: int, data: Path) -> Config:
    """The run of one cell."""
    folder = folder_of(args)
    cfg = load(
        [
            *timing_overrides(folder, data),
            f"run_name={cell}",
            f"parallel.sharding={cell}",
            f"model.vocab_size={VOCAB}",
            f"model.hidden_size={args.hidden}",
            f"model.num_layers={args.layers}",
            f"model.num_heads={args.hidden // 64}",
            f"model.ffn_size={args.hidden * 8 // 3}",
            f"seq_length={args.seq_length}",
            "micro_batch_size=1",
            f"global_batch_size={args.accumulation * world}",
        ]
    )
    return replace(cfg, cluster=read_cluster(folder / "calibrate" / "cluster" / "measured.yaml"))


def read_cluster(path: Path) -> ClusterConfig:
    """What paro-calibrate wrote."""
    return load(["cluster=measured"], config_dir=path.parent.parent).cluster


def worker(args: argparse.Namespace) -> int:
    """Train in all cells on this rank; rank 0 writes the CSV."""
    world = distributed.initialize(RuntimeConfig(device="cpu"))
    data = distributed.on_rank_zero(lambda: synthetic_data(folder_of(args) / "data", 256))
    configs = {cell: config(cell, args, world.world_size, data) for cell in args.cells}
    rows: list[dict[str, object]] = []
    for start in range(0, len(args.cells), args.at_once):
        rows += measure({cell: configs[cell] for cell in args.cells[start : start + args.at_once]}, args.rounds, world)
    if world.rank == 0:
        with (folder_of(args) / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    distributed.shutdown(world)
    return 0


def measure(configs: dict[str, Config], rounds: int, world: distributed.World) -> list[dict[str, object]]:
    """Rows of cells whose runs take turns. A collective call."""
    runs = [TakingTurns(cell, cfg) for cell, cfg in configs.items()]
    timings = take_turns(runs, rounds, say=lambda text: print(text, flush=True) if world.rank == 0 else None)
    rows = []
    for run in runs:
        seconds = [each.seconds for each in timings if each.name == run.name and each.round]
        planned = predict(configs[run.name], world_size=world.world_size, local_world_size=world.local_world_size)
        row = (run.name, statistics.median(seconds), min(seconds), max(seconds), planned.time.total, run.peak_bytes(), planned.memory.total)
        rows.append(dict(zip(FIELDS, row, strict=True)))
    for run in runs:
        run.close()
    return rows


def table(rows: list[Row], name: str) -> str:
    """One line per cell, the fastest measured first, then the three targets."""
    errors = {row["cell"]: float(row["predicted_seconds"]) / float(row["seconds"]) - 1 for row in rows}
    memory = {row["cell"]: float(row["predicted_bytes"]) / float(row["bytes"]) - 1 for row in rows}
    lines = [f"Emulated cluster {name}, Gloo on the CPU; predicted from what paro-calibrate measured in the same run.", ""]
    lines += [
        "| cell | s/step measured (least, most) | predicted | error | peak MiB measured | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: float(row["seconds"])):
        seconds, low, high, predicted = (float(row[key]) for key in ("seconds", "low", "high", "predicted_seconds"))
        held, planned = (float(row[key]) / (1 << 20) for key in ("bytes", "predicted_bytes"))
        lines.append(
            f"| {row['cell']} | {seconds:.3f} ({low:.3f}, {high:.3f}) | {predicted:.3f} | {errors[row['cell']]:+.1%} | {held:.1f} | "
            f"{planned:.1f} | {memory[row['cell']]:+.1%} |"
        )
    measured = {row["cell"]: float(row["seconds"]) for row in rows}
    chosen = min(rows, key=lambda row: float(row["predicted_seconds"]))["cell"]
    best = min(measured, key=lambda cell: measured[cell])
    figures = (
        ("median absolute error of the step time", statistics.median(abs(value) for value in errors.values()), TIME_ERROR),
        (f"best predicted cell {chosen} over best measured {best}", measured[chosen] / measured[best] - 1, BEST_ERROR),
        ("largest absolute error of memory", max(abs(value) for value in memory.values()), MEMORY_ERROR),
    )
    lines += [
        "",
        *(f"- {what}: {value:.1%}, target {limit:.0%}: {'met' if value <= limit else 'missed'}" for what, value, limit in figures),
    ]
    return "\n".join(lines)


def plot(rows: list[Row], path: Path, name: str) -> None:
    """Predicted over measured step time and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    for axes, (x, y), unit, scale in zip(
        figure.subplots(1, 2),
        (("seconds", "predicted_seconds"), ("bytes", "predicted_bytes")),
        ("s/step", "MiB"),
        (1, 1 << 20),
        strict=True,
    ):
        points = [(float(row[x]) / scale, float(row[y]) / scale, row["cell"]) for row in rows]
        limit = 1.1 * max(max(a, b) for a, b, _ in points)
        axes.plot([0, limit], [0, limit], color="0.7", linestyle=":")
        axes.scatter([a for a, _, _ in points], [b for _, b, _ in points])
        for a, b, cell in points:
            axes.annotate(cell, (a, b), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes.set(xlabel=f"measured (emulated), {unit}", ylabel=f"predicted, {unit}", xlim=(0, limit), ylim=(0, limit))
    figure.suptitle(f"{name}: prediction against measurement")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
