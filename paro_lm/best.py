"""The checkpoint with the lowest validation loss, kept beside those of the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paro_lm import distributed
from paro_lm.checkpoint.checkpointer import Checkpointer
from paro_lm.checkpoint.folder import latest_checkpoint, read_meta
from paro_lm.parallel.mesh import ParallelMesh


class BestCheckpoint:
    """Holds the best checkpoint in `folder`. Every method is a collective call.

    counts    whether one that lies there already is of this run; one that an earlier attempt left goes with the first that is saved
    """

    def __init__(self, folder: Path, *, mesh: ParallelMesh, async_save: bool, counts: bool = True) -> None:
        self.folder = folder
        self._checkpointer = Checkpointer(folder, mesh=mesh, keep_last=1, async_save=async_save)
        self.loss: float = distributed.on_rank_zero(lambda: _loss_of(folder)) if counts else math.inf

    def improves(self, loss: float) -> bool:
        """Whether a validation loss (the same on all ranks) is lower than all before."""
        return math.isfinite(loss) and loss < self.loss

    def save(self, loss: float, step: int, tensors: dict[str, Any], *, meta: dict[str, Any], rank_state: Any) -> None:
        """Save as `Checkpointer.save` does; the former best goes when this one is complete."""
        self._checkpointer.save(step, tensors, meta=meta | {"val_loss": loss}, rank_state=rank_state)
        self.loss = loss

    def wait(self) -> None:
        self._checkpointer.wait()


def _loss_of(folder: Path) -> float:
    best = latest_checkpoint(folder)
    return math.inf if best is None else float(read_meta(best)["val_loss"])
