"""LoRA adapters in the format of peft, so that `PeftModel.from_pretrained(base, folder)` loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paro_lm.config import FinetuneConfig, ModelConfig
from paro_lm.model.hf.export import write_json
from paro_lm.model.hf.families import Family, family_of
from paro_lm.model.lora import A, B


def write_adapter(
    folder: Path, cfg: ModelConfig, tune: FinetuneConfig, adapters: Mapping[str, Tensor], *, dtype: torch.dtype, model_type: str | None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing folder.

    adapters    whole factors by our names
    Where the family keeps several of our linears in one (q, k and v of GPT-2), their adapters become one of the sum of their ranks.
    """
    from safetensors.torch import save_file

    family = family_of(cfg, model_type)
    linears = sorted({name.rpartition(".lora.")[0] for name in adapters})
    modules: dict[str, dict[int, str]] = {}
    for linear in linears:
        place = family.place(f"{linear}.weight")
        modules.setdefault(place.name.removesuffix(".weight"), {})[place.part] = linear
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module, parts in modules.items():
        a, b = _joined(family, parts, adapters)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype).contiguous()
        ranks[".".join(module.split(".")[-2:])] = a.shape[0]
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", _values(family, cfg, tune, ranks, linears))


def _joined(family: Family, parts: Mapping[int, str], adapters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of a stored linear; B is block-diagonal where it has several parts."""
    count = family.place(f"{next(iter(parts.values()))}.weight").parts
    factors = {part: (adapters[linear + A], adapters[linear + B]) for part, linear in sorted(parts.items())}
    if count == 1:
        return next(iter(factors.values()))
    rows, rank = next(iter(factors.values()))[1].shape
    b = next(iter(factors.values()))[1].new_zeros(count * rows, rank * len(factors))
    for index, (part, (_, block)) in enumerate(factors.items()):
        b[part * rows : (part + 1) * rows, index * rank : (index + 1) * rank] = block
    return torch.cat([a for a, _ in factors.values()]), b


def _values(family: Family, cfg: ModelConfig, tune: FinetuneConfig, ranks: Mapping[str, int], linears: list[str]) -> dict[str, Any]:
    others = {name: rank for name, rank in ranks.items() if rank != tune.lora_rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.init_from,
        "r": tune.lora_rank,
        "lora_alpha": tune.lora_alpha,
        "lora_dropout": tune.lora_dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: tune.lora_alpha * rank / tune.lora_rank for name, rank in others.items()},
        "fan_in_fan_out": any(family.place(f"{linear}.weight").transposed for linear in linears),
        "bias": "none",
        "inference_mode": True,
    }
