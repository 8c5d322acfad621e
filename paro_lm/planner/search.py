"""The planner: every layout and cell that a run could have on a cluster, with its memory and time, ranked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paro_lm.config import ClusterConfig, Config, option
from paro_lm.model.sizes import ModelSizes
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.parallel.stages import num_stages
from paro_lm.planner.candidates import Candidate, Evaluator, Layout, evaluator_of, stage_costs, stages_of
from paro_lm.planner.inventory import Trainable, vocab_of
from paro_lm.planner.mixed import best_mixed

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan may choose from; an empty list is everything that is possible."""

    cells: list[str] = option([], "Cells to compare; empty = the 14 kept ones.")
    group_size: list[int] = option([], "Group sizes; empty = those that nodes divide or that are made of whole nodes.")
    tp: list[int] = option(
        [], "Tensor-parallel sizes, also of several whole nodes; empty = every power of two that the model allows inside one."
    )
    pp: list[int] = option([], "Pipeline stages; empty = every power of two up to 16 that leaves each stage a block.")
    micro_batch_size: list[int] = option([], "Micro-batches; empty = every power of two up to 16 that divides the batch.")
    activation_checkpointing: list[str] = option([], "Kinds to choose from, the fastest that fits; empty = none, selective, full.")
    budget_gb: float | None = option(None, "Bytes that a rank may fill, 1e9; null = what the cluster's devices have.", above=0)
    mixed: bool = option(True, "Also look for a cell per unit that fills the budget.")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates, those that fit first and the fastest first; `mixed` beats the best uniform one, or is None."""

    cfg: Config
    world_size: int
    candidates: list[Candidate]
    mixed: Candidate | None = None

    @property
    def best(self) -> Candidate | None:
        """The fastest uniform candidate that fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None

    def best_per_cell(self) -> list[Candidate]:
        """The best candidate of every cell, in rank order."""
        seen: dict[Cell, Candidate] = {}
        for candidate in self.candidates:
            seen.setdefault(candidate.cell, candidate)
        return list(seen.values())


def plan(
    cfg: Config,
    *,
    world_size: int,
    local_world_size: int | None = None,
    vocab_size: int | None = None,
    options: PlanOptions | None = None,
    is_trainable: Trainable | None = None,
) -> Plan:
    """Rank every candidate for `cfg` on `world_size` ranks of `cfg.cluster`; needs neither ranks nor devices.

    `local_world_size` replaces the cluster's ranks per node. Raises ValueError when no layout divides world and batch.
    """
    options = options or PlanOptions()
    cluster = cfg.cluster if local_world_size is None else replace(cfg.cluster, ranks_per_node=local_world_size)
    vocab, budget = vocab_of(cfg, vocab_size), memory_budget(cluster, options)
    wanted = options.activation_checkpointing or CHECKPOINTING
    if unknown := set(wanted) - set(CHECKPOINTING):
        raise ValueError(f"plan.activation_checkpointing={sorted(unknown)} is unknown; choose from {', '.join(CHECKPOINTING)}.")
    modes = [mode for mode in CHECKPOINTING if mode in wanted]
    found = [
        _lightest_that_fits(evaluators, cell, budget)
        for evaluators in _layouts(cfg, cluster, world_size, vocab, options, modes, is_trainable)
        for cell in _distinct_cells(evaluators[0].layout.shape, options)
    ]
    if not found:
        raise ValueError(
            f"global_batch_size={cfg.global_batch_size} on {world_size} ranks: no tp, pp and micro-batch divide it among the ranks; "
            f"use a multiple of {world_size}, or other plan.tp, plan.pp and plan.micro_batch_size."
        )
    found.sort(
        key=lambda c: (not c.fits, c.time.total if c.fits else c.memory.total, abs(c.layout.shape.dp_intra - cluster.ranks_per_node))
    )
    result = Plan(cfg=replace(cfg, cluster=cluster), world_size=world_size, candidates=_unrepeated(found))
    if not options.mixed or result.best is None:
        return result
    layouts = [replace(result.best.layout, checkpointing=mode) for mode in modes]
    evaluators = [evaluator_of(result.cfg, layout, vocab, is_trainable) for layout in layouts]
    return replace(result, mixed=best_mixed(evaluators, result.best, budget))


def memory_budget(cluster: ClusterConfig, options: PlanOptions) -> float:
    """Bytes of tensors that a rank may hold."""
    return options.budget_gb * 1e9 if options.budget_gb else (cluster.memory_gb - cluster.reserved_gb) * 1e9


