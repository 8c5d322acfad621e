"""R14: NIG, IIG, IGG and GGG (ZeRO-3) train with the same loss curve. Real training of a small model on real text, four local ranks.

All runs start from the same weights and see the same samples (they depend on the seed only), so what differs is the order of sums. Two
more runs give the scale: GGG with larger micro-batches, the same sums in another order, and GGG with another seed, another curve.
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.planner.reproduction import ResultTable, Row
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer

CELLS = ("GGG", "NIG", "IIG", "IGG")
REFERENCE, OTHER_ORDER, OTHER_SEED = "GGG", "GGG, micro-batch 8", "GGG, other seed"
RANKS, PROBE_STEPS = 4, 12
SAME = 0.1
"""Curves are the same when they differ by at most this share of what another seed changes."""

Curve = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Training and validation losses by step."""

    name: str
    train: Curve
    valid: Curve


def run_config(name: str, *, steps: int, data: Sequence[str], folder: Path) -> Config:
    """A Llama-type model of 0.13 M parameters on bytes: two groups of two ranks, two micro-batches of 4 x 128 bytes on each.

    The learning rate is one at which rounding does not grow into another curve (3e-3 is too high for that).
    """
    slug = name.lower().replace(", ", "_").replace(" ", "_")
    seed = 4321 if name == OTHER_SEED else 1234
    where = [f"run_name={slug}", f"output_dir={folder / 'runs'}", f"data.cache_dir={folder / 'cache'}", f"data.train=[{','.join(data)}]"]
    model = ["hidden_size=64", "num_layers=2", "num_heads=2", "ffn_size=176", "tie_embeddings=true"]
    optim = ["lr=1e-3", "min_lr=1e-4", f"warmup_steps={min(50, steps)}"]
    rest = [
        f"parallel.sharding={name[:3]}", "parallel.group_size=2", f"seed={seed}", f"steps={steps}", "data.tokenizer=bytes",
        "seq_length=128", "global_batch_size=32",
        f"micro_batch_size={8 if name == OTHER_ORDER else 4}", f"eval.every={max(1, steps // 6)}", "eval.batches=4",
        f"logging.every={steps}", "runtime.device=cpu", "runtime.num_threads=1",
    ]  # fmt: skip
    return load([*where, *(f"model.{text}" for text in model), *(f"optim.{text}" for text in optim), *rest])


def train_all(*, steps: int, data: Sequence[str], folder: Path) -> list[Curves]:
    """Train every cell, and the reference in another order and with another seed; says first how long that takes."""
    shutil.rmtree(folder / "runs", ignore_errors=True)  # curves of an older program would be taken for finished runs
    names = [*CELLS, OTHER_ORDER, OTHER_SEED]
    probe = run_config(REFERENCE, steps=PROBE_STEPS, data=data, folder=folder / "probe")
    shutil.rmtree(folder / "probe" / "runs", ignore_errors=True)
    configs = [run_config(name, steps=steps, data=data, folder=folder) for name in names]
    print(f"convergence: {len(names)} runs of {steps} steps on {RANKS} local processes; timing {PROBE_STEPS} steps first", flush=True)
    run_distributed(_train, RANKS, probe, configs, timeout=24 * 3600.0)
    return [_read(name, cfg) for name, cfg in zip(names, configs, strict=True)]


def _train(rank: int, world_size: int, probe: Config, configs: list[Config]) -> None:
    Trainer(probe).fit()
    if rank == 0:
        each = statistics.median(record["seconds"] for record in _records(probe) if "loss" in record)
        minutes = 1.1 * each * sum(cfg.steps for cfg in configs) / 60  # a tenth for validations
        print(f"convergence: {each:.3f} s per step, about {minutes:.1f} minutes in all", flush=True)
    for cfg in configs:
        Trainer(cfg).fit()


def _records(cfg: Config) -> list[dict[str, float]]:
    lines = (Path(cfg.output_dir) / cfg.run_name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _read(name: str, cfg: Config) -> Curves:
    records = _records(cfg)
    train = {int(record["step"]): record["loss"] for record in records if "loss" in record}
    valid = {int(record["step"]): record["val_loss"] for record in records if "val_loss" in record}
    return Curves(name=name, train=train, valid=valid)


def largest_difference(ours: Curve, theirs: Curve) -> float:
    """The largest |difference| over the steps; both curves have the same steps."""
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


def convergence_table(curves: Sequence[Curves], *, steps: int, provenance: str) -> ResultTable:
    """Final losses and the largest difference from GGG of every run, and whether that is the same curve."""
    by_name = {curve.name: curve for curve in curves}
    reference = by_name[REFERENCE]
    scale = largest_difference(by_name[OTHER_SEED].valid, reference.valid)
    rows: list[Row] = []
    for curve in curves:
        train, valid = largest_difference(curve.train, reference.train), largest_difference(curve.valid, reference.valid)
        verdict = {REFERENCE: "reference", OTHER_ORDER: "for scale", OTHER_SEED: "for scale"}.get(
            curve.name, "the same" if valid <= SAME * scale else "another curve"
        )
        final = [values[max(values)] for values in (curve.train, curve.valid)]
        rows.append((curve.name, *(f"{value:.4f}" for value in final), f"{train:.2e}", f"{valid:.2e}", verdict))
    notes = (
        f"R14, published: NIG, IGG and IIG converge as ZeRO-3 (7B, 16 ranks). Here: 0.13 M parameters, bytes, fp32, {steps} steps of 4096 "
        "bytes, two groups of two ranks; the same initial weights and samples in all runs but the one with another seed.",
        "Micro-batches of 8 change the order of sums only.",
        f"The same = validation losses differ from GGG's by at most {SAME:g} of what another seed changes.",
        provenance,
    )
    header = ("run", "training loss", "validation loss", "largest difference, training", "largest difference, validation", "curve")
    return ResultTable(name="convergence", title="Convergence (R14)", label="measured", header=header, rows=rows, notes=notes)


def write_curves(curves: Sequence[Curves], folder: Path) -> str:
    """curves.csv and the picture; its name."""
    with (folder / "convergence_curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "train_loss", "val_loss"])
        for curve in curves:
            for step in sorted(curve.train | curve.valid):
                writer.writerow([curve.name, step, curve.train.get(step, ""), curve.valid.get(step, "")])
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        width, style = 1.0 + 0.6 * (len(curves) - index), ("-", "--", "-.", ":", "-")[index % 5]  # equal curves lie on each other
        x, y = list(curve.train), list(curve.train.values())
        (line,) = axes.plot(x, y, alpha=0.7, label=curve.name, linestyle=style, linewidth=width)
        axes.plot(list(curve.valid), list(curve.valid.values()), marker="o", linestyle="", color=line.get_color(), markersize=4)
    axes.set(xlabel="step", ylabel="loss, nats per byte (dots: validation)", title="Convergence of cells (measured)")
    axes.legend(fontsize=8)
    figure.savefig(folder / "convergence.png", dpi=130)
    return "convergence.png"
