"""Reading a checkpoint in one process, for tools: no mesh, no process group."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from paro_lm.checkpoint.folder import read_meta, verify_files
from paro_lm.checkpoint.names import check_names
from paro_lm.checkpoint.storage import Storable, read_tensors, stored_tensors
from paro_lm.checkpoint.team import Team


def list_tensors(path: Path | str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and type of every tensor in a checkpoint, by name, sorted. Raises ValueError as `read_meta` and for damage."""
    path = Path(path)
    read_meta(path)
    verify_files(path, checksums_of=[".metadata"])
    stored = stored_tensors(path)
    return {name: (tuple(stored[name].size), stored[name].properties.dtype) for name in sorted(stored)}


def load_full(path: Path | str, names: Iterable[str] | None = None, *, verify: bool = True) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint on the CPU, the named ones or (None) all.

    verify: compare the checksums of all files first; sizes always are.
    Raises ValueError for a name that the checkpoint does not have, and for damage, naming the file.
    """
    path = Path(path)
    stored = list_tensors(path)
    wanted = list(stored if names is None else names)
    check_names(path, [name for name in stored if name in set(wanted)], [wanted], strict=True)
    if verify:
        verify_files(path)
    tensors: dict[str, Storable] = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in wanted}
    read_tensors(path, tensors, Team(None))
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
