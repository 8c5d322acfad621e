"""Comparison of the tensors that a run has with those that a checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paro_lm.parallel.buffer import FlatShard

logger = logging.getLogger(__name__)

LISTED = 40
"""Names that an error message lists before it counts the rest."""


def check_names(
    path: Path, stored: Iterable[str], wanted_by_rank: Iterable[Iterable[str]], *, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that the checkpoint lacks, and names that no rank wants.

    Raises ValueError naming both when strict and there are any.
    """
    have, want = set(stored), {name for names in wanted_by_rank for name in names}
    missing, unexpected = tuple(sorted(want - have)), tuple(sorted(have - want))
    if strict and (missing or unexpected):
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing from the checkpoint: {_listing(missing)}")
        if unexpected:
            parts.append(f"{len(unexpected)} in the checkpoint but unknown to this run: {_listing(unexpected)}")
        raise ValueError(
            f"The tensors of the checkpoint {path} are not those of this run. {'; '.join(parts)}. "
            "Use the model and optimizer settings under which it was saved, or another checkpoint."
        )
    return missing, unexpected


def check_shapes(path: Path, stored: Mapping[str, TensorStorageMetadata], tensors: Mapping[str, FlatShard | torch.Tensor]) -> None:
    """Compare global shapes; ValueError names the tensors that differ and both shapes. A type that will be converted is logged."""
    different, converted = [], set()
    for name, tensor in tensors.items():
        data = tensor.data if isinstance(tensor, FlatShard) else tensor
        saved = stored[name]
        if tuple(saved.size) != tuple(tensor.shape):
            different.append(f"{name} is {tuple(saved.size)} in the checkpoint and {tuple(tensor.shape)} here")
        if saved.properties.dtype != data.dtype:
            converted.add((saved.properties.dtype, data.dtype))
    if different:
        raise ValueError(f"Shapes differ from the checkpoint {path}: {_listing(different)}. Use the model settings of the checkpoint.")
    for source, target in sorted(converted, key=str):
        logger.warning("Tensors in %s are converted from %s to %s.", path, source, target)


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    rest = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + rest
