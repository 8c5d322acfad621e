"""Checkpoints that load on any layout, and that a crash cannot damage."""

from paro_lm.checkpoint.checkpointer import Checkpointer, Loaded
from paro_lm.checkpoint.folder import find_checkpoint, latest_checkpoint, read_meta
from paro_lm.checkpoint.reading import list_tensors, load_full
from paro_lm.checkpoint.team import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "Loaded", "find_checkpoint", "latest_checkpoint", "list_tensors", "load_full", "read_meta"]
