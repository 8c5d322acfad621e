"""Causal grouped-query attention with sliced heads, and the cache of keys and values for generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paro_lm.config import ModelConfig
from paro_lm.model.dropout import DropoutState, seeded
from paro_lm.model.norm import RMSNorm
from paro_lm.model.rope import apply_rope
from paro_lm.model.sizes import ModelSizes
from paro_lm.model.spec import NO_AXES, TP_AXES
from paro_lm.parallel.columns import column_linears
from paro_lm.parallel.tensor import ColumnParallelLinear, RowParallelLinear, TensorParallel


class KVCache:
    """Keys and values of what was seen so far, for one batch: per layer [batch, kv heads, capacity, head_dim].

    `documents` [batch, seen] holds the document of every token seen, when documents are given.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.documents: Tensor | None = None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the newest keys and values of a layer; all of them so far. The forward advances `length` after its last layer."""
        if layer not in self.layers:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.layers[layer] = keys.new_empty(shape), values.new_empty(shape)
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, got {stop}; create it larger")
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[:, :, self.length : stop] = new
        stored_keys, stored_values = self.layers[layer]
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]


class Attention(nn.Module):
    """Self-attention of one block. Query, key and value are weights of their own; tp slices heads."""

    def __init__(self, cfg: ModelConfig, sizes: ModelSizes, layer: int, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.layer, self.tensor = layer, tensor
        self.head_dim, hidden = sizes.head_dim, cfg.hidden_size
        query, key = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        tp = 1 if tensor is None else tensor.size
        if sizes.num_heads % tp:
            raise ValueError(f"model.num_heads={sizes.num_heads} heads cannot be sliced over parallel.tp={tp} ranks")

        def projection(features: int, heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden, features, bias=cfg.qkv_bias, std=cfg.init_std, tensor=tensor, num_blocks=heads)

        self.q = projection(query, sizes.num_heads)
        self.k, self.v = (projection(key, sizes.num_kv_heads) for _ in range(2))
        self.o = RowParallelLinear(query, hidden, bias=cfg.out_bias, std=sizes.output_std, tensor=tensor)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if cfg.qk_norm:  # each rank normalises its own heads with a full copy of the weight
            axes = (NO_AXES, NO_AXES) if tensor is None else (TP_AXES, TP_AXES)
            self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, cfg.norm_eps, axes=axes) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        dropout: DropoutState | None = None,
    ) -> Tensor:
        """x [b, s, h] (the own sequence shard under sequence parallelism) -> the same shape."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in column_linears(x, (self.q, self.k, self.v), dropout))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        output = self.attend(q, k, v, mask, dropout)
        return self.o(output.transpose(1, 2).flatten(2), dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutState | None) -> Tensor:
        """[b, heads, s, d] each; without a mask causal, where a single query sees everything."""
        grouped = q.shape[1] != k.shape[1]
        if grouped and mask is not None and q.device.type != "cpu":
            # the kernels that take a mask do not group; without this an unfused fallback would run
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        causal = mask is None and q.shape[2] > 1
        if dropout is None or dropout.probability == 0.0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self._attend_with_dropout(q, k, v, mask, causal, grouped, dropout)

    @torch.compiler.disable
    def _attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool, dropout: DropoutState
    ) -> Tensor:
        with seeded(dropout, f"layers.{self.layer}.attention", self.tensor, q.device):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout.probability, is_causal=causal, enable_gqa=grouped
            )
