"""The paper's comparisons for real: training steps of cells against the cells of its baselines, and HO-Ring against a flat ring.

On devices the models, batches and trained parts are the paper's (`experiment=paper/...`); on the CPU a model of 8 M parameters stands
for 7B and one of 15 M with activation checkpointing for 65B, so that ratios, not seconds, are what is compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paro_lm import distributed
from paro_lm.cli import load
from paro_lm.config import ClusterConfig, Config, RuntimeConfig
from paro_lm.distributed import World
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.planner import published as paper
from paro_lm.planner.paper import FITTED
from paro_lm.planner.paper import predict as modelled
from paro_lm.planner.predict import predict
from paro_lm.planner.reproduction import ResultTable, Row
from paro_lm.tools.measure import TakingTurns, Timing, interval, read_timings, synthetic_data, take_turns, timing_overrides, write_timings

RATIOS = tuple(claim for claim in paper.CLAIMS if claim.kind == "ratio")
RINGS = ("ring", "ho_ring")
WIDTHS = ("model.hidden_size=256", "model.num_heads=4", "model.ffn_size=682", "model.vocab_size=4096")
SMALL = (*WIDTHS, "seq_length=128", "micro_batch_size=1", "precision=fp32")
SMALL_LAYERS = {"7B": 8, "65B": 16}
SMALL_RING_BYTES, RING_BYTES = 1 << 24, 1_000_000_000

Runs = dict["Group", dict[str, Config]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that take turns: one setting and batch, and every cell that a claim needs of it."""

    setting: paper.Setting
    samples: int
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.setting}, {self.samples}"

    def accumulation(self, *, small: bool) -> int:
        """Micro-batches of a step: the paper's on 32 ranks, whatever their number is here; fewer for small models."""
        published = self.samples // (paper.MICRO_BATCH * paper.RANKS)
        if not small:
            return published
        return 2 if published <= paper.ACCUMULATION else 16

    def config(self, cell: str, world_size: int, folder: Path, data: Path, cluster: ClusterConfig, *, small: bool) -> Config:
        """The run of one cell."""
        model, layers = [f"experiment=paper/{self.setting.model.lower()}"], paper.LAYERS[self.setting.model]
        if small:
            layers = SMALL_LAYERS[self.setting.model]
            model = [*SMALL, f"model.num_layers={layers}"]
            model += ["parallel.activation_checkpointing=full"] if self.setting.model == "65B" else []
        blocks = ["finetune=last_blocks", f"finetune.last_blocks={max(1, layers // 16)}"]
        part = {"full": [], "1/16": blocks, "PEFT": ["finetune=lora"]}[self.setting.trained]
        batch = self.accumulation(small=small) * (1 if small else paper.MICRO_BATCH) * world_size
        name = f"{self.setting}_{self.samples}_{cell}".replace(" ", "_").replace("/", "of")
        own = [f"global_batch_size={batch}", f"parallel.sharding={cell}", f"run_name={name}"]
        return replace(load([*model, *timing_overrides(folder, data), *part, *own]), cluster=cluster)


def groups() -> list[Group]:
    """All runs that the ratios R1 to R8 need."""
    found: dict[tuple[paper.Setting, int], list[str]] = {}
    for claim in RATIOS:
        found.setdefault((claim.setting, claim.samples), []).extend((claim.cell, paper.BASELINES[claim.baseline]))
    return [Group(setting=setting, samples=samples, cells=tuple(dict.fromkeys(cells))) for (setting, samples), cells in found.items()]


def planned_seconds(configs: Sequence[Config], world: World, rounds: int) -> float:
    """Seconds that the steps of these runs take, warm-up included, as the planner predicts them."""
    ranks, local = world.world_size, world.local_world_size
    return (rounds + 1) * sum(predict(cfg, world_size=ranks, local_world_size=local).time.total for cfg in configs)


def cost_text(seconds: float, world_size: int, unit: str) -> str:
    """What is printed before anything is measured."""
    hours = seconds * world_size / 3600
    return f"measuring takes about {seconds / 60:.1f} minutes on {world_size} ranks, {hours:.2f} {unit}-hours (predicted)"


def measure_as_rank(folder: Path, *, rounds: int, cluster: str) -> World:
    """Measure as one of the ranks that a launcher started; `cluster` names a file of the group. Returns this rank's world."""
    folder.mkdir(parents=True, exist_ok=True)
    world = distributed.initialize(RuntimeConfig())
    try:
        measure(world, folder, rounds=rounds, cluster=load([f"cluster={cluster}"]).cluster)
    finally:
        distributed.shutdown(world)
    return world


def measure(world: World, folder: Path, *, rounds: int, cluster: ClusterConfig) -> None:
    """Time everything on the ranks of this cluster; rank 0 writes steps.csv and rings.csv into `folder`. A collective call."""
    small = world.device.type == "cpu"
    runs = configs_that_fit(world, folder, cluster, small=small)

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    everything = [cfg for configs in runs.values() for cfg in configs.values()]
    say(cost_text(planned_seconds(everything, world, rounds), world.world_size, "rank" if small else "GPU"))
    timings: list[Timing] = []
    for group, configs in runs.items():
        left_out = sorted(set(group.cells) - set(configs))
        say(f"{group.name}: {', '.join(configs)}" + (f"; does not fit: {', '.join(left_out)}" if left_out else ""))
        turns = [TakingTurns(f"{group.name}, {cell}", cfg) for cell, cfg in configs.items()]
        timings += take_turns(turns, rounds, say=say)
        for run in turns:
            run.close()
    rings = time_rings(world, num_bytes=SMALL_RING_BYTES if small else RING_BYTES, rounds=rounds)
    if world.rank == 0:
        write_timings(timings, folder / "steps.csv")
        write_timings(rings, folder / "rings.csv")


