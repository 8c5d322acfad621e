"""One way to run: its layout and cells, and what memory and time the model gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paro_lm.config import ClusterConfig, Config
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.sharding import Cell
from paro_lm.planner.activations import Activations, in_flight
from paro_lm.planner.inventory import Trainable, UnitProfile, element_bytes, rank_profiles
from paro_lm.planner.links import Links
from paro_lm.planner.memory import RankMemory, rank_memory
from paro_lm.planner.timing import StageCosts, StepTime, UnitWork, stage_time
from paro_lm.planner.workload import Batch, batch_activations, optimizer_seconds, stage_work, with_sizes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything of a candidate but its cells."""

    shape: MeshShape
    micro_batch_size: int
    accumulation: int
    checkpointing: str
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run, with its predicted peak memory per rank (of the fullest stage) and step time (of the slowest).

    `unit_cells` names the units whose cell is not `cell` (mixed plans).
    """

    cell: Cell
    layout: Layout
    memory: RankMemory
    budget: float
    time: StepTime
    tokens: int
    unit_cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget

    @property
    def tokens_per_sec(self) -> float:
        return self.tokens / self.time.total

    def overrides(self) -> list[str]:
        """The options of `paro-train` that run this candidate."""
        layout, shape = self.layout, self.layout.shape
        result = [
            f"parallel.sharding={self.cell}", f"parallel.group_size={shape.dp_intra}", f"parallel.tp={shape.tp}", f"parallel.pp={shape.pp}",
            f"micro_batch_size={layout.micro_batch_size}", f"parallel.activation_checkpointing={layout.checkpointing}",
        ]  # fmt: skip
        if layout.sequence_parallel:
            result.append("parallel.sequence_parallel=true")
        if self.unit_cells:
            result.append("parallel.sharding_overrides={" + ",".join(f"{name}:{cell}" for name, cell in self.unit_cells.items()) + "}")
        return result


class Evaluator:
    """Memory and time of cells under one layout; what does not depend on the cells is computed once."""

    def __init__(self, cfg: Config, layout: Layout, costs: StageCosts, vocab: int, stages: list[tuple[int, list[UnitProfile]]]) -> None:
        self.cfg, self.layout, self.costs, self.stages = cfg, layout, costs, stages
        self.links, self.element = costs.links, costs.element
        self.batch = Batch(
            micro_batch_size=layout.micro_batch_size,
            seq_length=cfg.seq_length,
            checkpointing=layout.checkpointing,
            sequence_parallel=layout.sequence_parallel,
        )
        self.held: Activations = batch_activations(cfg.model, self.batch, vocab_size=vocab, width=self.element.param, tp=layout.shape.tp)
        self.vocab = vocab
        self._work: list[list[UnitWork]] | None = None

    @property
    def work(self) -> list[list[UnitWork]]:
        if self._work is None:
            self._work = [
                with_sizes(
                    stage_work(self.cfg.model, profiles, self.batch, self.links, self.element, vocab_size=self.vocab),
                    profiles,
                    self.layout.shape.dp,
                )
                for _, profiles in self.stages
            ]
        return self._work

    def memory(self, cells: Sequence[Cell] | Cell, profiles: list[UnitProfile] | None = None) -> RankMemory:
        """Peak of the fullest stage."""
        return max((self.stage_memory(cells, stage, profiles or own) for stage, own in self.stages), key=lambda memory: memory.total)

    def stage_memory(self, cells: Sequence[Cell] | Cell, stage: int, profiles: list[UnitProfile]) -> RankMemory:
        """Peak of a rank at pipeline position `stage` that holds `profiles`."""
        parallel = self.cfg.parallel
        held = in_flight(
            parallel.schedule,
            stages=self.layout.shape.pp,
            stage=stage,
            num_micro_batches=self.layout.accumulation,
            virtual_stages=parallel.virtual_stages,
        )
        return rank_memory(
            profiles,
            [cells] * len(profiles) if isinstance(cells, Cell) else cells,
            self.layout.shape,
            self.element,
            self.held,
            micro_batches_held=held,
            overlap=parallel.overlap,
            scratch=self.links.cluster.backend == "gloo" and parallel.collectives != "native",
        )

    def time(self, cells: Sequence[Cell] | Cell, work: list[UnitWork] | None = None) -> StepTime:
        """Step of the slowest stage."""
        return max((self.stage_time(cells, work or own) for own in self.work), key=lambda time: time.total)

    def stage_time(self, cells: Sequence[Cell] | Cell, work: list[UnitWork]) -> StepTime:
        """Step of the rank that does `work`."""
        each = [cells] * len(work) if isinstance(cells, Cell) else list(cells)
        width = self.element.param * self.batch.tokens * self.cfg.model.hidden_size
        shards = self.layout.shape.tp if self.layout.sequence_parallel else 1
        return stage_time(
            work,
            each,
            self.costs,
            accumulation=self.layout.accumulation,
            optimizer=optimizer_seconds(work, each, self.links, self.element),
            p2p=self.links.point_to_point(width / shards),
            virtual_stages=self.cfg.parallel.virtual_stages,
        )

    def unit_work(self, candidate: Candidate) -> tuple[list[UnitWork], list[Cell]]:
        """Every unit of the first stage by its own name, with its cell in a candidate of this layout."""
        (_, profiles), *_ = self.stages
        names = [unit.name for profile in profiles for unit in profile.expand()]
        each = [unit for unit in self.work[0] for _ in range(unit.count)]
        work = [replace(unit, name=name, count=1) for unit, name in zip(each, names, strict=True)]
        return work, [candidate.unit_cells.get(name, candidate.cell) for name in names]

    def candidate(self, cell: Cell, budget: float, *, memory: RankMemory | None = None) -> Candidate:
        """The uniform candidate of a cell."""
        return Candidate(
            cell=cell,
            layout=self.layout,
            memory=memory or self.memory(cell),
            budget=budget,
            time=self.time(cell),
            tokens=self.cfg.global_batch_size * self.cfg.seq_length,
        )


def evaluator_of(cfg: Config, layout: Layout, vocab: int, is_trainable: Trainable | None = None) -> Evaluator:
    """The evaluator of one layout."""
    return Evaluator(cfg, layout, stage_costs(cfg, cfg.cluster, layout.shape), vocab, stages_of(cfg, layout.shape, vocab, is_trainable))


def stage_costs(cfg: Config, cluster: ClusterConfig, shape: MeshShape) -> StageCosts:
    parallel = cfg.parallel
    links = Links(
        cluster,
        shape,
        collectives=parallel.collectives,
        tp_collectives=parallel.tp_collectives,
        tp_group_size=parallel.tp_group_size,
    )
    return StageCosts(links, element_bytes(cfg))


def stages_of(cfg: Config, shape: MeshShape, vocab: int, is_trainable: Trainable | None) -> list[tuple[int, list[UnitProfile]]]:
    """First, second and last pipeline rank: those between are like the second."""
    return [
        (pp_rank, rank_profiles(cfg, shape, pp_rank=pp_rank, vocab_size=vocab, is_trainable=is_trainable))
        for pp_rank in sorted({0, min(1, shape.pp - 1), shape.pp - 1})
    ]
