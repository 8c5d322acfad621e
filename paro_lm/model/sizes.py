"""The sizes that follow from a model's options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paro_lm.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Options of `ModelConfig` with their defaults filled in. `padded_vocab` does not depend on the layout."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    padded_vocab: int
    output_std: float  # of the projections that write to the residual stream

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, cfg: ModelConfig, vocab_size: int | None = None) -> ModelSizes:
        """`vocab_size` null takes the config's (0 when that is null too)."""
        vocab = (cfg.vocab_size or 0) if vocab_size is None else vocab_size
        return cls(
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_heads if cfg.num_kv_heads is None else cfg.num_kv_heads,
            head_dim=cfg.hidden_size // cfg.num_heads if cfg.head_dim is None else cfg.head_dim,
            ffn_size=default_ffn_size(cfg) if cfg.ffn_size is None else cfg.ffn_size,
            vocab_size=vocab,
            padded_vocab=-(-vocab // cfg.vocab_divisor) * cfg.vocab_divisor,
            output_std=cfg.init_std / math.sqrt(2 * cfg.num_layers),
        )


def default_ffn_size(cfg: ModelConfig) -> int:
    """4 hidden for gelu; 8/3 hidden rounded up to 64 for swiglu, which has three matrices."""
    if cfg.activation == "swiglu":
        return -(-8 * cfg.hidden_size // (3 * 64)) * 64
    return 4 * cfg.hidden_size
