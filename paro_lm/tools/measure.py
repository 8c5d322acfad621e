"""Training steps of several runs that take turns on the same ranks: what benchmarks of cells against each other are made of.

Whatever else the machines do then hits all alike. A turn begins with sending the parameters that the turn before updated, and ends
before it sends its own: the steady state, without anything of one run beside the step of another.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paro_lm import distributed
from paro_lm.config import Config
from paro_lm.data.indexed import IndexedWriter
from paro_lm.parallel.mesh import AXES
from paro_lm.trainer import Trainer

SYNTHETIC_TOKENS = 200_000


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One step: seconds of the slowest rank, and its loss; `round` 0 warms up."""

    name: str
    round: int
    seconds: float
    loss: float


class TakingTurns:
    """One run whose steps are taken one at a time. Building it is a collective call."""

    def __init__(self, name: str, cfg: Config) -> None:
        self.name = name
        self.trainer = Trainer(cfg)
        self.trainer.world = distributed.initialize(cfg.runtime)
        self.trainer.open()
        self._publish = self.trainer.engine.sync_parameters
        self.trainer.engine.sync_parameters = lambda: None  # type: ignore[method-assign]  # a turn publishes at its start

    def turn(self) -> float:
        """One step; its loss."""
        self._publish()
        return self.trainer.train_step().loss

    def timed(self) -> tuple[float, float]:
        """(seconds of the slowest rank, loss) of one step. A collective call."""
        mesh = self.trainer.mesh
        mesh.sum(1)
        _synchronize(mesh.device)
        start = time.perf_counter()
        loss = self.turn()
        _synchronize(mesh.device)
        return mesh.max(time.perf_counter() - start, AXES), loss

    def peak_bytes(self) -> int:
        """Most bytes of live tensors of the fullest rank in a step: states, scratch of collectives, all that comes and goes."""
        trainer = self.trainer
        held = trainer.state_bytes()
        states = held["param"] + held["grad"] + held["main"] - held["shared"]
        grids = (trainer.engine._gather_collectives, trainer.engine._reduce_collectives)
        scratch = sum(grid.scratch_bytes for grid in grids)
        return int(trainer.mesh.max(states + scratch + highest(self.turn, trainer.mesh.device), AXES))

    def close(self) -> None:
        """Give back what the run holds of threads and communicators. A collective call."""
        self.trainer.close()


def highest(work: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that `work` had allocated at a time, beyond what was there before."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        work()
        return int(module.max_memory_allocated(device) - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def take_turns(runs: Sequence[TakingTurns], rounds: int, *, say: Callable[[str], None] = lambda text: None) -> list[Timing]:
    """One warm-up and `rounds` timed steps of every run, in an order that changes from round to round. A collective call."""
    found = []
    for round_ in range(rounds + 1):
        order = list(runs)
        random.Random(round_).shuffle(order)
        mine = []
        for run in order:
            seconds, loss = run.timed()
            mine.append(Timing(name=run.name, round=round_, seconds=seconds, loss=loss))
        found += mine
        say(f"round {round_}: " + ", ".join(f"{each.name} {each.seconds:.2f}" for each in mine))
    return found


def synthetic_data(folder: Path, vocab_size: int, seed: int = 0) -> Path:
    """Prefix of a prepared file of random tokens; written by one process."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "synthetic"
    with IndexedWriter(prefix, dtype=np.uint16) as writer:
        writer.add_document(np.random.default_rng(seed).integers(0, vocab_size, size=SYNTHETIC_TOKENS).astype(np.uint16))
    return prefix


def timing_overrides(folder: Path, data: Path) -> list[str]:
    """Options of a run that is only timed: data as prepared, no validation, no end."""
    return [
        f"data.train=[{data}]",
        "data.tokenizer=bytes",
        "data.valid_fraction=0",
        f"data.cache_dir={folder / 'cache'}",
        f"output_dir={folder / 'runs'}",
        "eval.every=0",
        "steps=1000000",
        "optim.schedule=constant",
        "optim.lr=1e-4",
    ]


def write_timings(timings: Sequence[Timing], path: Path) -> None:
    """CSV, one line per step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "round", "seconds", "loss"])
        writer.writerows((each.name, each.round, each.seconds, each.loss) for each in timings)


def read_timings(path: Path) -> list[Timing]:
    """What `write_timings` wrote."""
    with path.open(encoding="utf-8") as file:
        return [
            Timing(name=row["name"], round=int(row["round"]), seconds=float(row["seconds"]), loss=float(row["loss"]))
            for row in csv.DictReader(file)
        ]


def interval(values: Sequence[float], draws: int = 1000) -> tuple[float, float, float]:
    """Median with its bootstrap 95 % interval."""
    found = np.array(values)
    medians = np.median(np.random.default_rng(0).choice(found, size=(draws, len(found))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(found)), float(low), float(high)
