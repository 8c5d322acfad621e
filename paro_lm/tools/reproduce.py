"""`paro-reproduce`: the paper's tables and figures, as Markdown, CSV and PNG, beside what its text publishes."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paro_lm.cli import EXIT_OK, Tool, hydra_entry
from paro_lm.config import option
from paro_lm.planner.paper import FITTED, ring_seconds
from paro_lm.planner.reproduction import TABLES, ResultTable, reproduce


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Which tables, and where they go."""

    tables: list[str] = option([], f"Of {', '.join(TABLES)}; empty = all.")
    folder: str = option("outputs/reproduce", "Folder of reproduce.md, one CSV per table, and the figures.")
    convergence: bool = option(False, "Also train a small model in four cells (R14) on four local processes; says first how long it takes.")
    convergence_steps: int = option(300, "Steps of those runs.", least=1)
    convergence_data: list[str] = option([], "Text files for them; empty = the text that `make train` prepares.")
    measured: bool = option(
        False,
        "Also run the comparisons for real: under torchrun on that cluster, else on an emulated one of 2 x 2 ranks (root); says first how "
        "long it takes.",
    )
    measured_rounds: int = option(5, "Timed steps of every run.", least=1)
    measured_cluster: str = option(
        "a100_roce", "Under torchrun: the file of the group `cluster` that tells what fits and how long it takes."
    )


TOOL = Tool(
    name="paro-reproduce",
    description="the paper's tables and figures from the cost model, beside the published figures; needs no cluster.",
    examples=(
        "paro-reproduce",
        "paro-reproduce tables=[claims,scaling] folder=outputs/claims",
        "paro-reproduce convergence=true convergence_steps=500",
        "torchrun --nnodes 4 --nproc-per-node 8 ... -m paro_lm.tools.reproduce measured=true",
    ),
    schema=ReproduceConfig,
    config_name="reproduce",
)


def task(cfg: ReproduceConfig) -> int:
    """Write everything and print the claims; under torchrun only rank 0 does, after all have measured."""
    tables = reproduce(cfg.tables)
    folder = Path(cfg.folder)
    folder.mkdir(parents=True, exist_ok=True)
    measured: dict[str, str] = {}
    if cfg.measured:
        found = _measure_here(cfg, folder / "measured") if "WORLD_SIZE" in os.environ else _measure_emulated(cfg, folder / "measured")
        if found is None:
            return EXIT_OK
        tables.append(found)
    if cfg.convergence:
        tables.append(_converge(cfg, folder))
        measured["convergence"] = "convergence.png"
    for table in tables:
        with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*table.header, "label"])
            writer.writerows([*row, table.label] for row in table.rows)
    figures = _figures({table.name: table for table in tables}, folder) | measured
    lines = ["# The paper's tables and figures", "", provenance(), ""]
    for table in tables:
        lines += markdown(table, figures.get(table.name))
    (folder / "reproduce.md").write_text("\n".join(lines), encoding="utf-8")
    for table in tables:
        if table.name in ("claims", "guideline", "measured", "convergence"):
            print("\n".join(markdown(table, None)))
    print(f"everything: {folder / 'reproduce.md'}")
    return EXIT_OK


def _measure_here(cfg: ReproduceConfig, folder: Path) -> ResultTable | None:
    """As one rank of a cluster; the table on rank 0, on the others None."""
    import torch

    from paro_lm.tools.compare import measure_as_rank, measured_table

    world = measure_as_rank(folder, rounds=cfg.measured_rounds, cluster=cfg.measured_cluster)
    if world.rank:
        return None
    kind = "CPU" if world.device.type == "cpu" else torch.get_device_module(world.device).get_device_name(world.device)
    device = f"{world.world_size} x {kind}, {world.local_world_size} per node"
    return measured_table(folder, label="measured", where=provenance(device=device, backend=world.backend, seed="1234"))


