"""Exact counts of parameters and floating-point operations, from options alone."""

from __future__ import annotations

from dataclasses import dataclass

from paro_lm.config import ModelConfig
from paro_lm.model.sizes import ModelSizes


def model_flops(cfg: ModelConfig, *, vocab_size: int | None = None, seq_length: int, num_samples: int = 1) -> int:
    """FLOPs of forward and backward of `num_samples` samples of `seq_length` tokens, the numerator of MFU.

    6 B s [L (h (q + 2k) + q h + E h f) + h V] + 6 L q B s^2, with q and k the widths of queries and keys and E = 3 for SwiGLU, else 2:
    the causal half of attention counts (of it what lies in a sliding window), recomputation, norms and table look-ups do not. V is
    taken as given, without padding.
    """
    sizes = ModelSizes.of(cfg, vocab_size)
    head = cfg.hidden_size * sizes.vocab_size
    weights = cfg.num_layers * _block_matrices(cfg, sizes) + head
    attention = cfg.num_layers * attention_weights(cfg, sizes, seq_length)
    return round(6 * num_samples * seq_length * (weights + attention))


def attention_weights(cfg: ModelConfig, sizes: ModelSizes, seq_length: int) -> float:
    """Scores and weighted sums of one layer, as if they were weights of a linear layer: a token's FLOPs are twice as many in forward.

    q s for causal attention, where a token sees s / 2 others on average; q (2 w - w^2 / s) in a sliding window of w < s tokens.
    """
    window = min(cfg.sliding_window or seq_length, seq_length)
    return sizes.query_size * (2 * window - window**2 / seq_length)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Elements of the whole model, by unit. A tied head matrix counts once, in `embedding`."""

    embedding: int
    block: int
    num_layers: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.num_layers * self.block + self.head


def count_parameters(cfg: ModelConfig, *, vocab_size: int | None = None, padded: bool = False) -> ParameterCounts:
    """Parameters of the model; `padded` includes the padding rows of the vocabulary, as ranks hold them."""
    sizes = ModelSizes.of(cfg, vocab_size)
    hidden = cfg.hidden_size
    table = hidden * (sizes.padded_vocab if padded else sizes.vocab_size)
    norm = hidden * (2 if cfg.norm == "layernorm" else 1)
    block = _block_matrices(cfg, sizes) + 2 * norm
    block += (sizes.query_size + 2 * sizes.kv_size) * cfg.qkv_bias + hidden * cfg.out_bias + 2 * sizes.head_dim * cfg.qk_norm
    block += (hidden + sizes.ffn_size * (_mlp_matrices(cfg) - 1)) * cfg.mlp_bias
    return ParameterCounts(
        embedding=table + (cfg.max_positions * hidden if cfg.positions == "learned" else 0),
        block=block,
        num_layers=cfg.num_layers,
        head=norm + (0 if cfg.tie_embeddings else table),
    )


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Model FLOPs per sample of the parts of a model, for balancing pipeline stages; a table look-up is one per element."""

    embedding: float
    block: float
    head: float


def layer_costs(cfg: ModelConfig, *, vocab_size: int | None = None, seq_length: int) -> LayerCosts:
    """Forward and backward FLOPs of the embedding, one block, and the head; their sum over the model is `model_flops` and look-ups."""
    sizes = ModelSizes.of(cfg, vocab_size)
    block = 6 * seq_length * (_block_matrices(cfg, sizes) + attention_weights(cfg, sizes, seq_length))
    return LayerCosts(embedding=seq_length * cfg.hidden_size, block=block, head=6 * seq_length * cfg.hidden_size * sizes.vocab_size)


def _mlp_matrices(cfg: ModelConfig) -> int:
    return 3 if cfg.activation == "swiglu" else 2


def _block_matrices(cfg: ModelConfig, sizes: ModelSizes) -> int:
    attention = cfg.hidden_size * (sizes.query_size + 2 * sizes.kv_size) + sizes.query_size * cfg.hidden_size
    return attention + _mlp_matrices(cfg) * cfg.hidden_size * sizes.ffn_size
