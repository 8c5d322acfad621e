"""A trained model on one process, from a run folder or a checkpoint; what the tools that only read a model share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paro_lm.build import DTYPES
from paro_lm.checkpoint.folder import find_checkpoint, read_meta
from paro_lm.checkpoint.reading import load_full
from paro_lm.config import Config, load_config
from paro_lm.data.tokenizer import Tokenizer, load_tokenizer
from paro_lm.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A whole model in evaluation mode, the config of its run, its checkpoint, and the run's tokenizer if it has one."""

    model: Transformer
    cfg: Config
    checkpoint: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer | None

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.checkpoint}: its run has no tokenizer; train with data.tokenizer set, or give token ids.")
        return self.tokenizer


def restore(path: Path | str, *, device: torch.device, dtype: str | None = None) -> Restored:
    """Load the newest checkpoint of a run folder, or the checkpoint named.

    dtype    fp64 | fp32 | bf16 | fp16; None = the parameter type of the run. Raises ValueError when there is no checkpoint.
    """
    checkpoint = find_checkpoint(path)
    meta = read_meta(checkpoint)
    cfg = load_config(meta["config"])
    kind = DTYPES[dtype or cfg.precision.param_dtype]
    with torch.device("meta"):
        model = Transformer(cfg.model, vocab_size=meta["vocab_size"]).to(kind)
    names = [name for name, _ in model.named_parameters()]
    values = load_full(checkpoint, [f"model/{name}" for name in names])
    model.load_state_dict({name: values[f"model/{name}"].to(device, kind) for name in names}, strict=True, assign=True)
    model.reset_buffers(device)
    folder = checkpoint.parent.parent / "tokenizer"
    tokenizer = load_tokenizer("bytes") if meta["tokenizer"] == "bytes" else load_tokenizer(folder) if folder.is_dir() else None
    return Restored(model=model.eval(), cfg=cfg, checkpoint=checkpoint, meta=meta, tokenizer=tokenizer)
