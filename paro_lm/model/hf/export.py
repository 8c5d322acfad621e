"""A model as a folder that transformers loads: config.json, safetensors files with their index, generation config, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paro_lm.config import ModelConfig
from paro_lm.model.hf.checkpoint import valid_shape
from paro_lm.model.hf.config import model_to_hf
from paro_lm.model.hf.families import Family, family_of
from paro_lm.model.spec import ParameterSpec
from paro_lm.model.transformer import Transformer

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where an export takes parameters from, by our names.

    read(names)   whole parameters on the CPU; rows of vocabulary padding are cut off here
    dtype_of      the type that each is to be written in
    """

    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    dtype_of: Callable[[str], torch.dtype]


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that is renamed to it when the block ends, and removed when the block raises.

    Raises ValueError when `target` exists or its place cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists; nothing is overwritten, choose another folder or remove it.")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"{target} cannot be made ({error}); choose another folder.") from error
        yield temporary
        if target.exists():
            raise ValueError(f"{target} appeared while it was being written; nothing is overwritten.")
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_model(
    folder: Path,
    cfg: ModelConfig,
    weights: Weights,
    *,
    vocab_size: int,
    token_ids: Mapping[str, Any] | None = None,
    like: Mapping[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write config.json and the weights of a model into an existing folder, one file of weights in memory at a time.

    token_ids, like  see `model_to_hf`. max_shard_size  such as 500MB; more than that is spread over several files.
    Raises ValueError when no supported architecture has the model's options, or a size cannot be read.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    family = family_of(cfg, None if like is None else like.get("model_type"))
    with torch.device("meta"):
        specs = Transformer(cfg, vocab_size=vocab_size).parameter_specs()
    sources = stored_tensors(family, specs)
    planned = {name: _planned(sources[name], specs, weights) for name in sources}
    kinds = [tensor.dtype for tensor in planned.values()]
    dtype = str(max(set(kinds), key=kinds.count)).removeprefix("torch.")
    try:
        split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size={max_shard_size}: give a size such as 500MB or 5GB ({error}).") from error
    values = model_to_hf(cfg, vocab_size=vocab_size, dtype=dtype, token_ids=token_ids, like=like)
    write_json(folder / "config.json", values)
    for file, names in split.filename_to_tensors.items():
        read = weights.read([ours for name in names for ours in sources[name]])
        tensors = {name: _assemble(family, sources[name], specs, read).to(planned[name].dtype) for name in names}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # safetensors lets only the owner read
    if split.is_sharded:
        write_json(folder / "model.safetensors.index.json", {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def stored_tensors(family: Family, specs: Mapping[str, ParameterSpec]) -> dict[str, list[str]]:
    """Name in the files -> our parameters that it holds, in the order of their parts."""
    result: dict[str, list[str]] = {}
    for name in sorted(specs, key=lambda name: family.place(name).part):
        result.setdefault(family.place(name).name, []).append(name)
    return dict(sorted(result.items(), key=lambda item: list(specs).index(item[1][0])))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """JSON as transformers writes it."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_generation_config(folder: Path, *, eos: Sequence[int], bos: int | None, pad: int | None) -> None:
    """The ids at which generation stops: end of text, and for chat models end of turn."""
    values: dict[str, Any] = {"bos_token_id": bos, "pad_token_id": pad}
    values["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    write_json(folder / GENERATION_CONFIG, {key: value for key, value in values.items() if value is not None})


def _planned(names: Sequence[str], specs: Mapping[str, ParameterSpec], weights: Weights) -> Tensor:
    """A tensor without data of the size that is written."""
    shape = valid_shape(specs[names[0]])
    return torch.empty((shape[0] * len(names), *shape[1:]), dtype=weights.dtype_of(names[0]), device="meta")


def _assemble(family: Family, names: Sequence[str], specs: Mapping[str, ParameterSpec], read: Mapping[str, Tensor]) -> Tensor:
    """The stored tensor from its parts."""
    parts = [read[name][: valid_shape(specs[name])[0]] for name in names]
    value = parts[0] if len(parts) == 1 else torch.cat(parts)
    return value.t() if family.place(names[0]).transposed else value
