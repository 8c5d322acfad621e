"""Checks of a model's options, alone and against the layout. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from paro_lm.config import ModelConfig, RopeScalingConfig
from paro_lm.model.sizes import ModelSizes


def check_model(cfg: ModelConfig, *, tp: int = 1, seq_length: int | None = None) -> list[str]:
    """All problems of a model that is to run on `tp` tensor-parallel ranks with samples of `seq_length` tokens; empty = it is right."""
    problems = list(_values(cfg))
    if problems:  # what follows divides by these values
        return problems
    return [*_heads(cfg, tp), *_slices(cfg, tp), *_positions(cfg, seq_length)]


def _values(cfg: ModelConfig) -> Iterator[str]:
    yield from _choices("model", cfg)
    yield from _choices("model.rope_scaling", cfg.rope_scaling)
    for key in ("hidden_size", "num_layers", "num_heads", "vocab_divisor", "max_positions"):
        if getattr(cfg, key) < 1:
            yield f"model.{key}: must be at least 1, got {getattr(cfg, key)}"
    for key in ("vocab_size", "head_dim", "ffn_size"):
        value = getattr(cfg, key)
        if value is not None and value < 1:
            yield f"model.{key}: must be at least 1 or null, got {value}"
    if not 0 <= cfg.dropout < 1:
        yield f"model.dropout: must be at least 0 and below 1, got {cfg.dropout}"
    for key in ("norm_eps", "init_std"):
        if getattr(cfg, key) < 0:
            yield f"model.{key}: must be at least 0, got {getattr(cfg, key)}"
    if cfg.positions == "rope" and cfg.rope_theta <= 0:
        yield f"model.rope_theta: must be positive, got {cfg.rope_theta}"
    yield from _rope_scaling(cfg)


def _choices(prefix: str, cfg: ModelConfig | RopeScalingConfig) -> Iterator[str]:
    for item in dataclasses.fields(cfg):
        choices = item.metadata.get("choices")
        if choices and getattr(cfg, item.name) not in choices:
            yield f"{prefix}.{item.name}: must be one of {', '.join(choices)}, got {getattr(cfg, item.name)!r}"


def _rope_scaling(cfg: ModelConfig) -> Iterator[str]:
    scaling = cfg.rope_scaling
    if scaling.type == "none":
        if scaling.factor != 1.0:
            yield f"model.rope_scaling.factor: {scaling.factor} has no effect with model.rope_scaling.type=none; use linear, llama3 or yarn"
        return
    if cfg.positions != "rope":
        yield f"model.rope_scaling.type: {scaling.type} needs model.positions=rope, got {cfg.positions}; use none"
    if scaling.factor <= 0:
        yield f"model.rope_scaling.factor: must be positive, got {scaling.factor}"
    if scaling.type == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        yield (
            "model.rope_scaling.low_freq_factor: must be positive and below model.rope_scaling.high_freq_factor, "
            f"got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        )
    if scaling.type == "yarn":
        yield from _yarn(cfg)
    if scaling.type in ("llama3", "yarn") and scaling.original_max_position < 1:
        yield f"model.rope_scaling.original_max_position: must be at least 1, got {scaling.original_max_position}"


def _yarn(cfg: ModelConfig) -> Iterator[str]:
    scaling = cfg.rope_scaling
    if not 0 < scaling.beta_slow < scaling.beta_fast:
        yield (
            "model.rope_scaling.beta_slow: must be positive and below model.rope_scaling.beta_fast, "
            f"got {scaling.beta_slow} and {scaling.beta_fast}"
        )
    if cfg.rope_theta <= 1:
        yield f"model.rope_theta: must be above 1 with model.rope_scaling.type=yarn, got {cfg.rope_theta}"
    if scaling.attention_factor is not None and scaling.attention_factor <= 0:
        yield f"model.rope_scaling.attention_factor: must be positive, got {scaling.attention_factor}"


def _heads(cfg: ModelConfig, tp: int) -> Iterator[str]:
    heads = cfg.num_heads
    kv_heads = heads if cfg.num_kv_heads is None else cfg.num_kv_heads
    groupings = [k for k in range(1, heads + 1) if heads % k == 0]
    if kv_heads not in groupings:
        choices = ", ".join(map(str, groupings))
        yield f"model.num_kv_heads: must divide model.num_heads={heads}, got {kv_heads}; valid: {choices}, or null"
    if heads % tp:
        choices = ", ".join(str(t) for t in groupings)
        yield f"model.num_heads: {heads} heads cannot be sliced over parallel.tp={tp} ranks; valid parallel.tp for these heads: {choices}"
    elif kv_heads in groupings and kv_heads % tp and tp % kv_heads:
        choices = ", ".join(str(k) for k in groupings if k % tp == 0 or tp % k == 0)
        yield (
            f"model.num_kv_heads: {kv_heads} heads can be neither sliced over parallel.tp={tp} ranks nor shared by them evenly; "
            f"valid for this tp: {choices}"
        )
    if cfg.head_dim is None and cfg.hidden_size % heads:
        yield f"model.hidden_size: {cfg.hidden_size} is not divisible by model.num_heads={heads}; change one, or set model.head_dim"
    elif cfg.positions == "rope" and ModelSizes.of(cfg).head_dim % 2:
        yield f"model.head_dim: rotary positions need an even width, got {ModelSizes.of(cfg).head_dim} (model.num_heads={heads})"


def _slices(cfg: ModelConfig, tp: int) -> Iterator[str]:
    ffn = ModelSizes.of(cfg).ffn_size
    if ffn % tp:
        below = ffn // tp * tp
        yield f"model.ffn_size: {ffn} is not divisible by parallel.tp={tp}; the nearest valid: {below or tp}, {below + tp}"
    if cfg.vocab_divisor % tp:
        above = -(-cfg.vocab_divisor // tp) * tp
        yield f"model.vocab_divisor: {cfg.vocab_divisor} is not divisible by parallel.tp={tp}; the next valid: {above}"


def _positions(cfg: ModelConfig, seq_length: int | None) -> Iterator[str]:
    if seq_length is not None and seq_length > cfg.max_positions:
        yield f"model.max_positions: {cfg.max_positions} is below seq_length={seq_length}; raise it, or shorten the samples"
