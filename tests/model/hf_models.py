"""Tiny random models of every supported architecture, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 50
LENGTH = 41
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**LLAMA, "rms_norm_eps": 1e-5}),
    "llama_tied_head_dim": ("llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 8}),
    "llama_linear": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {**LLAMA, "head_dim": 8, "rope_parameters": YARN | {"truncate": False, "beta_fast": 3.0}}),
    "llama_8_heads": ("llama", {**LLAMA, "hidden_size": 32, "num_attention_heads": 8, "head_dim": 8}),
    "llama_biases": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": None}),
    "mistral_window": ("mistral", {**LLAMA, "sliding_window": 7}),
    "qwen2": ("qwen2", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 8}),
    "qwen3_yarn": ("qwen3", {**LLAMA, "head_dim": 8, "rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}}),
    "qwen3_tied": ("qwen3", {**LLAMA, "head_dim": 6, "tie_word_embeddings": True, "attention_bias": True}),
    "gpt2": ("gpt2", GPT2),
    "gpt2_untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 24, "activation_function": "gelu"}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model, every parameter random (norms around 1), in evaluation mode; `changes` to the options of its config."""
    model_type, options = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**options, "bos_token_id": 1, "eos_token_id": 2, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return model.to(dtype)


def save_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write the model as transformers does, and return it."""
    model = make_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a folder."""
    from safetensors.torch import load_file

    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
