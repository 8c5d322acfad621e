"""Bytes that a forward keeps for its backward, per unit and micro-batch, and what the backward needs on top while it runs.

Counted from what this package's modules save: norms keep their input and a scale, projections their input, the fused attention
q, k, v, its output and a log-sum per head, SwiGLU gate, up, silu(gate) and their product (GELU: up and gelu(up)), the loss its logits.
Dropout masks and unfused attention (its s x s weights) are not counted. Sizes are those of one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from paro_lm.config import ModelConfig
from paro_lm.model.sizes import ModelSizes

LOSS_BLOCK_ELEMENTS = 1 << 25
"""Logits that the loss converts to fp32 at a time on an accelerator (`model.loss`)."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one micro-batch: what each kind of unit saves, and its working memory in backward (recomputation included).

    The head's backward has two stages: that of the loss (`head_loss`: the gradient of the logits beside the logits), and that of the
    projection (`head_projection`), when the logits are gone: their gradient has taken their place.
    """

    embedding: int
    block: int
    head: int
    block_working: int
    head_loss: int
    head_projection: int

    def saved(self, kind: str) -> int:
        return {"embedding": self.embedding, "block": self.block, "head": self.head}[kind]

    def working(self, kind: str, largest: int) -> int:
        """What the backward needs beyond what is saved; `largest`: bytes of the largest gradient that a product writes."""
        if kind == "head":
            return max(self.head_loss, self.head_projection + largest)
        return largest + (self.block_working if kind == "block" else 0)


def activations(
    cfg: ModelConfig, *, vocab_size: int, tokens: int, width: int, tp: int = 1, sequence_parallel: bool = False, mode: str = "none"
) -> Activations:
    """For `tokens` tokens per micro-batch and `width` bytes per element; `mode` is none, selective or full checkpointing."""
    assert mode in ("none", "selective", "full"), mode
    sizes = ModelSizes.of(cfg, vocab_size)
    hidden, shards = cfg.hidden_size * width, tp if sequence_parallel and tp > 1 else 1
    precise = max(width, 4)
    stream = hidden // shards  # the residual stream of a token
    scale = precise * (2 if cfg.norm == "layernorm" else 1) // shards
    attention, mlp = _attention(cfg, sizes, tp, width, precise), _mlp(cfg, sizes, tp, width)
    everything = 2 * (stream + scale + hidden) + attention + mlp
    kept = {
        "none": everything,
        "selective": everything - attention - (hidden - stream),  # its input is kept as it comes, before it is gathered
        "full": stream,
    }[mode]
    recomputed = everything - kept
    gradients = mlp * 3 // 4 + 2 * hidden
    logits = sizes.padded_vocab // tp * width
    loss_block = min(tokens * logits // width, LOSS_BLOCK_ELEMENTS) * 4 * 2 if width < 4 else 0
    return Activations(
        embedding=tokens * 8,
        block=tokens * kept,
        head=tokens * (stream + scale + hidden + logits + 8 + 8 + precise + 1),
        block_working=tokens * (recomputed + gradients),
        head_loss=tokens * logits + loss_block,
        head_projection=tokens * hidden,
    )


def _attention(cfg: ModelConfig, sizes: ModelSizes, tp: int, width: int, precise: int) -> int:
    query = sizes.query_size // tp
    key = max(sizes.kv_size // tp, sizes.head_dim)
    heads = sizes.num_heads // tp
    saved = (2 * query + 2 * key) * width + heads * 4
    if cfg.qk_norm:
        saved += (query + key) * width + (heads + key // sizes.head_dim) * precise
    return saved


def _mlp(cfg: ModelConfig, sizes: ModelSizes, tp: int, width: int) -> int:
    return (4 if cfg.activation == "swiglu" else 2) * (sizes.ffn_size // tp) * width


def in_flight(schedule: str, *, stages: int, stage: int, num_micro_batches: int, virtual_stages: int = 1) -> int:
    """Micro-batches whose activations a stage holds at once, in whole stages (a chunk of an interleaved stage counts its share).

    gpipe and looped_bfs hold all; 1F1B those between a stage and the last; interleaved and ZBV schedules their published warm-up.
    """
    if stages == 1:
        return 1
    if schedule in ("gpipe", "looped_bfs"):
        return num_micro_batches
    if schedule == "1f1b":
        return min(stages - stage, num_micro_batches)
    if schedule == "zbv":
        return min(stages, num_micro_batches)
    chunks = min(2 * (stages - stage - 1) + (virtual_stages - 1) * stages + 1, num_micro_batches * virtual_stages)
    return -(-chunks // virtual_stages)
