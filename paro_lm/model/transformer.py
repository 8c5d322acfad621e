"""The one model class: a decoder-only transformer whose options make it Llama, Qwen, GPT-2 and their relatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paro_lm.config import LossConfig, ModelConfig
from paro_lm.model.attention import Attention, KVCache
from paro_lm.model.dropout import DropoutState, dropout
from paro_lm.model.loss import vocab_parallel_cross_entropy
from paro_lm.model.norm import NORMS
from paro_lm.model.rope import Rope
from paro_lm.model.sizes import ModelSizes
from paro_lm.model.spec import ParameterSpec, SpecifiedModule, Unit, initialize
from paro_lm.parallel.columns import column_linears, column_output
from paro_lm.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    gather_columns,
    residual_axes,
)


class LearnedPositions(SpecifiedModule):
    """A table of position vectors, on the residual stream."""

    def __init__(self, num_positions: int, hidden_size: int, *, std: float, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.std, self.tensor = std, tensor
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        """positions [..., s] of the full sequence -> [..., s or the own shard, h]."""
        if self.tensor is not None and self.tensor.sequence_parallel:
            positions = self.tensor.shard(positions, dim=-1)
        return F.embedding(positions, self.weight)

    def specs(self) -> dict[str, ParameterSpec]:
        partial, replicated = residual_axes(self.tensor)
        shape = (self.weight.shape[0], self.weight.shape[1])
        return {
            "weight": ParameterSpec(
                shape=shape, offset=(0, 0), local_shape=shape, std=self.std, partial_axes=partial, replicated_axes=replicated
            )
        }


class Embedding(nn.Module):
    """Tokens (and learned positions) -> the residual stream [b, s, h]."""

    def __init__(self, cfg: ModelConfig, sizes: ModelSizes, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.tensor = tensor
        self.tokens = _token_table(cfg, sizes, tensor)
        self.positions: LearnedPositions | None = None
        if cfg.positions == "learned":
            self.positions = LearnedPositions(cfg.max_positions, cfg.hidden_size, std=cfg.init_std, tensor=tensor)

    def forward(self, tokens: Tensor, positions: Tensor, state: DropoutState | None = None) -> Tensor:
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        return hidden if state is None else dropout(hidden, state, "embedding", self.tensor)


class MLP(nn.Module):
    """Feed-forward part of a block: down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(self, cfg: ModelConfig, sizes: ModelSizes, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.activation, self.tensor = cfg.activation, tensor

        def projection() -> ColumnParallelLinear:
            return ColumnParallelLinear(cfg.hidden_size, sizes.ffn_size, bias=cfg.mlp_bias, std=cfg.init_std, tensor=tensor)

        if cfg.activation == "swiglu":
            self.gate = projection()
        self.up = projection()
        self.down = RowParallelLinear(sizes.ffn_size, cfg.hidden_size, bias=cfg.mlp_bias, std=sizes.output_std, tensor=tensor)

    def forward(self, x: Tensor, state: DropoutState | None = None) -> Tensor:
        if self.activation == "swiglu":
            gate, up = column_linears(x, (self.gate, self.up), state)
            inner = F.silu(gate) * up
        else:
            (up,) = column_linears(x, (self.up,), state)
            inner = F.gelu(up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down(inner, state)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, sizes: ModelSizes, layer: int, tensor: TensorParallel | None) -> None:
        super().__init__()
        self.layer, self.tensor = layer, tensor
        norm = NORMS[cfg.norm]
        self.attention_norm = norm(cfg.hidden_size, cfg.norm_eps, axes=residual_axes(tensor))
        self.attention = Attention(cfg, sizes, layer, tensor)
        self.mlp_norm = norm(cfg.hidden_size, cfg.norm_eps, axes=residual_axes(tensor))
        self.mlp = MLP(cfg, sizes, tensor)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        state: DropoutState | None = None,
    ) -> Tensor:
        branch = self.attention(self.attention_norm(hidden), rotation, mask, cache, state)
        if state is not None:
            branch = dropout(branch, state, f"layers.{self.layer}.attention_residual", self.tensor)
        hidden = hidden + branch
        branch = self.mlp(self.mlp_norm(hidden), state)
        if state is not None:
            branch = dropout(branch, state, f"layers.{self.layer}.mlp_residual", self.tensor)
        return hidden + branch


