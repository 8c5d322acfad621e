"""Trading computation for memory and speed per block: recomputation of activations, and compilation.

Both replace `forward` of blocks (or of their attention), so whatever hooks a block's call stays outside.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paro_lm.model.transformer import Transformer

MODES = ("none", "full", "selective")


def apply_activation_checkpointing(model: Transformer, mode: str) -> None:
    """Keep only the input of each block (`full`) or of each attention (`selective`) and recompute the rest in backward.

    Gradients are bitwise those of `none`: dropout masks follow from explicit seeds, so no random state is kept either.
    """
    if mode not in MODES:
        raise ValueError(f"parallel.activation_checkpointing must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        return
    for block in model.layers.values():
        module = block if mode == "full" else block.attention
        assert isinstance(module, nn.Module)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def apply_compile(model: Transformer) -> None:
    """torch.compile the forward of each block; call it after `apply_activation_checkpointing`."""
    for block in model.layers.values():
        block.forward = torch.compile(block.forward)
