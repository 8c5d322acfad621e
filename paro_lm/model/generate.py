"""Text generation with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from paro_lm.model.attention import KVCache
from paro_lm.model.transformer import Transformer

PADDING_DOCUMENT = -1


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: int | None = None,
    seed: int = 0,
    fixed_length: bool = False,
) -> list[list[int]]:
    """Continue prompts ([b, s], or lists of unequal lengths): each prompt with its new tokens, up to and including `eos`.

    Temperature 0 takes the likeliest token; else tokens are drawn among the `top_k` likeliest (0: all) and the fewest whose
    probability reaches `top_p`. Equal seeds give equal texts, also on all tensor-parallel ranks. With parameters that are gathered
    at use, all ranks must run equally many forwards: give all the same prompts, or `fixed_length`, which does not stop at `eos`.
    """
    prompts = [list(map(int, row)) for row in tokens]
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p)
    device = next(model.parameters()).device
    inputs, positions, documents = _pad_left(prompts, device)
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(inputs.shape[1] + max_new_tokens)
    rows: list[list[int]] = [[] for _ in prompts]
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    with _inference(model):
        for _ in range(max_new_tokens):
            logits = model(inputs, positions=positions, documents=documents, cache=cache)[:, -1]
            chosen = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            for row, token, over in zip(rows, chosen.tolist(), ended.tolist(), strict=True):
                if not over:
                    row.append(token)
            if eos is not None:
                ended |= chosen == eos
                if not fixed_length and bool(ended.all()):
                    break
            inputs, positions = chosen.unsqueeze(1), None if positions is None else positions[:, -1:] + 1
            documents = None if documents is None else torch.zeros_like(inputs)
    return [prompt + row for prompt, row in zip(prompts, rows, strict=True)]


def sample(
    logits: Tensor, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """One token per row of logits [b, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(filtered_probabilities(logits, temperature, top_k, top_p), 1, generator=generator).squeeze(1)


def filtered_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """softmax(logits / temperature) in fp32 of the tokens that remain after top-k and then top-p; 0 for the others."""
    scaled = logits.float() / temperature
    if 0 < top_k < scaled.shape[-1]:
        smallest = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        enough = ordered.cumsum(dim=-1) - ordered >= top_p  # what comes before a token reaches top_p already
        probabilities = probabilities.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def _check(model: Transformer, prompts: list[list[int]], new: int, temperature: float, top_k: int, top_p: float) -> None:
    if not (model.has_embedding and model.has_head):
        raise ValueError("generate needs the whole model, got a pipeline stage; load the checkpoint with parallel.pp=1")
    if not prompts or not all(prompts):
        raise ValueError("generate needs at least one token in every prompt, got an empty prompt; start with the end-of-document token")
    longest = max(map(len, prompts))
    if longest + new > model.cfg.max_positions:
        raise ValueError(
            f"model.max_positions={model.cfg.max_positions} is below the prompt of {longest} tokens and {new} new ones; shorten either"
        )
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1 or new < 0:
        raise ValueError(
            "generate needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and max_new_tokens >= 0, "
            f"got {temperature}, {top_k}, {top_p} and {new}"
        )


def _pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens, positions and documents; padding is a document of its own, which no token of a prompt attends to."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    missing = torch.tensor([longest - len(p) for p in prompts], device=device).unsqueeze(1)
    if not missing.any():
        return padded, None, None
    positions = torch.arange(longest, device=device) - missing
    return padded, positions.clamp(min=0), torch.where(positions < 0, PADDING_DOCUMENT, 0)


@contextmanager
def _inference(model: Transformer) -> Iterator[None]:
    """Evaluation mode, and no sequence parallelism: a single token cannot be split."""
    training = model.training
    model.eval()
    try:
        with nullcontext() if model.tensor is None else model.tensor.no_sequence_parallel():
            yield
    finally:
        model.train(training)
