"""`paro-export`: write a trained model as a folder that transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paro_lm.cli import Tool, hydra_entry
from paro_lm.config import option

if TYPE_CHECKING:
    import torch

    from paro_lm.restore import Source

TOLERANCE = 1e-4
"""Largest difference of logits in fp32 that verify=true accepts, relative to the largest logit (at least 1)."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which model is written, where, and how."""

    run: str = option(
        "outputs/quickstart", "Run folder (its newest checkpoint), checkpoint folder, Hugging Face folder, or hf://owner/name."
    )
    to: str = option("", "Folder to write; it must not exist.")
    dtype: str | None = option(None, "Of the weights; null = the type of the run, or as stored.", choices="fp64 | fp32 | bf16 | fp16")
    max_shard_size: str = option("5GB", "Weights above this size are spread over several files.")
    verify: bool = option(False, "Load the folder with transformers and compare logits before it gets its name.")
    adapter: bool = option(False, "Write the LoRA adapters alone, as peft loads them; false = merged into the model.")
    allow_pickle: bool = option(False, "Read weights from the .bin files of an old Hugging Face checkpoint.")


TOOL = Tool(
    name="paro-export",
    description="write a trained model as a folder that transformers loads.",
    examples=(
        "paro-export run=outputs/quickstart to=exports/quickstart verify=true",
        "paro-export run=outputs/finetune_smollm2/best to=exports/adapter adapter=true",
        "paro-export run=outputs/quickstart/checkpoints/step_100 to=exports/step_100 dtype=bf16 max_shard_size=2GB",
    ),
    schema=ExportConfig,
    config_name="export",
)


def task(cfg: ExportConfig) -> int:
    """Write the folder and say what is in it."""
    from paro_lm.build import DTYPES
    from paro_lm.model.hf.export import complete_folder
    from paro_lm.restore import open_source

    if not cfg.to:
        raise ValueError("to= is missing: name the folder to write, such as to=exports/mine.")
    target = Path(cfg.to).expanduser()
    if cfg.adapter and cfg.verify:
        raise ValueError("verify=true compares whole models; leave it out with adapter=true, or export the merged model.")
    if target.exists():  # before anything is read
        raise ValueError(f"to={cfg.to} exists; nothing is overwritten, choose another folder or remove it.")
    source = open_source(cfg.run, allow_pickle=cfg.allow_pickle)
    dtype = None if cfg.dtype is None else DTYPES[cfg.dtype]
    if cfg.adapter:
        return export_adapter(source, target, dtype=dtype)
    with complete_folder(target) as folder:
        architecture = export(source, folder, dtype=dtype, max_shard_size=cfg.max_shard_size)
        if cfg.verify:
            print(f"verified: largest difference of logits to transformers {verify(source, folder, dtype):.3g}")
    print(f"{target}: {architecture} from {source.path}, load it with AutoModelForCausalLM.from_pretrained({str(target)!r})")
    return 0


def export(source: Source, folder: Path, *, dtype: torch.dtype | None = None, max_shard_size: str = "5GB") -> str:
    """Write config.json, weights, generation config and tokenizer into an existing folder; the name of the architecture.

    dtype  None = that of the run, or for a Hugging Face folder the stored type of each tensor.
    Raises ValueError when no architecture of transformers has the model's options, or its tokenizer cannot be loaded.
    """
    from paro_lm.build import DTYPES
    from paro_lm.model.hf.config import read_json
    from paro_lm.model.hf.export import GENERATION_CONFIG, Weights, write_generation_config, write_model

    like: dict[str, Any] | None = source.meta.get("hf_config") if source.hf is None else source.hf.values
    ids = _write_tokenizer(source, folder)

    def dtype_of(name: str) -> torch.dtype:
        if dtype is not None:
            return dtype
        return DTYPES[source.cfg.precision.param_dtype] if source.hf is None else source.hf.dtype_of(name)

    write_model(
        folder,
        source.cfg.model,
        Weights(read=source.read, dtype_of=dtype_of),
        vocab_size=source.vocab_size,
        token_ids=None if ids is None or like is not None else ids.as_config(),
        like=like,
        max_shard_size=max_shard_size,
    )
    original = None if source.hf is None else source.hf.folder / GENERATION_CONFIG
    if original is not None and original.is_file():
        shutil.copyfile(original, folder / GENERATION_CONFIG)
    elif ids is not None:
        write_generation_config(folder, eos=ids.stop, bos=ids.bos, pad=ids.pad)
    return str(read_json(folder / "config.json")["architectures"][0])


def export_adapter(source: Source, target: Path, *, dtype: torch.dtype | None = None) -> int:
    """Write the run's LoRA adapters and its tokenizer as a folder of peft. Raises ValueError when it has none."""
    from paro_lm.build import DTYPES
    from paro_lm.model.hf.adapter import write_adapter
    from paro_lm.model.hf.export import complete_folder

    like, base = source.meta.get("hf_config") or {}, source.cfg.model.init_from
    adapters = source.adapters()
    with complete_folder(target) as folder:
        kind = dtype or DTYPES[source.cfg.precision.param_dtype]
        write_adapter(folder, source.cfg.model, source.cfg.finetune, adapters, dtype=kind, model_type=like.get("model_type"))
        _write_tokenizer(source, folder)
    print(f"{target}: LoRA adapters of {source.path} for {base}, load them with PeftModel.from_pretrained(base_model, {str(target)!r})")
    return 0


def verify(source: Source, folder: Path, dtype: torch.dtype | None) -> float:
    """The largest difference between our logits and those of transformers in fp32, on random tokens.

    Raises ValueError when transformers does not load the folder, misses or does not know a tensor, or the logits differ.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from paro_lm.build import DTYPES
    from paro_lm.restore import load_model

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        raise ValueError(f"verify=true: transformers does not load the exported folder: {error}") from error
    theirs, told = loaded
    wrong = {key: sorted(map(str, told.get(key, ()))) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"verify=true: transformers does not find the tensors that it expects: {wrong}")
    stored = dtype or (DTYPES[source.cfg.precision.param_dtype] if source.hf is None else None)
    ours = load_model(source, device=torch.device("cpu"), dtype=torch.float32, stored=stored)
    length = min(128, source.cfg.model.max_positions)
    tokens = torch.randint(0, source.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs.eval()(tokens).logits, ours(tokens)
    if expected.shape != logits.shape:
        raise ValueError(f"verify=true: transformers gives logits of shape {tuple(expected.shape)}, the model {tuple(logits.shape)}.")
    difference = float((expected - logits).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ValueError(f"verify=true: the logits of transformers differ by {difference:.3g}; nothing was written.")
    return difference


def _write_tokenizer(source: Source, folder: Path) -> Any:
    """Write the tokenizer's files; its special ids, None when the model has no tokenizer."""
    from paro_lm.model.hf.tokenizer import copy_tokenizer, token_ids, write_bytes_tokenizer

    if source.meta["tokenizer"] is None:
        print(f"{source.path} has no tokenizer: the export has none either")
        return None
    tokenizer = source.need_tokenizer()
    if tokenizer == "bytes":
        write_bytes_tokenizer(folder)
    else:
        copy_tokenizer(Path(tokenizer), folder)
    return token_ids(folder)


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
