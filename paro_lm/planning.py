"""Where a run meets the planner: the cell that `parallel.sharding=auto` stands for, and what to say when memory is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paro_lm import distributed
from paro_lm.checkpoint.folder import latest_checkpoint
from paro_lm.config import AUTO_SHARDING, Config, read_config
from paro_lm.data.prepare import prepare
from paro_lm.planner.predict import choice_text, choose, out_of_memory_text

ALLOCATORS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
"""What an allocation on the CPU says when it fails: torch raises a plain RuntimeError."""


class MemoryShortageError(RuntimeError):
    """An allocation failed; the message says what was planned, what is held, and which cells need less."""


def with_cell(cfg: Config, world: distributed.World) -> tuple[Config, str | None]:
    """(the config with a cell in place of auto, the sentence to log); other configs as they are. A collective call.

    A run that has a checkpoint keeps the cell that it was given. Raises ValueError when no cell fits.
    """
    if cfg.parallel.sharding.lower() != AUTO_SHARDING:
        return cfg, None
    kept = distributed.on_rank_zero(lambda: _cell_of_run(Path(cfg.output_dir) / cfg.run_name))
    if kept is not None:
        return _with(cfg, kept), f"parallel.sharding=auto keeps {kept}, which this run was started with"
    vocab = cfg.model.vocab_size or prepare(cfg.data, seed=cfg.seed).vocab_size  # all ranks wait for the one that prepares
    return distributed.on_rank_zero(lambda: choose_cell(cfg, world.world_size, world.local_world_size, vocab))


def choose_cell(cfg: Config, world_size: int, local_world_size: int, vocab_size: int | None) -> tuple[Config, str]:
    """What the planner chooses, and its sentence. Raises ValueError when no cell fits."""
    result = choose(cfg, world_size=world_size, local_world_size=local_world_size, vocab_size=vocab_size)
    text = choice_text(result)
    assert result.best is not None
    return _with(cfg, str(result.best.cell)), text


def _with(cfg: Config, cell: str) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, sharding=cell))


def _cell_of_run(folder: Path) -> str | None:
    if latest_checkpoint(folder / "checkpoints") is None:
        return None
    return read_config(folder / "config.yaml").parallel.sharding


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATORS)


def with_advice(
    error: Exception, cfg: Config, world: distributed.World, *, vocab_size: int, held: Mapping[str, int], peak: float
) -> Exception:
    """The error to report: for a failed allocation planned against actual bytes and lighter cells, else the error itself.

    `held` are the bytes of this rank's states, `peak` is the most that the process has held.
    """
    if not is_out_of_memory(error):
        return error
    actual: dict[str, float] = {"total": peak}
    if held:
        actual |= {"param": held["param"], "grad": held["grad"], "main": held["main"] - held["shared"]}
        actual["states"] = actual["param"] + actual["grad"] + actual["main"]
    try:
        text = out_of_memory_text(
            cfg, world_size=world.world_size, local_world_size=world.local_world_size, vocab_size=vocab_size or None, actual=actual
        )
    except ValueError:  # a mesh that the planner does not know must not hide the failure itself
        return error
    result = MemoryShortageError(f"{error}\n{text}")
    result.__cause__ = error
    return result
