"""A plan for people: the reasons in words, tables for the terminal, CSV with every term, and the picture of memory against speed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paro_lm.model.flops import model_flops
from paro_lm.planner.candidates import Candidate
from paro_lm.planner.inventory import vocab_of
from paro_lm.planner.search import Plan

TERM_NAMES = {
    "compute": "computation", "recompute": "recomputation", "tp": "tensor parallelism", "p2p": "messages between stages",
    "param": "gathers of parameters", "gradient": "reductions of micro-batches", "sync_g": "last reduction of gradients",
    "sync_p": "sending updated parameters", "optimizer": "optimizer", "control": "small messages", "bubble": "pipeline bubble",
}  # fmt: skip


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def layout_text(candidate: Candidate) -> str:
    """`groups of 8, micro-batch 4 x 10, full checkpointing`, with tp and pp where they are used."""
    layout = candidate.layout
    parts = [f"groups of {layout.shape.dp_intra}"]
    parts += [f"{axis} {size}" for axis, size in (("tp", layout.shape.tp), ("pp", layout.shape.pp)) if size > 1]
    parts.append(f"micro-batch {layout.micro_batch_size} x {layout.accumulation}")
    if layout.checkpointing != "none":
        parts.append(f"{layout.checkpointing} checkpointing")
    return ", ".join(parts)


def reason(candidate: Candidate, best: Candidate) -> str:
    """Why a candidate is not the first choice: out of memory by how much, or slower by what."""
    if not candidate.fits:
        terms = candidate.memory.terms()
        largest = max(terms, key=lambda name: terms[name])
        return f"out of memory by {gb(candidate.memory.total - candidate.budget)} GB ({largest} {gb(terms[largest])})"
    if candidate is best:
        return "first choice"
    ours, theirs = candidate.time.terms(), best.time.terms()
    more = sorted(((ours[name] - theirs[name], name) for name in TERM_NAMES), reverse=True)
    shown = [f"{TERM_NAMES[name]} +{seconds:.3g} s" for seconds, name in more[:2] if seconds > 0.005 * best.time.total]
    saved = best.memory.total - candidate.memory.total
    lighter = f"; {gb(saved)} GB lighter" if saved > 0.05e9 else ""
    slower = 100 * (candidate.time.total / best.time.total - 1)
    return f"{slower:.1f} % slower" + (f" ({', '.join(shown)})" if shown else "") + lighter


def sentence(plan: Plan) -> str:
    """The first choice, in a sentence; or that nothing fits, and what is missing."""
    best = plan.best
    if best is None:
        lightest = min(plan.candidates, key=lambda candidate: candidate.memory.total)
        return (
            f"Nothing fits: the lightest candidate, {lightest.cell} with {layout_text(lightest)}, needs {gb(lightest.memory.total)} GB "
            f"of the {gb(lightest.budget)} GB a rank has; use more ranks, shorter sequences or more checkpointing."
        )
    text = (
        f"{best.cell} with {layout_text(best)}: {best.time.total:.3g} s per step, {best.tokens_per_sec:,.0f} tokens/s, "
        f"{gb(best.memory.total)} of {gb(best.budget)} GB per rank"
    )
    others = [candidate for candidate in plan.best_per_cell() if candidate.fits and candidate.cell != best.cell]
    if not others:
        return text + "; no other cell fits."
    return text + f"; the next cell, {others[0].cell}, is {reason(others[0], best)}."


def mixed_sentence(plan: Plan) -> str | None:
    """What a cell per unit gains over the best uniform one; None without a mixed plan."""
    if plan.mixed is None or plan.best is None:
        return None
    mixed, counts = plan.mixed, _counts(plan)
    gain = 100 * (plan.best.time.total / mixed.time.total - 1)
    return (
        f"Mixed plan: {', '.join(f'{count} x {cell}' for cell, count in counts.items())} units: {mixed.time.total:.4g} s per step, "
        f"{gain:.2f} % faster than {plan.best.cell} alone, {gb(mixed.memory.total)} of {gb(mixed.budget)} GB."
    )


def _counts(plan: Plan) -> dict[str, int]:
    assert plan.mixed is not None
    counts: dict[str, int] = {}
    for cell in plan.mixed.unit_cells.values():
        counts[str(cell)] = counts.get(str(cell), 0) + 1
    units = plan.cfg.model.num_layers + 2
    return {str(plan.mixed.cell): units - sum(counts.values())} | counts


def mfu(plan: Plan, candidate: Candidate) -> float:
    """Model FLOPs of a step over the peak of all ranks, 0..1."""
    cfg = plan.cfg
    flops = model_flops(cfg.model, vocab_size=vocab_of(cfg), seq_length=cfg.seq_length, num_samples=cfg.global_batch_size)
    return flops / candidate.time.total / plan.world_size / (cfg.cluster.peak_tflops * 1e12)


def print_plan(plan: Plan, console: Console, *, rows: int = 5) -> None:
    """The best candidate of every cell with its reason, the `rows` best of all, and all terms of the first choice."""
    cfg = plan.cfg
    title = f"{cfg.model.name} on {plan.world_size} ranks of {cfg.cluster.name}, {cfg.global_batch_size} x {cfg.seq_length} tokens per step"
    reference = plan.best or plan.candidates[0]
    console.print(_table(f"{title}: the best of every cell", plan, plan.best_per_cell(), reference))
    if plan.best is not None:
        console.print(_table("The best of all", plan, [c for c in plan.candidates if c.fits][:rows], plan.best))
        console.print(_terms(plan.best, "First choice"))
    console.print(sentence(plan))
    if (text := mixed_sentence(plan)) is not None:
        console.print(text)
    chosen = plan.mixed or plan.best
    if chosen is not None:
        console.print("paro-train " + " ".join(chosen.overrides()), soft_wrap=True, highlight=False)


def _table(title: str, plan: Plan, candidates: Sequence[Candidate], best: Candidate) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("cell", "layout", "GB", "s/step", "tokens/s", "MFU", "why"):
        table.add_column(name, justify="left" if name in ("cell", "layout", "why") else "right", overflow="fold")
    for candidate in candidates:
        speed = (
            (f"{candidate.time.total:.3g}", f"{candidate.tokens_per_sec:,.0f}", f"{100 * mfu(plan, candidate):.1f} %")
            if candidate.fits
            else ("-", "-", "-")
        )
        table.add_row(str(candidate.cell), layout_text(candidate), gb(candidate.memory.total), *speed, reason(candidate, best))
    return table


def _terms(candidate: Candidate, title: str) -> Table:
    table = Table(title=f"{title}: {candidate.cell}, term by term", title_justify="left")
    for name in ("memory", "GB", "time", "s"):
        table.add_column(name, justify="left" if name in ("memory", "time") else "right")
    memory = [*candidate.memory.terms().items(), ("total", candidate.memory.total)]
    seconds = [*candidate.time.terms().items(), ("total", candidate.time.total)]
    for index in range(max(len(memory), len(seconds))):
        left = (memory[index][0], f"{memory[index][1] / 1e9:.2f}") if index < len(memory) else ("", "")
        right = (seconds[index][0], f"{seconds[index][1]:.4f}") if index < len(seconds) else ("", "")
        table.add_row(*left, *right)
    return table


def write_csv(plan: Plan, path: Path) -> None:
    """One line per candidate, the mixed plan last: layout, figures and every term (bytes, seconds)."""
    candidates = [*plan.candidates, *([plan.mixed] if plan.mixed else [])]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        first = candidates[0]
        writer.writerow(
            [
                "cell",
                "mixed_units",
                "group_size",
                "tp",
                "pp",
                "micro_batch_size",
                "accumulation",
                "checkpointing",
                "fits",
                "seconds",
                "tokens_per_sec",
            ]
            + [f"bytes_{name}" for name in first.memory.terms()]
            + ["bytes_total"]
            + [f"seconds_{name}" for name in first.time.terms()]
        )
        for c in candidates:
            shape, units = c.layout.shape, " ".join(f"{name}:{cell}" for name, cell in c.unit_cells.items())
            head = [
                c.cell,
                units,
                shape.dp_intra,
                shape.tp,
                shape.pp,
                c.layout.micro_batch_size,
                c.layout.accumulation,
                c.layout.checkpointing,
            ]
            figures = [c.fits, c.time.total, c.tokens_per_sec, *c.memory.terms().values(), c.memory.total, *c.time.terms().values()]
            writer.writerow([*map(str, head), *figures])


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other candidate beats in both memory and speed, the lightest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.memory.total, c.time.total)):
        if not front or candidate.time.total < front[-1].time.total:
            front.append(candidate)
    return front


def plot(plan: Plan, path: Path) -> None:
    """Memory against throughput: every candidate, the best of every cell by name, the Pareto front, the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    fits = [candidate for candidate in plan.candidates if candidate.fits]
    named = plan.best_per_cell()
    limit = max(candidate.memory.total for candidate in named) * 1.05
    shown = [candidate for candidate in plan.candidates if candidate.memory.total <= limit]
    axes.scatter(*_points([c for c in shown if not c.fits]), s=8, color="0.8", label="does not fit")
    axes.scatter(*_points(fits), s=8, color="tab:blue", alpha=0.4, label="fits")
    front = pareto(plan.candidates)
    axes.plot(*_points(front), color="tab:red", linewidth=1, drawstyle="steps-post", label="Pareto front")
    for candidate in named:
        (x,), (y,) = _points([candidate])
        axes.annotate(str(candidate.cell), (x, y), fontsize=8, xytext=(3, 3), textcoords="offset points")
    if plan.mixed is not None:
        axes.scatter(*_points([plan.mixed]), marker="*", s=140, color="tab:orange", label="mixed plan", zorder=3)
    axes.axvline(plan.candidates[0].budget / 1e9, color="black", linestyle=":", linewidth=1, label="budget")
    axes.set(
        xlabel="peak memory per rank, GB", ylabel="tokens per second", title=f"{plan.cfg.model.name} on {plan.cfg.cluster.name} (modelled)"
    )
    axes.set_xlim(0, limit / 1e9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [c.memory.total / 1e9 for c in candidates], [c.tokens_per_sec for c in candidates]
