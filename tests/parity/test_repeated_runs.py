"""Runs one after another in the same processes: a finished run gives back its model, threads and communicators."""

import gc
import threading
import weakref
from pathlib import Path

import torch.distributed as dist

from paro_lm.config import Config
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.parity.test_layouts import Layout
from tests.test_trainer import tokens  # noqa: F401 (a fixture)


def _what_is_left(rank: int, world_size: int, configs: list[Config]) -> list[tuple[bool, int, int]]:
    """Per run: whether its model lives on, and how many threads and communicators the process has."""
    left = []
    for cfg in configs:
        trainer = Trainer(cfg)
        assert trainer.fit() == 0
        model = weakref.ref(trainer.model.module)
        del trainer
        gc.collect()
        threads = list(Path("/proc/self/task").iterdir()) if Path("/proc/self/task").exists() else threading.enumerate()
        left.append((model() is not None, len(threads), len(dist.distributed_c10d._world.pg_map)))
    return left


def test_a_finished_run_gives_everything_back(tokens: Path) -> None:  # noqa: F811
    layouts = [
        Layout(dp=4, group=2, cell="IIG"),
        Layout(tp=2, dp=2, sequence_parallel=True, cell="GGG", checkpointing="full"),
        Layout(pp=2, dp=2, cell="NIG", schedule="interleaved_1f1b"),
        Layout(tp=2, pp=2, tied=False, schedule="zbv", micro_batches=6),
        Layout(dp=4, group=2, cell="NNN", micro_batches=1),
    ]
    configs = [layout.config(tokens, steps=2) for layout in layouts]
    for left in run_distributed(_what_is_left, 4, configs):
        assert len(set(left)) == 1, left
        assert left[0][0] is False
        assert left[0][2] == 1, "only the communicator of the world stays"
