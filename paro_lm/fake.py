"""A run without ranks: mesh, model on the meta device, flat buffers and plan of a world of any size, in one process.

    paro-train experiment=llama_7b cluster=h100_ib runtime.backend=fake runtime.world_size=1024

Buffers are those that the engine makes, so what is printed as held is exact; nothing is allocated and nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paro_lm.build import TIED, ModelPart, build_model, dtypes_of
from paro_lm.config import AUTO_SHARDING, Config, ConfigError
from paro_lm.distributed import launcher_world_size
from paro_lm.finetune import resolve
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import Cell, cell_of_unit
from paro_lm.parallel.units import UnitBuilder
from paro_lm.planner.inventory import vocab_of
from paro_lm.planner.memory import RankMemory
from paro_lm.planner.predict import mesh_of, predict, stage_memories
from paro_lm.planner.report import gb
from paro_lm.planning import choose_cell
from paro_lm.validation import validate


class FakeMesh(ParallelMesh):
    """One rank's view of a mesh whose other ranks do not exist: it has no communicators."""

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        return None

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        return None


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """What every rank of a kind holds: data ranks of one pipeline position, whose tp ranks hold boxes of the same sizes."""

    ranks: list[int]
    part: str
    parameters: int
    states: dict[str, int]
    planned: RankMemory

    @property
    def state_bytes(self) -> int:
        """Bytes between steps, both moments included."""
        return self.states["param"] + self.states["grad"] + self.states["main"] - self.states["shared"] + self.states["moments"]


def rank_kinds(cfg: Config, shape: MeshShape, *, vocab_size: int) -> Iterator[RankKind]:
    """Build the first rank of every pipeline position and tell what all of its kind hold."""
    planned = stage_memories(cfg, shape, vocab_size=vocab_size)
    for pp_rank, memory in enumerate(planned):
        mesh = FakeMesh(shape=shape, rank=pp_rank * shape.dp * shape.tp, device=torch.device("meta"))
        part = build_model(cfg, mesh, vocab_size=vocab_size, ledger=ByteLedger())
        parameters = sum(p.numel() for p in part.module.parameters())
        yield RankKind(
            ranks=mesh.ranks(*DATA_AXES, "tp"),
            part=_part_text(part, cfg.model.num_layers),
            parameters=parameters,
            states=_states(cfg, part, mesh),
            planned=memory,
        )


def _states(cfg: Config, part: ModelPart, mesh: ParallelMesh) -> dict[str, int]:
    default = Cell.parse(cfg.parallel.sharding)
    builder = UnitBuilder(
        model=part.module,
        cell_of=lambda unit: cell_of_unit(unit, default, cfg.parallel.sharding_overrides),
        dtypes=dtypes_of(cfg.precision),
        mesh=mesh,
        specs=part.specs,
        shared=frozenset({TIED}) if cfg.model.tie_embeddings and mesh.size("pp") > 1 else frozenset(),
    )
    stages = builder.build(
        [chunk.units() for chunk in part.chunks], lambda name: torch.empty(part.specs[name].local_shape, device=mesh.device)
    )
    total = Counter({"param": 0, "grad": 0, "main": 0, "shared": 0, "moments": 0})
    for stage in stages:
        for unit in stage.units:
            for buffer in unit.buffers:
                total.update(buffer.state_bytes())
                total["moments"] += 2 * (0 if buffer.main is None else buffer.main.nbytes)
    return dict(total)


def _part_text(part: ModelPart, num_layers: int) -> str:
    layers = sorted(int(name) for chunk in part.chunks for name in chunk.layers)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = ["layers " + ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)] if runs else []
    ends = [0 in part.stages, part.num_stages - 1 in part.stages]
    return " + ".join([*(["embedding"] if ends[0] else []), *shown, *(["head"] if ends[1] else [])])


def describe_world(cfg: Config, console: Console | None = None) -> int:
    """Print what every kind of rank of the config's fake world would hold, and what the planner says; exit code 0.

    Nodes have the ranks that `cluster` says. Raises ValueError as training does, and when no vocabulary is known.
    """
    console = console or Console()
    cluster, world = cfg.cluster, cfg.runtime.world_size or launcher_world_size()
    cfg = resolve(cfg)
    if problems := validate(cfg, world, cluster.ranks_per_node, complete=cfg.epochs is None):
        raise ConfigError(problems)
    vocab = vocab_of(cfg)
    if cfg.parallel.sharding.lower() == AUTO_SHARDING:
        cfg, text = choose_cell(cfg, world, cluster.ranks_per_node, vocab)
        console.print(text, highlight=False)
    shape = mesh_of(cfg, world, cluster.ranks_per_node)
    plan = predict(cfg, world_size=world, local_world_size=cluster.ranks_per_node, vocab_size=vocab)
    console.print(
        f"{cfg.model.name} on {world} ranks that do not exist, nodes of {cluster.ranks_per_node} (cluster={cluster.name}): {shape}, "
        f"{cfg.parallel.sharding}, {cfg.precision.name}, micro-batch {cfg.micro_batch_size} x {plan.layout.accumulation}",
        highlight=False,
    )
    console.print(_table(rank_kinds(cfg, shape, vocab_size=vocab)))
    verdict = "fits" if plan.fits else f"does not fit by {gb(plan.memory.total - plan.budget)} GB"
    console.print(
        f"planned peak {gb(plan.memory.total)} of {gb(plan.budget)} GB: {verdict}; {plan.time.total:.3g} s per step, "
        f"{plan.tokens_per_sec:,.0f} tokens/s predicted. Nothing was trained; paro-plan compares all layouts.",
        highlight=False,
    )
    return 0


def _table(kinds: Iterator[RankKind]) -> Table:
    table = Table(title="What a rank holds, 1e9 bytes", title_justify="left", box=None)
    for name in ("ranks", "part", "M params", "param", "grad", "main", "moments", "states", "planned"):
        is_text = name in ("ranks", "part")
        table.add_column(name, justify="left" if is_text else "right", min_width={"part": 11}.get(name), no_wrap=name != "part")
    for kind in kinds:
        held = [kind.states["param"], kind.states["grad"], kind.states["main"] - kind.states["shared"], kind.states["moments"]]
        ranks = f"{kind.ranks[0]}-{kind.ranks[-1]}" if len(kind.ranks) > 1 else str(kind.ranks[0])
        figures = [*held, kind.state_bytes, kind.planned.total]
        table.add_row(ranks, kind.part, f"{kind.parameters / 1e6:,.1f}", *(f"{value / 1e9:.3f}" for value in figures))
    return table
