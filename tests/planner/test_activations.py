"""The bytes that a forward saves, counted by autograd's own hooks, equal the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro_lm.config import ModelConfig
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing
from paro_lm.planner.activations import activations, in_flight

LLAMA = ModelConfig(hidden_size=48, num_layers=2, num_heads=6, ffn_size=104)
GPT2 = ModelConfig(
    hidden_size=64, num_layers=3, num_heads=4, norm="layernorm", activation="gelu", positions="learned", max_positions=64,
    qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
BATCH, LENGTH, VOCAB = 3, 32, 301


def saved_bytes(cfg: ModelConfig, mode: str) -> int:
    """Bytes of distinct storages, other than parameters, that a whole forward with its loss keeps."""
    model = Transformer(cfg, vocab_size=VOCAB).initialize(0)
    apply_activation_checkpointing(model, mode)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    tokens = torch.randint(VOCAB, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, labels=tokens)
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("cfg", [LLAMA, GPT2, replace(LLAMA, qk_norm=True, head_dim=16)], ids=["llama", "gpt2", "qwen"])
def test_saved_bytes_of_a_forward(cfg: ModelConfig, mode: str) -> None:
    """Within 2 % (rotation tables, labels and counters are small and not all counted)."""
    found = activations(cfg, vocab_size=VOCAB, tokens=BATCH * LENGTH, width=4, mode=mode)
    expected = saved_bytes(cfg, mode)
    assert found.embedding + cfg.num_layers * found.block + found.head == pytest.approx(expected, rel=0.02)


def test_full_checkpointing_keeps_the_residual_stream_and_recomputes_the_rest() -> None:
    none, full = (activations(LLAMA, vocab_size=VOCAB, tokens=10, width=2, mode=mode) for mode in ("none", "full"))
    assert full.block == 10 * 48 * 2
    assert full.block + full.block_working == none.block + none.block_working
    assert full.head == none.head


def test_the_head_works_on_logits_or_on_its_matrix() -> None:
    found = activations(LLAMA, vocab_size=256, tokens=10, width=4)
    assert found.working("head", 100) == 10 * 256 * 4  # the loss: logits and their gradient
    assert found.working("head", 100_000) == 10 * 48 * 4 + 100_000  # the projection: the logits are gone
    half = activations(LLAMA, vocab_size=256, tokens=10, width=2)
    assert half.working("head", 100) == 10 * 256 * 2 + 2 * 10 * 256 * 4  # and a block of both in fp32


def test_tensor_parallelism_shards_what_lies_inside_and_sequence_parallelism_the_stream() -> None:
    one, two, both = (
        activations(LLAMA, vocab_size=256, tokens=10, width=2, tp=tp, sequence_parallel=sp)
        for tp, sp in ((1, False), (2, False), (2, True))
    )
    inside = 10 * 2 * (4 * 48 + 4 * 104) + 10 * 4 * 6
    assert one.block - two.block == inside // 2
    assert two.block - both.block == 10 * (2 * 48 * 2 // 2 + 2 * 4 // 2)


def test_micro_batches_in_flight() -> None:
    assert [in_flight("1f1b", stages=4, stage=stage, num_micro_batches=8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight("1f1b", stages=4, stage=0, num_micro_batches=2) == 2
    assert in_flight("gpipe", stages=4, stage=3, num_micro_batches=8) == 8
    assert in_flight("interleaved_1f1b", stages=4, stage=0, num_micro_batches=8, virtual_stages=2) == 6  # 11 of 16 chunks
    assert in_flight("1f1b", stages=1, stage=0, num_micro_batches=8) == 1
