"""What a run asks the planner: its own figures, the cell that `parallel.sharding=auto` stands for, and what to do when memory is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paro_lm.config import Config
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.sharding import Cell, cell_of_unit
from paro_lm.planner.candidates import Candidate, Evaluator, Layout, evaluator_of
from paro_lm.planner.inventory import Trainable, rank_profiles, vocab_of
from paro_lm.planner.memory import RankMemory
from paro_lm.planner.report import gb, reason
from paro_lm.planner.search import Plan, PlanOptions, memory_budget, plan


def mesh_of(cfg: Config, world_size: int, local_world_size: int | None = None) -> MeshShape:
    """The mesh that training builds for this config. Raises ValueError where it does."""
    parallel = cfg.parallel
    return MeshShape.build(
        world_size=world_size, tp=parallel.tp, pp=parallel.pp, group_size=parallel.group_size, local_world_size=local_world_size
    )


def layout_of(cfg: Config, shape: MeshShape) -> Layout:
    """The config's layout on a mesh."""
    return Layout(
        shape=shape,
        micro_batch_size=cfg.micro_batch_size,
        accumulation=cfg.global_batch_size // (cfg.micro_batch_size * shape.dp),
        checkpointing=cfg.parallel.activation_checkpointing,
        sequence_parallel=cfg.parallel.sequence_parallel,
    )


def predict(
    cfg: Config,
    *,
    world_size: int,
    local_world_size: int | None = None,
    vocab_size: int | None = None,
    is_trainable: Trainable | None = None,
) -> Candidate:
    """Memory and time of the config as it stands, with the cells of single units; `cfg.cluster` has the machines."""
    cfg = _on_nodes_of(cfg, local_world_size)
    evaluator = evaluator_of(cfg, layout_of(cfg, mesh_of(cfg, world_size, local_world_size)), vocab_of(cfg, vocab_size), is_trainable)
    default = Cell.parse(cfg.parallel.sharding)
    stages = [(pp_rank, [unit for profile in profiles for unit in profile.expand()]) for pp_rank, profiles in evaluator.stages]
    named = {unit.name: cell_of_unit(unit.name, default, cfg.parallel.sharding_overrides) for _, units in stages for unit in units}
    expanded = Evaluator(cfg, evaluator.layout, evaluator.costs, evaluator.vocab, stages)
    cells = [[named[unit.name] for unit in units] for _, units in stages]
    return Candidate(
        cell=default,
        layout=evaluator.layout,
        memory=max(
            (expanded.stage_memory(each, pp_rank, units) for each, (pp_rank, units) in zip(cells, stages, strict=True)),
            key=lambda memory: memory.total,
        ),
        budget=memory_budget(cfg.cluster, PlanOptions()),
        time=max((expanded.stage_time(each, work) for each, work in zip(cells, expanded.work, strict=True)), key=lambda time: time.total),
        tokens=cfg.global_batch_size * cfg.seq_length,
        unit_cells={name: cell for name, cell in named.items() if cell != default},
    )


def stage_memories(
    cfg: Config, shape: MeshShape, *, vocab_size: int | None = None, is_trainable: Trainable | None = None
) -> list[RankMemory]:
    """Predicted peak of every kind of rank: one per pipeline position (all data and tensor ranks of it hold the same)."""
    vocab, default = vocab_of(cfg, vocab_size), Cell.parse(cfg.parallel.sharding)
    evaluator = evaluator_of(cfg, layout_of(cfg, shape), vocab, is_trainable)
    result = []
    for pp_rank in range(shape.pp):
        profiles = rank_profiles(cfg, shape, pp_rank=pp_rank, vocab_size=vocab, is_trainable=is_trainable)
        units = [unit for profile in profiles for unit in profile.expand()]
        cells = [cell_of_unit(unit.name, default, cfg.parallel.sharding_overrides) for unit in units]
        result.append(evaluator.stage_memory(cells, pp_rank, units))
    return result