def _measure_emulated(cfg: ReproduceConfig, folder: Path) -> ResultTable:
    """On an emulated cluster of this machine."""
    from paro_lm.tools.compare import measured_table
    from paro_lm.tools.emulated_cluster import EmulatedCluster, require_tools

    try:
        require_tools()
    except RuntimeError as error:
        raise ValueError(f"measured=true without torchrun: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    rounds = str(cfg.measured_rounds)
    command = [sys.executable, "-m", "paro_lm.tools.compare", str(folder.absolute()), rounds, "emulated_2x2_500mbit"]
    with EmulatedCluster(2, "500mbit") as cluster:
        cluster.run(command, 2, timeout=24 * 3600.0, echo=True)
    where = provenance(device="2 emulated nodes of 2 CPU ranks, 500 Mbit/s between them", backend="gloo", seed="1234")
    return measured_table(folder, label="emulated", where=where)


def _converge(cfg: ReproduceConfig, folder: Path) -> ResultTable:
    from paro_lm.tools.convergence import RANKS, convergence_table, train_all, write_curves

    curves = train_all(steps=cfg.convergence_steps, data=cfg.convergence_data, folder=folder / "convergence")
    write_curves(curves, folder)
    where = provenance(device=f"{RANKS} processes on the CPU", backend="gloo", seed="1234, other 4321")
    return convergence_table(curves, steps=cfg.convergence_steps, provenance=where)


def markdown(table: ResultTable, figure: str | None) -> list[str]:
    """A section with the table, its label, notes and figure."""
    lines = [f"## {table.title}", "", f"Figures are {table.label}; columns that say so are published.", ""]
    lines += ["| " + " | ".join(table.header) + " |", "|" + "---|" * len(table.header)]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in table.rows]
    lines += ["", *table.notes, ""] if table.notes else [""]
    return lines + ([f"![{table.title}]({figure})", ""] if figure else [])


def provenance(*, device: str = "none", backend: str = "none (formulas only)", seed: str = "of the fit: 0") -> str:
    """Where figures come from: device, backend, commit, seed, command, date."""
    root = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        commit = found.stdout.strip() if found.returncode == 0 else "not a checkout"
    except (OSError, subprocess.TimeoutExpired):
        commit = "unknown"
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return (
        f"device: {device}; backend: {backend}; Python {platform.python_version()}; commit: {commit}; seed {seed}; "
        f"command: `{command}`; {datetime.date.today().isoformat()}"
    )


def _figures(tables: dict[str, ResultTable], folder: Path) -> dict[str, str]:
    drawn = {}
    for name, draw in (("scaling", _draw_scaling), ("ring", _draw_ring), ("claims", _draw_claims), ("throughput", _draw_throughput)):
        if name in tables:
            draw(tables[name], folder / f"{name}.png")
            drawn[name] = f"{name}.png"
    return drawn


def _draw_scaling(table: ResultTable, path: Path) -> None:
    figure, axes = _figure()
    ranks = [int(name) for name in table.header[1:5]]
    for row in table.rows:
        speeds = [float(str(value)) for value in row[1:5]]
        axes.plot(ranks, [speed / speeds[0] for speed in speeds], marker="o", label=f"{row[0]} (modelled)")
        axes.plot(
            [ranks[-1]], [8 * float(str(row[6]))], marker="x", color=axes.lines[-1].get_color(), linestyle="", label=f"{row[0]} (published)"
        )
    axes.plot(ranks, [count / ranks[0] for count in ranks], color="0.7", linestyle=":", label="perfect")
    axes.set(xlabel="ranks", ylabel="speed-up over 16 ranks", title=table.title, xscale="log", yscale="log")
    axes.set_xticks(ranks, [str(count) for count in ranks], minor=False)
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    _save(figure, axes, path)


def _draw_ring(table: ResultTable, path: Path) -> None:
    figure, axes = _figure()
    ranks = [int(str(row[0])) for row in table.rows]
    for index, name in ((0, "ring"), (1, "HO-Ring")):
        axes.plot(ranks, [1000 * ring_seconds(count, 1e9, FITTED)[index] for count in ranks], marker="o", label=f"{name} (modelled)")
    axes.set(xlabel="ranks", ylabel="milliseconds", title=table.title, ylim=(0, None))
    _save(figure, axes, path)


def _draw_claims(table: ResultTable, path: Path) -> None:
    figure, axes = _figure()
    names = [str(row[0]) for row in table.rows]
    at = range(len(names))
    axes.bar([x - 0.2 for x in at], [float(str(row[3])) for row in table.rows], width=0.4, label="published")
    axes.bar([x + 0.2 for x in at], [float(str(row[4])) for row in table.rows], width=0.4, label="modelled")
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xticks(list(at), names, rotation=45, ha="right")
    axes.set(ylabel="ratio", title=table.title)
    _save(figure, axes, path)


def _draw_throughput(table: ResultTable, path: Path) -> None:
    figure, axes = _figure()
    for setting in dict.fromkeys(str(row[0]) for row in table.rows):
        points = [(float(str(row[4])), float(str(row[2])), str(row[1])) for row in table.rows if str(row[0]) == setting and row[3]]
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], label=setting)
        for x, y, name in points:
            axes.annotate(name.partition(" (")[0], (x, y), fontsize=6, xytext=(2, 2), textcoords="offset points")
    axes.set(xlabel="GB of states per rank", ylabel="samples per second", title=f"{table.title} (modelled)", xscale="log", yscale="log")
    _save(figure, axes, path)


def _figure():  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure, axes, path: Path) -> None:  # type: ignore[no-untyped-def]
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
