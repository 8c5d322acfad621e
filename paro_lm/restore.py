"""A trained model on one process, from a run folder, a checkpoint or a Hugging Face folder; what the tools that only read share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paro_lm.build import DTYPES
from paro_lm.checkpoint.folder import find_checkpoint, read_meta, verify_files
from paro_lm.checkpoint.reading import list_tensors, load_full
from paro_lm.config import Config, PrecisionConfig, load_config
from paro_lm.data.tokenizer import Tokenizer, load_tokenizer
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.hf.hub import is_hf
from paro_lm.model.hf.tokenizer import has_tokenizer
from paro_lm.model.lora import is_adapter, read_merged
from paro_lm.model.transformer import Transformer

HF_SEQ_LENGTH = 1024
"""Tokens per window when a Hugging Face model is evaluated, unless its own limit is lower."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model on disk, nothing of its weights read yet.

    path       the checkpoint, or the Hugging Face folder
    meta       of the checkpoint; step, vocab_size, tokenizer and config are always there
    tokenizer  a folder or file, "bytes", or None when the model has none
    hf         the open checkpoint when it is one of Hugging Face
    """

    path: Path
    cfg: Config
    meta: dict[str, Any]
    tokenizer: Path | str | None
    hf: HFCheckpoint | None

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole parameters by their names, padded rows of the vocabulary included, in the stored type, on the CPU; LoRA merged in."""
        if self.hf is not None:
            return {name: self.hf.value_of(name) for name in names}
        tune = self.cfg.finetune
        return read_merged(self._stored, names, self._names(), tune.lora_alpha / tune.lora_rank) if tune.lora_rank else self._stored(names)

    def adapters(self) -> dict[str, torch.Tensor]:
        """Whole factors of the LoRA adapters, by name. Raises ValueError when the run has none."""
        names = [name for name in self._names() if is_adapter(name)] if self.hf is None else []
        if not names:
            raise ValueError(f"{self.path} has no LoRA adapters; export the whole model (adapter=false).")
        return self._stored(names)

    def _stored(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        values = load_full(self.path, [f"model/{name}" for name in names], verify=False)
        return {name: values[f"model/{name}"] for name in names}

    def _names(self) -> list[str]:
        return [name.removeprefix("model/") for name in list_tensors(self.path) if name.startswith("model/")]

    def need_tokenizer(self) -> Path | str:
        """The tokenizer. Raises ValueError when there is none."""
        if self.tokenizer is None:
            raise ValueError(_no_tokenizer(self.path, self.hf is not None))
        return self.tokenizer


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A whole model in evaluation mode, the config of its run, its checkpoint, and the run's tokenizer if it has one."""

    model: Transformer
    cfg: Config
    checkpoint: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer | None
    is_hf: bool = False

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(_no_tokenizer(self.checkpoint, self.is_hf))
        return self.tokenizer


def open_source(path: Path | str, *, allow_pickle: bool = False) -> Source:
    """The newest checkpoint of a run folder, the checkpoint named, or a Hugging Face folder (or `hf://owner/name`).

    Raises ValueError when there is none, and as `HFCheckpoint` does. allow_pickle: also read `.bin` files of Hugging Face.
    """
    if is_hf(path):
        return _open_hf(HFCheckpoint(path, allow_pickle=allow_pickle))
    checkpoint = find_checkpoint(path)
    meta = read_meta(checkpoint)
    verify_files(checkpoint)  # all checksums, once
    folder = checkpoint.parent.parent / "tokenizer"
    tokenizer: Path | str | None = "bytes" if meta["tokenizer"] == "bytes" else folder if folder.is_dir() else None
    return Source(path=checkpoint, cfg=load_config(meta["config"]), meta=meta, tokenizer=tokenizer, hf=None)


def restore(path: Path | str, *, device: torch.device, dtype: str | None = None) -> Restored:
    """Load the model of a run folder (its newest checkpoint), a checkpoint, or a Hugging Face folder.

    dtype    fp64 | fp32 | bf16 | fp16; None = the parameter type of the run, or the stored type. Raises ValueError as `open_source`.
    """
    source = open_source(path)
    model = load_model(source, device=device, dtype=DTYPES[dtype or source.cfg.precision.param_dtype])
    tokenizer = None if source.tokenizer is None else load_tokenizer(source.tokenizer)
    return Restored(model=model, cfg=source.cfg, checkpoint=source.path, meta=source.meta, tokenizer=tokenizer, is_hf=source.hf is not None)


def load_model(source: Source, *, device: torch.device, dtype: torch.dtype, stored: torch.dtype | None = None) -> Transformer:
    """The whole model in evaluation mode; values are rounded to the type `stored` first, when it is given."""
    with torch.device("meta"):
        model = Transformer(source.cfg.model, vocab_size=source.vocab_size).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    values = {name: value if stored is None else value.to(stored) for name, value in source.read(names).items()}
    model.load_state_dict({name: value.to(device, dtype) for name, value in values.items()}, strict=True, assign=True)
    model.reset_buffers(device)
    return model.eval()


def _open_hf(checkpoint: HFCheckpoint) -> Source:
    dtype = next(name for name, kind in DTYPES.items() if kind is checkpoint.dtype)
    tokenizer = checkpoint.folder if has_tokenizer(checkpoint.folder) else None
    cfg = Config(model=checkpoint.model, precision=PrecisionConfig(name=dtype, param_dtype=dtype))
    cfg = replace(
        cfg,
        seq_length=min(checkpoint.model.max_positions, HF_SEQ_LENGTH),
        data=replace(cfg.data, tokenizer=None if tokenizer is None else str(tokenizer)),
    )
    meta = {"step": 0, "vocab_size": checkpoint.vocab_size, "tokenizer": cfg.data.tokenizer, "config": asdict(cfg)}
    return Source(path=checkpoint.folder, cfg=cfg, meta=meta, tokenizer=tokenizer, hf=checkpoint)


def _no_tokenizer(path: Path, is_hf: bool) -> str:
    if is_hf:
        return f"{path} has no tokenizer (tokenizer.json, vocab.json or a sentencepiece .model); copy its files into the folder."
    return f"{path}: its run has no tokenizer; train with data.tokenizer set, or give token ids."
