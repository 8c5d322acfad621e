"""`paro-plan`: which cell, layout and micro-batch fit a cluster's memory, and which is the fastest, before the cluster is booked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paro_lm.cli import EXIT_OK, Tool, hydra_entry
from paro_lm.config import Config, option
from paro_lm.planner.search import Plan, PlanOptions


@dataclass(frozen=True, kw_only=True)
class PlanToolOptions(PlanOptions):
    """What is compared, and where the result goes."""

    world_size: int | None = option(None, "Ranks of the run; null = all of the cluster.", least=1)
    rows: int = option(5, "Lines of the table of the best.", least=1)
    trace: bool = option(False, "Also simulate a step of the choice (without pipeline stages): trace.json for trace viewers, timeline.png.")
    folder: str | None = option(None, "Folder of plan.csv and plan.png; null = <output_dir>/plan/<model>-<cluster>.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """A run and what a plan for it may choose; the groups are those of a training config."""

    plan: PlanToolOptions = option(PlanToolOptions(), "What is compared, and where the result goes.")


TOOL = Tool(
    name="paro-plan",
    description="rank every cell and layout that a run could have on a cluster; needs neither the cluster nor a GPU.",
    examples=(
        "paro-plan model=llama_7b cluster=a100_roce",
        "paro-plan model=llama_65b cluster=h100_ib cluster.nodes=8 seq_length=4096 global_batch_size=1024",
        "paro-plan model=hf model.init_from=path/of/checkpoint finetune=lora cluster=a100_roce",
        "paro-plan model=llama_7b cluster=a100_roce plan.tp=1 plan.pp=1 plan.budget_gb=20",
    ),
    schema=PlanConfig,
    config_name="plan",
)


def task(cfg: PlanConfig) -> int:
    """Print the tables and write plan.csv and plan.png; exit code 0 also when nothing fits, which the last line says."""
    from rich.console import Console

    from paro_lm.planner.report import plot, print_plan, write_csv
    from paro_lm.planner.search import plan

    if cfg.model.init_from is not None:
        from paro_lm.finetune import resolve_model  # torch comes along

        cfg = resolve_model(cfg)
    world_size = cfg.plan.world_size or cfg.cluster.nodes * cfg.cluster.ranks_per_node
    result = plan(cfg, world_size=world_size, options=cfg.plan)
    print_plan(result, Console(), rows=cfg.plan.rows)
    folder = Path(cfg.plan.folder or Path(cfg.output_dir) / "plan" / f"{cfg.model.name}-{cfg.cluster.name}")
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(result, folder / "plan.csv")
    plot(result, folder / "plan.png")
    print(f"every candidate with all terms: {folder / 'plan.csv'}, memory against speed: {folder / 'plan.png'}")
    if cfg.plan.trace:
        _simulate(result, folder)
    return EXIT_OK


def _simulate(result: Plan, folder: Path) -> None:
    """The timeline of the choice, event by event."""
    from paro_lm.planner.candidates import evaluator_of
    from paro_lm.planner.inventory import vocab_of
    from paro_lm.planner.simulate import plot_timeline, simulate_step, write_trace

    chosen = result.mixed or result.best
    if chosen is None or chosen.layout.shape.pp > 1:
        raise ValueError("plan.trace=true: there is no choice without pipeline stages to simulate; add plan.pp=1, or change the budget.")
    evaluator = evaluator_of(result.cfg, chosen.layout, vocab_of(result.cfg))
    work, cells = evaluator.unit_work(chosen)
    seconds, events = simulate_step(work, cells, evaluator.costs, accumulation=chosen.layout.accumulation, optimizer=chosen.time.optimizer)
    write_trace(events, folder / "trace.json")
    plot_timeline(events, folder / "timeline.png", title=f"{result.cfg.model.name}, {chosen.cell}: one step, simulated")
    print(f"simulated {seconds:.4g} s, formula {chosen.time.total:.4g} s: {folder / 'trace.json'}, {folder / 'timeline.png'}")


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
