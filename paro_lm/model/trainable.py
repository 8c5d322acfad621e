"""Which parameters a fine-tuning trains, from options and names alone. Imports nothing heavy: the planner asks, too."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

from paro_lm.config import FinetuneConfig

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


def trains_all(cfg: FinetuneConfig) -> bool:
    """Whether no parameter is frozen."""
    return not cfg.trainable and cfg.last_blocks is None and not cfg.lora_rank


def trainable_in(cfg: FinetuneConfig, num_layers: int) -> Callable[[str], bool]:
    """Whether a parameter, by its global name, is trained in a model of `num_layers` blocks."""
    if cfg.lora_rank:
        return lambda name: ".lora." in name
    if cfg.last_blocks is not None:
        first = num_layers - cfg.last_blocks
        return lambda name: name.startswith("layers.") and int(name.split(".")[1]) >= first
    if cfg.trainable:
        return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in cfg.trainable)
    return lambda name: True


def unmatched(cfg: FinetuneConfig, names: Iterable[str]) -> list[str]:
    """The patterns of `finetune.trainable` that match none of a model's names."""
    known = list(names)
    return [pattern for pattern in cfg.trainable if not fnmatch.filter(known, pattern)]
