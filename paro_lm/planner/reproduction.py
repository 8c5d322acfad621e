"""The paper's tables and figures from the formulas, each line beside what the text publishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paro_lm.parallel.cost import ideal_memory, paper_time
from paro_lm.parallel.sharding import ALL_CELLS, KEPT_CELLS, Cell
from paro_lm.planner import published as paper
from paro_lm.planner.paper import (
    FITTED,
    TOLERANCE,
    Constants,
    cluster_of,
    deviation,
    guideline,
    leave_one_out,
    predict,
    ring_seconds,
    scenario,
    shape_of,
)

Row = Sequence[object]


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """One table: `label` says what its figures are (published, modelled, fitted), `notes` what a reader must know."""

    name: str
    title: str
    label: str
    header: tuple[str, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()


def cells_table(_: Constants) -> ResultTable:
    """The 27 cells, kept or eliminated, and why."""
    rows: list[Row] = []
    for cell in ALL_CELLS:
        finer = cell.dominating
        why = "states at least as fine as parameters and gradients" if cell.is_kept else f"{finer} needs less memory for the same gathers"
        rows.append((cell, "kept" if cell.is_kept else "eliminated", why))
    kept = sum(cell.is_kept for cell in ALL_CELLS)
    note = f"{kept} of 27 are kept; published: 14."
    return ResultTable(name="cells", title="The 27 cells", label="modelled", header=("cell", "", "why"), rows=rows, notes=(note,))


def memory_table(_: Constants) -> ResultTable:
    """GB of states per rank, 2-2-12 bytes, 32 ranks in groups of 8; * = fits 80 GB."""
    rows: list[Row] = []
    for cell in KEPT_CELLS:
        values = [_memory(cell, setting) for setting in paper.SETTINGS]
        rows.append((cell, *(f"{value / 1e9:.2f}{'*' if value < paper.DEVICE_BYTES else ''}" for value in values)))
    hpz = [_memory(Cell.parse("GGG"), s) + 2 * s.num_params / paper.GROUP for s in paper.SETTINGS]
    rows.append((f"{paper.HPZ}, outside the 27", *(f"{value / 1e9:.2f}{'*' if value < paper.DEVICE_BYTES else ''}" for value in hpz)))
    fits = ", ".join(str(cell) for cell in KEPT_CELLS if _memory(cell, paper.FULL_65B) < paper.DEVICE_BYTES)
    notes = (
        f"R3: for 65B full, {fits} and {paper.HPZ} fit 80 GB; published: ZeRO-3 (GGG), ZeRO++, IGG, IIG. GIG fits by the formula too.",
    )
    header = ("cell", *(f"{setting}, GB" for setting in paper.SETTINGS))
    return ResultTable(name="memory", title="Memory of states per rank", label="modelled", header=header, rows=rows, notes=notes)


def _memory(cell: Cell, setting: paper.Setting) -> float:
    return ideal_memory(cell, num_params=setting.num_params, num_trainable=setting.num_trainable, shape=shape_of(paper.RANKS)).total


def cost_table(_: Constants) -> ResultTable:
    """The four terms of t_comm for 7B full, seconds per micro-batch and per step."""
    rows: list[Row] = []
    for cell in KEPT_CELLS:
        time = paper_time(cell, cluster_of(paper.RANKS), num_params=7e9, accumulation=paper.ACCUMULATION)
        rows.append((cell, *(f"{value:.4f}" for value in (time.param, time.gradient, time.sync_g, time.sync_p)), f"{time.total:.3f}"))
    header = ("cell", "t_param, s per micro-batch", "t_gradient, s per micro-batch", "t_sync_g, s", "t_sync_p, s", "t_comm, s per step")
    return ResultTable(name="costs", title="The four cost terms, 7B full", label="modelled", header=header, rows=rows)


FORMULAS: tuple[tuple[str, str, str, str, str], ...] = (
    ("t_param", "N", "NNN", "param", "0"),
    ("t_param", "I", "III", "param", "2 (m-1)/m V/B'"),
    ("t_param", "G", "GGG", "param", "2 (n-1)/n V/B"),
    ("t_gradient", "N", "NNN", "gradient", "0"),
    ("t_gradient", "I", "III", "gradient", "(m-1)/m V'/B'"),
    ("t_gradient", "G", "GGG", "gradient", "(n-1)/n V'/B"),
    ("t_sync_g", "NN", "NNN", "sync_g", "2 (n-1)/n V'/B"),
    ("t_sync_g", "NI", "NNI", "sync_g", "(m-1)/m V'/B' + 2 (g-1)/g (V'/m)/B"),
    ("t_sync_g", "NG", "NNG", "sync_g", "(n-1)/n V'/B"),
    ("t_sync_g", "II", "III", "sync_g", "2 (g-1)/g (V'/m)/B"),
    ("t_sync_g", "IG", "IIG", "sync_g", "(g-1)/g (V'/m)/B"),
    ("t_sync_g", "GG", "GGG", "sync_g", "0"),
    ("t_sync_p", "NN, II, GG", "III", "sync_p", "0"),
    ("t_sync_p", "NI", "NNI", "sync_p", "(m-1)/m V'/B'"),
    ("t_sync_p", "NG", "NNG", "sync_p", "(n-1)/n V'/B"),
    ("t_sync_p", "IG", "IIG", "sync_p", "(g-1)/g (V'/m)/B"),
)
"""Term, letters (of p, of g, of g and os, of p and os), a cell that has them, its field, the formula."""


def formulas_table(_: Constants) -> ResultTable:
    """The four cost tables by letters: the formula, and its value for 7B full."""
    rows: list[Row] = []
    for term, letters, cell, name, formula in FORMULAS:
        time = paper_time(Cell.parse(cell), cluster_of(paper.RANKS), num_params=7e9, accumulation=1)
        rows.append((term, letters, formula, f"{getattr(time, name):.4f}"))
    notes = ("V = 16 Psi bits, V' = 16 Psi' bits (trainable), n ranks in g groups of m, B between groups, B' inside one.",)
    header = ("term", "letters", "formula", "s, 7B full")
    return ResultTable(name="formulas", title="The four cost tables", label="modelled", header=header, rows=rows, notes=notes)


def guideline_table(_: Constants) -> ResultTable:
    """Ranking of the guideline per setting beside R13."""
    rows: list[Row] = []
    for setting in paper.SETTINGS:
        budget_cells = [cell for cell in KEPT_CELLS if _memory(cell, setting) < paper.DEVICE_BYTES]
        everything = guideline(setting, budget_cells)
        candidates = [item for item in everything if str(item[0]) not in paper.NOT_CANDIDATES]
        chosen, wanted = [str(cell) for cell, _, _ in candidates], paper.CHOICES[setting]
        agrees = set(chosen[: len(wanted)]) == set(wanted)
        before = [str(cell) for cell, _, _ in everything if str(cell) in paper.NOT_CANDIDATES]
        text = "the same" if agrees else f"published {_places(wanted, chosen)}"
        if before:
            text += f"; not candidates: {', '.join(before)}"
        ranking = ", ".join(f"{cell} {value:.2f} ({seconds:.3f} s)" for cell, seconds, value in candidates[:6])
        rows.append((setting, ranking, " ".join(wanted), text))
    header = ("setting", "cells that fit: log(1/T) (t_comm)", "published choice (R13)", "difference")
    return ResultTable(name="guideline", title="The guideline's choice", label="modelled", header=header, rows=rows)


def _places(wanted: Sequence[str], chosen: Sequence[str]) -> str:
    return ", ".join(f"{cell} is {chosen.index(cell) + 1}." if cell in chosen else f"{cell} does not fit" for cell in wanted)


def throughput_table(constants: Constants) -> ResultTable:
    """Samples per second (fitted) and memory of baselines and cells, per setting."""
    rows: list[Row] = []
    names = ["ZeRO-1", "ZeRO-2", "ZeRO-3", "MiCS", "FSDP hybrid", paper.HPZ, "NIG", "ING", "IIG", "IGG", "GIG"]
    for setting in paper.SETTINGS:
        zero3 = _samples("ZeRO-3", setting, constants)
        for name in names:
            cell = paper.BASELINES.get(name, name)
            held = _memory(Cell.parse("GGG" if name == paper.HPZ else cell), setting)
            held += 2 * setting.num_params / paper.GROUP if name == paper.HPZ else 0
            speed = _samples(name, setting, constants)
            fits = held < paper.DEVICE_BYTES
            shown = (f"{speed:.1f}", f"{speed / zero3:.2f}") if fits else ("out of memory", "")
            rows.append((setting, name if cell == name else f"{name} ({cell})", *shown, f"{held / 1e9:.2f}"))
    notes = (f"{paper.HPZ} is outside the 27 cells: GGG with a second copy of the parameters in each group.",)
    header = ("setting", "strategy", "samples/s", "over ZeRO-3", "GB of states")
    return ResultTable(
        name="throughput",
        title="Throughput and memory, 32 ranks",
        label="modelled, four fitted constants",
        header=header,
        rows=rows,
        notes=notes,
    )


def _samples(name: str, setting: paper.Setting, constants: Constants, *, ranks: int = paper.RANKS, samples: int = 1280) -> float:
    return samples / scenario(name, setting, ranks=ranks, samples=samples).seconds(constants)


def claims_table(constants: Constants) -> ResultTable:
    """R1 to R9 beside ours, with the deviation of the logarithm and the same when the claim is left out of the fit."""
    left_out = leave_one_out()
    rows: list[Row] = []
    missed = []
    for claim in paper.CLAIMS:
        value = predict(claim, constants)
        off = deviation(claim, value)
        inside = abs(off) <= TOLERANCE
        missed += [] if inside else [claim.name]
        what = {
            "ratio": f"{claim.cell} over {claim.baseline}, {claim.ranks} ranks",
            "scaling": f"{claim.cell}, {claim.ranks} to {claim.to_ranks} ranks",
            "scaling_ratio": f"scaling of {claim.cell} over that of {claim.baseline}, {claim.ranks} to {claim.to_ranks} ranks",
        }[claim.kind]
        rows.append(
            (
                claim.name,
                claim.setting,
                what,
                f"{claim.published:.3f}",
                f"{value:.3f}",
                f"{off:+.2f}",
                "yes" if inside else "no",
                f"{left_out[claim.name]:+.2f}",
            )
        )
    header = ("claim", "setting", "what", "published", "modelled", "deviation of ln", f"within {TOLERANCE:g}", "left out of the fit")
    return ResultTable(
        name="claims",
        title="Published claims R1 to R9",
        label="modelled, four fitted constants",
        header=header,
        rows=rows,
        notes=_claim_notes(constants, missed),
    )


def _claim_notes(constants: Constants, missed: Sequence[str]) -> tuple[str, ...]:
    return (
        f"Fitted: efficiency of computation {constants.efficiency:.4f}, latency between groups {constants.latency * 1e6:.0f} us, "
        f"computation of partial training {constants.partial:.3f} and of PEFT {constants.peft:.3f} of full training. "
        "Not fitted: 80 and 2000 Gbit/s, 5 us inside a node, buckets of 5e8 gradients, a global batch of 1280 samples at every size.",
        "Three readings were chosen after the published figures were seen: buckets of 5e8 gradients, R7 as strong scaling, and for R8 a "
        "ZeRO-1 that reduces gradients in every micro-batch. The loss of the fit is shaped around the tolerance: what lies inside costs "
        "next to nothing, what lies far outside no more than a fixed amount. Agreement is therefore weaker evidence than it looks; the "
        "column of claims left out of the fit says more.",
        f"Outside the tolerance: {', '.join(missed) or 'none'}. R7 is read as strong scaling: the batch of larger runs is not published. "
        "R9's text does not say what 0.62 and 0.47 are relative to: bytes and latency alone lose far less from 32 to 64 ranks.",
        "R8 is reached only with a ZeRO-1 that reduces gradients in every micro-batch; one that waits for the last is as fast as NNI.",
        "R11 (tensor parallelism over HO-Ring) and R12 (summary of the others) have no formula here; R14 is a training run.",
    )


def scaling_table(constants: Constants) -> ResultTable:
    """Samples per second of 7B full from 16 to 128 ranks at 1280 samples per step, and the speed-up ratio."""
    rows: list[Row] = []
    published = {claim.cell: claim.published for claim in paper.CLAIMS if claim.kind == "scaling"}
    for name in ("IIG", "NIG", "ZeRO-2", "ZeRO-3"):
        speeds = [_samples(name, paper.FULL_7B, constants, ranks=ranks) for ranks in (16, 32, 64, 128)]
        rows.append((name, *(f"{speed:.1f}" for speed in speeds), f"{speeds[-1] / speeds[0] / 8:.2f}", f"{published[name]:.2f}"))
    header = ("strategy", "16", "32", "64", "128", "speed-up ratio", "published (R7)")
    return ResultTable(
        name="scaling", title="Scaling of 7B full, samples per second", label="modelled, four fitted constants", header=header, rows=rows
    )


def ring_table(constants: Constants) -> ResultTable:
    """All-gather of 1 GB: flat ring against HO-Ring, 16 to 128 ranks."""
    rows: list[Row] = []
    for ranks in (16, 32, 64, 128):
        flat, ho = ring_seconds(ranks, 1e9, constants)
        shown = f"{100 * paper.RING_GAIN[ranks]:.1f} %" if ranks in paper.RING_GAIN else ""
        rows.append((ranks, f"{1000 * flat:.1f}", f"{1000 * ho:.1f}", f"{100 * (1 - ho / flat):.1f} %", shown))
    notes = ("Time saved, 1 - HO / ring. On bandwidth alone it would be 46.7 % at 16 ranks and fall to 5.5 % at 128; the rest is latency.",)
    header = ("ranks", "ring, ms", "HO-Ring, ms", "saved", "published (R10)")
    return ResultTable(
        name="ring", title="All-gather of 1 GB", label="modelled, four fitted constants", header=header, rows=rows, notes=notes
    )


def batch_table(constants: Constants) -> ResultTable:
    """Dynamic batch (R8): NNI over ZeRO-1 at growing batches of 32 ranks."""
    rows: list[Row] = []
    for samples in (1280, 4320, 8640, 17280):
        nni = scenario("NNI", paper.FULL_7B, ranks=32, samples=samples).seconds(constants)
        late, each = (
            scenario("ZeRO-1", paper.FULL_7B, ranks=32, samples=samples, reduce_each=flag).seconds(constants) for flag in (False, True)
        )
        rows.append(
            (
                samples,
                samples // 32,
                f"{100 * (late / nni - 1):+.1f} %",
                f"{100 * (each / nni - 1):+.1f} %",
                "+48.7 %" if samples == 17280 else "",
            )
        )
    header = ("samples", "per rank", "over ZeRO-1 (last micro-batch)", "over ZeRO-1 (every micro-batch)", "published (R8)")
    return ResultTable(
        name="batch", title="NNI over ZeRO-1, 7B full, 32 ranks", label="modelled, four fitted constants", header=header, rows=rows
    )


TABLES: dict[str, Callable[[Constants], ResultTable]] = {
    "cells": cells_table,
    "memory": memory_table,
    "formulas": formulas_table,
    "costs": cost_table,
    "guideline": guideline_table,
    "throughput": throughput_table,
    "claims": claims_table,
    "scaling": scaling_table,
    "ring": ring_table,
    "batch": batch_table,
}


def reproduce(names: Sequence[str] = (), constants: Constants = FITTED) -> list[ResultTable]:
    """The tables of these names, all by default. Raises ValueError for a name that does not exist."""
    if unknown := set(names) - set(TABLES):
        raise ValueError(f"tables={sorted(unknown)} are unknown; choose from {', '.join(TABLES)}.")
    return [make(constants) for name, make in TABLES.items() if name in (names or TABLES)]