def choose(
    cfg: Config,
    *,
    world_size: int,
    local_world_size: int | None = None,
    vocab_size: int | None = None,
    budget_gb: float | None = None,
    is_trainable: Trainable | None = None,
) -> Plan:
    """The plan in which only the cell is open: everything else is as the config says. What `parallel.sharding=auto` asks.

    `budget_gb` is the memory of the device at hand in 1e9 bytes, less what is not for tensors; None takes the cluster's.
    """
    parallel = cfg.parallel
    options = PlanOptions(
        group_size=[mesh_of(cfg, world_size, local_world_size).dp_intra],
        tp=[parallel.tp],
        pp=[parallel.pp],
        micro_batch_size=[cfg.micro_batch_size],
        activation_checkpointing=[parallel.activation_checkpointing],
        budget_gb=budget_gb,
        mixed=False,
    )
    return plan(
        cfg, world_size=world_size, local_world_size=local_world_size, vocab_size=vocab_size, options=options, is_trainable=is_trainable
    )


def out_of_memory_text(
    cfg: Config,
    *,
    world_size: int,
    actual: Mapping[str, float],
    local_world_size: int | None = None,
    vocab_size: int | None = None,
    is_trainable: Trainable | None = None,
) -> str:
    """What to say when an allocation failed: planned against actual bytes, and the next cells that need less, with their cost.

    `actual` are bytes by name (the plan's own terms where they are known, `total` at least).
    """
    asked = predict(cfg, world_size=world_size, local_world_size=local_world_size, vocab_size=vocab_size, is_trainable=is_trainable)
    planned = asked.memory.terms() | {"states": asked.memory.states, "total": asked.memory.total}
    lines = [f"out of memory with parallel.sharding={asked.cell}; bytes per rank, 1e9:"]
    lines += [
        f"  {name:<12} planned {planned[name] / 1e9:8.2f}" + (f"  actual {actual[name] / 1e9:8.2f}" if name in actual else "")
        for name in planned
        if planned[name] or name in actual
    ]
    others = choose(
        _uniform(cfg), world_size=world_size, local_world_size=local_world_size, vocab_size=vocab_size, is_trainable=is_trainable
    ).candidates
    lighter = sorted((c for c in others if c.memory.total < 0.99 * asked.memory.total), key=lambda c: c.time.total)[:3]
    for candidate in lighter:
        slower = 100 * (candidate.time.total / asked.time.total - 1)
        lines.append(f"  parallel.sharding={candidate.cell} needs {gb(candidate.memory.total)}, {slower:+.1f} % time per step")
    if not lighter:
        lines.append("  no other cell needs less")
    lines.append("  also: a smaller micro_batch_size, parallel.activation_checkpointing=selective or full, more ranks")
    return "\n".join(lines)


def choice_text(result: Plan) -> str:
    """The line that a run with `sharding=auto` logs. Raises ValueError when nothing fits, with what is missing."""
    best = result.best
    if best is None:
        lightest = min(result.candidates, key=lambda candidate: candidate.memory.total)
        raise ValueError(
            f"parallel.sharding=auto: no cell fits the {gb(lightest.budget)} GB of a rank, the lightest, {lightest.cell}, needs "
            f"{gb(lightest.memory.total)}; use a smaller micro_batch_size, parallel.activation_checkpointing=full, or more ranks."
        )
    others = [candidate for candidate in result.candidates if candidate.fits][1:3]
    rest = "; ".join(f"{candidate.cell} {reason(candidate, best)}" for candidate in others)
    return (
        f"parallel.sharding=auto chose {best.cell}: {gb(best.memory.total)} of {gb(best.budget)} GB, "
        f"{best.time.total:.3g} s per step predicted for cluster={result.cfg.cluster.name}" + (f"; {rest}" if rest else "")
    )


def _uniform(cfg: Config) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, sharding_overrides={}))


def _on_nodes_of(cfg: Config, local_world_size: int | None) -> Config:
    if local_world_size is None:
        return cfg
    return replace(cfg, cluster=replace(cfg.cluster, ranks_per_node=local_world_size))