class Head(nn.Module):
    """Final norm and, when the embedding is not tied, the output projection with its loss."""

    def __init__(self, cfg: ModelConfig, sizes: ModelSizes, tensor: TensorParallel | None, loss: LossConfig) -> None:
        super().__init__()
        self.vocab_size, self.tensor, self.loss = sizes.vocab_size, tensor, loss
        self.norm = NORMS[cfg.norm](cfg.hidden_size, cfg.norm_eps, axes=residual_axes(tensor))
        self.output: ColumnParallelLinear | None = None
        if not cfg.tie_embeddings:
            self.output = ColumnParallelLinear(
                cfg.hidden_size, sizes.padded_vocab, bias=False, std=cfg.init_std, tensor=tensor, valid_rows=sizes.vocab_size
            )

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Loss or logits; the normed hidden states when the projection is the tied one."""
        hidden = self.norm(hidden)
        if self.output is None:
            return hidden
        return _score(hidden, self.output.weight, labels, self.vocab_size, self.tensor, self.loss if self.training else LossConfig())


class TiedOutput(nn.Module):
    """Output projection with the embedding's matrix and its loss.

    On a stage that holds the embedding it only refers to the table; on a last stage without one it owns its copy.
    """

    def __init__(self, tokens: VocabParallelEmbedding, loss: LossConfig, *, owner: bool) -> None:
        super().__init__()
        self.loss = loss
        self.tokens = tokens if owner else None
        # inside a tuple it is no child, so its parameters keep one name
        self._reference: tuple[VocabParallelEmbedding, ...] = () if owner else (tokens,)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        table = self._reference[0] if self.tokens is None else self.tokens
        return _score(hidden, table.weight, labels, table.vocab_size, table.tensor, self.loss if self.training else LossConfig())


class Transformer(nn.Module):
    """Tokens to the summed loss, or to logits; or, as a pipeline stage, a range of the layers.

    Parameter names are global: `layers` is keyed by the global layer index. The parameters hold nothing useful until
    `initialize(seed)` or a checkpoint fills them. `set_dropout_seed` fixes the dropout masks of the forwards that follow.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        vocab_size: int,
        tensor: TensorParallel | None = None,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        loss: LossConfig | None = None,
    ) -> None:
        super().__init__()
        loss = loss or LossConfig()
        self.cfg, self.sizes = cfg, ModelSizes.of(cfg, vocab_size)
        self.tensor = tensor = None if tensor is None or tensor.size == 1 else tensor
        self.has_embedding, self.has_head = has_embedding, has_head
        self.rope = Rope(self.sizes.head_dim, cfg.rope_theta, cfg.rope_scaling) if cfg.positions == "rope" else None
        self._dropout_seed: int | None = None
        self.adapter_dropout = 0.0

        tied = cfg.tie_embeddings and has_head
        if has_embedding:
            self.embedding: nn.Module = Embedding(cfg, self.sizes, tensor)
        elif tied:  # the last stage's copy, under the name that the embedding's matrix has everywhere
            self.embedding = TiedOutput(_token_table(cfg, self.sizes, tensor), loss, owner=True)
        chosen = range(cfg.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): Block(cfg, self.sizes, i, tensor) for i in chosen})
        if has_head:
            self.head = Head(cfg, self.sizes, tensor, loss)
        if tied and has_embedding:
            assert isinstance(self.embedding, Embedding)
            self.output = TiedOutput(self.embedding.tokens, loss, owner=False)

    def forward(
        self,
        inputs: Tensor,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """`inputs`: tokens [b, s], or on later stages hidden states [b, s, h] (s / tp with sequence parallelism).

        With `labels` [b, s] the sum of the token losses (-100: none), in training mode with what `loss` adds; without them logits
        [b, s, vocab_size]; on a stage without head hidden states. `positions` [b, s] default to 0.. (on from the cache); tokens
        attend only within their document of `documents` [b, s].
        """
        length = inputs.shape[1]
        if self.tensor is not None:
            if not self.has_embedding and self.tensor.sequence_parallel:
                length *= self.tensor.size
            self.tensor.check_sequence(length)
        seen = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(seen, seen + length, device=inputs.device)
        state = self._dropout_state()
        hidden = self.embedding(inputs, positions, state) if self.has_embedding else inputs
        rotation = None if self.rope is None else self.rope(positions, hidden.dtype)
        mask = _attention_mask(documents, length, cache, self.cfg.sliding_window, inputs.device)
        for block in self.layers.values():
            hidden = block(hidden, rotation, mask, cache, state)
        if cache is not None:
            cache.length += length
        return self._finish(hidden, labels) if self.has_head else hidden

    def _finish(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        if not self.cfg.tie_embeddings:
            return self.head(hidden, labels)
        return self._tied_output()(self.head(hidden), labels)

    def _tied_output(self) -> nn.Module:
        return self.output if self.has_embedding else self.embedding

    def units(self) -> list[Unit]:
        """Units in the order of the forward. A tied matrix is unit `embedding`, which the embedding and the output projection use."""
        units = []
        tied = self.cfg.tie_embeddings and self.has_head
        if self.has_embedding:
            units.append(Unit(name="embedding", modules=(self.embedding, *((self._tied_output(),) if tied else ()))))
        units += [Unit(name=f"layers.{i}", modules=(block,)) for i, block in self.layers.items()]
        if self.has_head:
            units.append(Unit(name="head", modules=(self.head,)))
        if tied and not self.has_embedding:
            units.append(Unit(name="embedding", modules=(self.embedding,)))
        return units

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        """The spec of every parameter of this stage, by its global name; a tied matrix appears once."""
        specs = {}
        for prefix, module in self.named_modules():
            if isinstance(module, SpecifiedModule):
                specs.update({f"{prefix}.{name}": spec for name, spec in module.specs().items()})
        return specs

    def initialize(self, seed: int) -> Transformer:
        """Fill materialised parameters in place with the values that (seed, global name) define."""
        initialize(self.named_parameters(), self.parameter_specs(), seed)
        return self

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute what is neither parameter nor state (rotary frequencies) on `device`, after materialisation from meta."""
        if self.rope is not None:
            self.rope.reset(device)

    def set_dropout_seed(self, seed: int) -> None:
        """Fix the masks of every forward from now on: a function of `seed`, the region, and the shard where regions are sharded.

        The trainer passes `dropout_seed(seed, step=, micro_batch=, data_rank=)` before each micro-batch. Without a call every
        forward draws its seed from torch's default generator. The recomputation of a forward uses the seed of that forward.
        """
        self._dropout_seed = seed

    def _dropout_state(self) -> DropoutState | None:
        if not self.training or self.cfg.dropout == self.adapter_dropout == 0.0:
            return None
        seed = int(torch.randint(1 << 62, ())) if self._dropout_seed is None else self._dropout_seed
        return DropoutState(probability=self.cfg.dropout, seed=seed, adapters=self.adapter_dropout)


def _token_table(cfg: ModelConfig, sizes: ModelSizes, tensor: TensorParallel | None) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(sizes.vocab_size, sizes.padded_vocab, cfg.hidden_size, std=cfg.init_std, tensor=tensor)


def _score(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, vocab_size: int, tensor: TensorParallel | None, loss: LossConfig
) -> Tensor:
    logits = column_output(hidden, weight, tensor)
    if labels is None:
        return gather_columns(logits, tensor)[..., :vocab_size]
    return vocab_parallel_cross_entropy(
        logits, labels, vocab_size=vocab_size, tensor=tensor, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss
    )


def _attention_mask(
    documents: Tensor | None, length: int, cache: KVCache | None, window: int | None, device: torch.device
) -> Tensor | None:
    """True where a query [b or 1, 1, s, 1] may see a key [b or 1, 1, 1, seen + s]; None where plain causal attention is meant."""
    seen = 0 if cache is None else cache.length
    is_windowed = window is not None and seen + length > window
    if documents is None and not is_windowed and (seen == 0 or length == 1):
        return None
    causal = None
    if length > 1 or is_windowed:
        causal = torch.ones(length, seen + length, dtype=torch.bool, device=device).tril(seen)
        if window is not None:
            causal = causal.triu(seen - window + 1)
    if documents is None:
        return causal
    keys = documents
    if cache is not None:
        keys = documents if cache.documents is None else torch.cat([cache.documents, documents], dim=1)
        cache.documents = keys
    same = documents[:, None, :, None] == keys[:, None, None, :]
    return same if causal is None else same & causal