def configs_that_fit(world: World, folder: Path, cluster: ClusterConfig, *, small: bool) -> Runs:
    """The runs of every group that the planner expects to fit; all of the small ones. A collective call."""
    data = distributed.on_rank_zero(lambda: synthetic_data(folder / "data", 256))
    ranks, local = world.world_size, world.local_world_size
    cluster = replace(cluster, ranks_per_node=local, nodes=max(1, ranks // local))
    result: Runs = {}
    for group in groups():
        configs = {cell: group.config(cell, ranks, folder, data, cluster, small=small) for cell in group.cells}
        result[group] = {cell: cfg for cell, cfg in configs.items() if small or predict(cfg, world_size=ranks, local_world_size=local).fits}
    return result


def time_rings(world: World, *, num_bytes: int, rounds: int) -> list[Timing]:
    """All-gathers of `num_bytes` over all ranks, ring and HO-Ring in turns; their results are checked. A collective call."""
    mesh = ParallelMesh.build(world_size=world.world_size, rank=world.rank, local_world_size=world.local_world_size, device=world.device)
    numel = num_bytes // 4 // mesh.size(*DATA_AXES)
    full, shard = (torch.zeros(size, device=world.device) for size in (numel * mesh.size(*DATA_AXES), numel))
    calls = {name: _gather(GridCollectives(mesh, algorithm=name, device=world.device), full, shard) for name in RINGS}
    found = []
    for round_ in range(rounds + 1):
        for name in RINGS if round_ % 2 else RINGS[::-1]:
            mesh.sum(1)
            start = time.perf_counter()
            calls[name]()
            if world.device.type != "cpu":
                torch.accelerator.synchronize(world.device)
            found.append(Timing(name=name, round=round_, seconds=mesh.max(time.perf_counter() - start), loss=0.0))
    return found


def _gather(grid: GridCollectives, full: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
    """The call to time, once it has given the right values."""
    shard.fill_(grid.shard_index(DATA_AXES) + 1)

    def gather() -> None:
        grid.all_gather(full, shard, DATA_AXES)

    full.zero_()
    gather()
    assert all(bool((part == index + 1).all()) for index, part in enumerate(full.view(-1, shard.numel()))), "wrong order"
    return gather


def measured_table(folder: Path, *, label: str, where: str) -> ResultTable:
    """The claims beside what `measure` wrote into `folder`; `label` is emulated or measured, `where` the provenance."""
    steps, rings = (_by_name(read_timings(folder / name)) for name in ("steps.csv", "rings.csv"))
    rows: list[Row] = [_claim_row(claim, steps) for claim in RATIOS]
    middle, low, high = interval([1 - rings["ho_ring"][at] / rings["ring"][at] for at in rings["ring"]])
    saved = f"{100 * middle:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    milliseconds = (f"{1000 * statistics.median(rings[name].values()):.1f} ms" for name in RINGS[::-1])
    rows.append(("R10", "all-gather", "time that HO-Ring saves over a ring", "25.2 % to 39.7 %", "", saved, *milliseconds))
    notes = [
        f"Ratios of throughput: medians over {len(rings['ring'])} rounds of steps in turns with their bootstrap 95 % interval.",
        "R7 and R9 compare clusters of different sizes: one run cannot measure them. hpZ is not among our cells.",
        where,
    ]
    if label == "emulated":
        notes.insert(1, "Small models on the CPU stand for 7B and 65B, links are far slower: signs and orders are what to compare.")
    header = ("claim", "setting", "what", "published", "modelled", f"{label} [95 %]", "ours, s", "baseline, s")
    return ResultTable(name="measured", title="Claims, run for real", label=label, header=header, rows=rows, notes=tuple(notes))


def _claim_row(claim: paper.Claim, steps: Mapping[str, Mapping[int, float]]) -> Row:
    against = paper.BASELINES[claim.baseline]
    what = f"{claim.cell} over {claim.baseline} ({against})"
    head = (claim.name, claim.setting, what, f"{claim.published:.3f}", f"{modelled(claim, FITTED):.3f}")
    ours, theirs = (steps.get(f"{claim.setting}, {claim.samples}, {cell}") for cell in (claim.cell, against))
    if ours is None or theirs is None:
        return (*head, "does not fit", "", "")
    middle, low, high = interval([theirs[at] / ours[at] for at in ours])
    seconds = (f"{statistics.median(run.values()):.3f}" for run in (ours, theirs))
    return (*head, f"{middle:.3f} [{low:.3f}, {high:.3f}]", *seconds)


def _by_name(timings: Sequence[Timing]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for each in timings:
        if each.round:
            found.setdefault(each.name, {})[each.round] = each.seconds
    return found


if __name__ == "__main__":  # one rank of an emulated cluster
    measure_as_rank(Path(sys.argv[1]), rounds=int(sys.argv[2]), cluster=sys.argv[3])
