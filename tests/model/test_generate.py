"""Generation with the cache equals recomputation of everything, for every way to choose a token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paro_lm.config import ModelConfig
from paro_lm.model.attention import KVCache
from paro_lm.model.generate import filtered_probabilities, generate, sample
from paro_lm.model.transformer import Transformer
from tests.model.test_transformer import GPT2, LLAMA, VOCAB, build, tokens

MODELS = pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])


def recompute(model: Transformer, prompt: list[int], new: int, seed: int, **options: float) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    row = list(prompt)
    for _ in range(new):
        logits = model(torch.tensor([row]))[:, -1]
        row.append(int(sample(logits, generator=generator, **options)))  # type: ignore[arg-type]
    return row


@MODELS
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.7}])
def test_equals_recomputation(cfg: ModelConfig, options: dict[str, float]) -> None:
    model = build(cfg)
    prompt = tokens(1, 6)
    assert generate(model, prompt, max_new_tokens=12, seed=4, **options) == [  # type: ignore[arg-type]
        recompute(model, prompt[0].tolist(), 12, 4, **options)
    ]


@MODELS
def test_cache_gives_the_same_logits_in_any_pieces(cfg: ModelConfig) -> None:
    model, batch = build(cfg).eval(), tokens(2, 11)
    expected = model(batch)
    cache = KVCache(11)
    pieces: list[Tensor] = [model(piece, cache=cache) for piece in batch.split([4, 1, 5, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="holds 11 tokens, got 12"):
        model(batch[:, :1], cache=cache)


@MODELS
def test_unequal_prompts(cfg: ModelConfig) -> None:
    model = build(cfg)
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
    assert generate(model, prompts, max_new_tokens=10) == [recompute(model, prompt, 10, 0) for prompt in prompts]


def test_eos_ends_a_row() -> None:
    model = build(LLAMA)
    prompts = [[3, 1, 4], [9, 2, 6]]
    free = generate(model, prompts, max_new_tokens=12)
    eos = free[0][6]
    expected = [row[: row.index(eos, 3) + 1] if eos in row[3:] else row for row in free]
    for fixed_length in (False, True):
        assert generate(model, prompts, max_new_tokens=12, eos=eos, fixed_length=fixed_length) == expected
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    generate(model, prompts[:1], max_new_tokens=12, eos=eos)
    assert len(calls) == len(expected[0]) - 3
    generate(model, prompts[:1], max_new_tokens=12, eos=eos, fixed_length=True)
    assert len(calls) == len(expected[0]) - 3 + 12


def test_filters() -> None:
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    torch.testing.assert_close(filtered_probabilities(logits, 1.0, 2, 1.0), torch.tensor([[0.625, 0.0, 0.375, 0.0]]))
    torch.testing.assert_close(filtered_probabilities(logits, 1.0, 0, 0.5), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(filtered_probabilities(logits, 1.0, 0, 0.6), torch.tensor([[0.625, 0.0, 0.375, 0.0]]))
    torch.testing.assert_close(filtered_probabilities(logits, 0.5, 0, 1.0), torch.tensor([[0.25, 0.01, 0.09, 0.01]]) / 0.36)


def test_state_of_the_model_is_restored_and_wrong_requests_are_refused() -> None:
    model = build(LLAMA)
    model.train()
    generate(model, [[1]], max_new_tokens=1)
    assert model.training
    assert generate(model, [[1, 2]], max_new_tokens=0) == [[1, 2]]
    with pytest.raises(ValueError, match="empty prompt"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_positions=32"):
        generate(build(GPT2), [[1]], max_new_tokens=32)
    with pytest.raises(ValueError, match="top_p"):
        generate(model, [[1]], max_new_tokens=1, top_p=0.0)
    with pytest.raises(ValueError, match="pipeline stage"):
        generate(build(LLAMA, has_head=False), [[1]], max_new_tokens=1)
    assert all(0 <= t < VOCAB for t in generate(model, [[1]], max_new_tokens=50, temperature=50.0)[0])