def _layouts(
    cfg: Config, cluster: ClusterConfig, world: int, vocab: int, options: PlanOptions, modes: list[str], is_trainable: Trainable | None
) -> Iterator[list[Evaluator]]:
    """Per mesh and micro-batch the evaluators of all kinds of checkpointing, the fastest first."""
    for tp in _tensor_sizes(cfg, cluster, world, vocab, options):
        for pp in _stage_counts(cfg, world, tp, options):
            dp = world // (tp * pp)
            for group in _group_sizes(cluster, dp, tp, options):
                shape = MeshShape(pp=pp, dp_inter=dp // group, dp_intra=group, tp=tp)
                costs = stage_costs(cfg, cluster, shape)
                stages = stages_of(cfg, shape, vocab, is_trainable)
                for micro in _micro_batches(cfg, dp, pp, options):
                    yield [
                        Evaluator(
                            cfg,
                            Layout(
                                shape=shape,
                                micro_batch_size=micro,
                                accumulation=cfg.global_batch_size // (micro * dp),
                                checkpointing=mode,
                                sequence_parallel=_sequence_parallel(cfg, tp),
                            ),
                            costs,
                            vocab,
                            stages,
                        )
                        for mode in modes
                    ]


def _sequence_parallel(cfg: Config, tp: int) -> bool:
    """As the config says for its own tp; else wherever it is possible, since it only saves."""
    return cfg.parallel.sequence_parallel if tp == cfg.parallel.tp else cfg.seq_length % tp == 0


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(max(1, limit).bit_length())]


def _tensor_sizes(cfg: Config, cluster: ClusterConfig, world: int, vocab: int, options: PlanOptions) -> list[int]:
    sizes = ModelSizes.of(cfg.model, vocab)
    grouped, group_size = cfg.parallel.tp_collectives != "native", cfg.parallel.tp_group_size or 1

    def possible(tp: int) -> bool:
        if grouped and (tp == 1 or tp % group_size):  # the config would refuse them
            return False
        heads = sizes.num_heads % tp == 0 and (sizes.num_kv_heads % tp == 0 or tp % sizes.num_kv_heads == 0)
        nodes = cluster.ranks_per_node % tp == 0 or tp % cluster.ranks_per_node == 0
        return heads and sizes.ffn_size % tp == 0 and sizes.padded_vocab % tp == 0 and nodes and world % tp == 0

    return [tp for tp in options.tp or _powers(cluster.ranks_per_node) if possible(tp)]


def _stage_counts(cfg: Config, world: int, tp: int, options: PlanOptions) -> list[int]:
    parallel = cfg.parallel

    def possible(pp: int) -> bool:
        count = num_stages(parallel.schedule, pp, parallel.virtual_stages) if pp > 1 else 1
        return count <= cfg.model.num_layers and world % (tp * pp) == 0

    return [pp for pp in options.pp or _powers(16) if possible(pp)]


def _group_sizes(cluster: ClusterConfig, dp: int, tp: int, options: PlanOptions) -> list[int]:
    """Groups that are a part of a node or several whole nodes; one that spans all ranks only where no other exists."""
    node = max(1, cluster.ranks_per_node // tp)
    sizes = options.group_size or [size for size in range(2, dp) if node % size == 0 or size % node == 0] or [dp]
    return [size for size in sizes if dp % size == 0]


def _micro_batches(cfg: Config, dp: int, pp: int, options: PlanOptions) -> list[int]:
    sizes = options.micro_batch_size or _powers(16)
    return [size for size in sizes if cfg.global_batch_size % (size * dp) == 0 and (pp == 1 or cfg.global_batch_size // (size * dp) >= pp)]


def _distinct_cells(shape: MeshShape, options: PlanOptions) -> list[Cell]:
    """Cells whose placements differ on this mesh: with one group, or groups of one, two letters mean the same."""
    wanted = [Cell.parse(cell) for cell in options.cells] or list(KEPT_CELLS)
    seen: dict[tuple[int, ...], Cell] = {}
    for cell in wanted:
        seen.setdefault(tuple(shape.size(*placement) for placement in (cell.param, cell.grad, cell.main)), cell)
    return list(seen.values())


def _lightest_that_fits(evaluators: list[Evaluator], cell: Cell, budget: float) -> Candidate:
    """The first kind of checkpointing that fits (they are in order of speed); the last one when none does."""
    for evaluator in evaluators[:-1]:
        memory = evaluator.memory(cell)
        if memory.total <= budget:
            return evaluator.candidate(cell, budget, memory=memory)
    return evaluators[-1].candidate(cell, budget)


def _unrepeated(candidates: list[Candidate]) -> list[Candidate]:
    """Without candidates that differ in their group size only and not in their figures (cells without I, flat rings)."""
    seen, result = set(), []
    for candidate in candidates:
        layout = candidate.layout
        key = (candidate.cell, layout.shape.tp, layout.shape.pp, layout.micro_batch_size, layout.checkpointing)
        figures = (*key, round(math.log(candidate.time.total), 9), candidate.memory.total)
        if figures not in seen:
            seen.add(figures)
            result.append(candidate)
    return result
