"""Documents, stages, units, dropout, recomputation and kernels of the model, in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paro_lm.config import ModelConfig, RopeScalingConfig
from paro_lm.model.dropout import DropoutState, dropout, dropout_seed
from paro_lm.model.norm import RMSNorm
from paro_lm.model.rope import apply_rope, inverse_frequencies
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing, apply_compile

LLAMA = ModelConfig(hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=40, vocab_divisor=8, init_std=0.3)
GPT2 = ModelConfig(
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    ffn_size=40,
    vocab_divisor=8,
    max_positions=32,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
    init_std=0.3,
)
NO_AXES = (frozenset[str](), frozenset[str]())
VOCAB = 21


def build(cfg: ModelConfig, dtype: torch.dtype = torch.float64, **options: object) -> Transformer:
    return Transformer(cfg, vocab_size=VOCAB, **options).to(dtype).initialize(11)  # type: ignore[arg-type]


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer, **inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(inputs.pop("tokens"), **inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_rms_norm_worked_example_and_gradient() -> None:
    norm = RMSNorm(4, 1e-5, axes=NO_AXES)
    torch.nn.init.ones_(norm.weight)
    torch.testing.assert_close(norm(torch.full((1, 4), 1e-3)), torch.full((1, 4), 0.30151), atol=1e-5, rtol=0)
    x, weight = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)
    norm = norm.double()
    norm.weight.data.copy_(weight)
    assert torch.autograd.gradcheck(norm, (x,))
    torch.testing.assert_close(norm(x), F.rms_norm(x, (4,), weight, 1e-5), atol=1e-14, rtol=1e-14)
    (grad,) = torch.autograd.grad(norm(x).square().sum(), norm.weight)
    expected = weight.clone().requires_grad_()
    (expected_grad,) = torch.autograd.grad(F.rms_norm(x, (4,), expected, 1e-5).square().sum(), expected)
    torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=1e-12)


def test_llama3_frequencies() -> None:
    scaling = RopeScalingConfig(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
    expected = torch.tensor([1, 0.013042256, 0.00125, 0.000125])
    torch.testing.assert_close(inverse_frequencies(8, 1e4, scaling), expected, atol=1e-9, rtol=1e-6)


def test_rotation_is_the_half_layout_and_its_backward_the_inverse() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.arange(5, dtype=torch.float64)[:, None, None] * inverse_frequencies(8, 1e4, RopeScalingConfig()).double()
    rotated = apply_rope(x, angles.cos(), angles.sin())
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotated, torch.cat([as_complex.real, as_complex.imag], -1), atol=1e-14, rtol=0)
    assert torch.autograd.gradcheck(apply_rope, (x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_documents_do_not_see_each_other(cfg: ModelConfig) -> None:
    """Packed documents give the logits of each alone, and those of one do not move when the other does."""
    model = build(cfg)
    first, second = tokens(1, 4), tokens(1, 7, seed=1)
    packed = torch.cat([first, second], 1)
    layout = {
        "documents": torch.tensor([[0] * 4 + [1] * 7]),
        "positions": torch.tensor([[*range(4), *range(7)]]),
    }
    logits = model(packed, **layout)
    torch.testing.assert_close(logits[:, :4], model(first), atol=1e-12, rtol=0)
    torch.testing.assert_close(logits[:, 4:], model(second), atol=1e-12, rtol=0)
    changed = model(torch.cat([(first + 1) % VOCAB, second], 1), **layout)
    assert torch.equal(changed[:, 4:], logits[:, 4:])
    assert (model(packed) - logits)[:, 4:].abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_stages_are_the_model(cfg: ModelConfig, tied: bool) -> None:
    """Two stages with global names: same loss, same gradients; a tied matrix has its gradient in two parts."""
    cfg = dataclasses.replace(cfg, tie_embeddings=tied)
    whole = build(cfg)
    first = build(cfg, layers=range(1), has_head=False)
    last = build(cfg, layers=range(1, cfg.num_layers), has_embedding=False)
    batch, labels = tokens(2, 9), tokens(2, 9, seed=1)
    reference = gradients(whole, tokens=batch, labels=labels)
    last(first(batch), labels=labels).backward()
    parts = [{n: p.grad for n, p in stage.named_parameters()} for stage in (first, last)]
    assert parts[0].keys() | parts[1].keys() == reference.keys()
    assert parts[0].keys() & parts[1].keys() == ({"embedding.tokens.weight"} if tied else set())
    for name, expected in reference.items():
        total = sum(part[name] for part in parts if name in part)
        torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-12)
    whole_values = dict(whole.named_parameters())
    for stage in (first, last):
        assert stage.parameter_specs().keys() == dict(stage.named_parameters()).keys()
        for name, value in stage.named_parameters():
            assert torch.equal(value, whole_values[name])


@pytest.mark.parametrize(("has_embedding", "has_head"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("tied", [False, True])
def test_units_hold_every_parameter_once_and_are_called_once(tied: bool, has_embedding: bool, has_head: bool) -> None:
    cfg = dataclasses.replace(LLAMA, tie_embeddings=tied)
    model = build(cfg, has_embedding=has_embedding, has_head=has_head, layers=range(1, 3))
    units = model.units()
    names = [unit.name for unit in units]
    own_copy = tied and has_head and not has_embedding  # called last, so listed last
    assert names == ["embedding"] * has_embedding + ["layers.1", "layers.2"] + ["head"] * has_head + ["embedding"] * own_copy
    held = [id(p) for unit in units for p in unit.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    calls: list[str] = []
    for unit in units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda *_, name=unit.name: calls.append(name))
    inputs = tokens(1, 5) if has_embedding else torch.randn(1, 5, 24, dtype=torch.float64)
    model(inputs, labels=tokens(1, 5) if has_head else None)
    expected = ["embedding"] * has_embedding + ["layers.1", "layers.2"] + ["head"] * has_head
    assert calls == expected + ["embedding"] * (tied and has_head)


def test_meta_then_materialised_equals_direct() -> None:
    direct = build(LLAMA, torch.float32)
    with torch.device("meta"):
        model = Transformer(LLAMA, vocab_size=VOCAB)
        model.reset_buffers(torch.device("meta"))
    assert list(model.buffers()) == []
    model.to_empty(device="cpu").initialize(11)
    model.reset_buffers(torch.device("cpu"))
    assert torch.equal(model(tokens(2, 6)), direct(tokens(2, 6)))


def test_dtype_of_the_loss() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        model = build(LLAMA, dtype)
        loss = model(tokens(2, 6), labels=tokens(2, 6))
        assert loss.dtype == expected
        assert loss.item() == pytest.approx(build(LLAMA)(tokens(2, 6), labels=tokens(2, 6)).item(), rel=2e-2)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_recomputation_changes_nothing(cfg: ModelConfig, mode: str) -> None:
    """Bitwise, with dropout on, and with another micro-batch's forward between forward and backward."""
    cfg = dataclasses.replace(cfg, dropout=0.3)
    plain, recomputing = build(cfg), build(cfg)
    apply_activation_checkpointing(recomputing, mode)
    calls = []
    recomputing.layers["0"].attention.q.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    losses = []
    for model in (plain, recomputing):
        for seed in (1, 2):
            model.set_dropout_seed(seed)
            losses.append(model(tokens(2, 9, seed=seed), labels=tokens(2, 9)))
        losses[-2].backward()
        losses[-1].backward()
    assert losses[0] == losses[2]
    assert losses[1] == losses[3]
    assert len(calls) == 4
    for (name, a), (_, b) in zip(plain.named_parameters(), recomputing.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]


def test_unknown_recomputation_is_refused() -> None:
    with pytest.raises(ValueError, match="none, full, selective, got 'some'"):
        apply_activation_checkpointing(build(LLAMA), "some")


def test_dropout_repeats_for_its_seed_and_differs_otherwise() -> None:
    model = build(dataclasses.replace(GPT2, dropout=0.5))

    def loss(**place: int) -> float:
        model.set_dropout_seed(dropout_seed(1, **place))
        torch.rand(3)  # the masks do not depend on the default generator
        return model(tokens(2, 9), labels=tokens(2, 9, seed=1)).item()

    places = [{"step": s, "micro_batch": m, "data_rank": d} for s in (0, 1) for m in (0, 1) for d in (0, 1)]
    losses = [loss(**place) for place in places]
    assert len(set(losses)) == len(places)
    assert losses == [loss(**place) for place in places]
    model.eval()
    assert model(tokens(2, 9)).equal(build(GPT2)(tokens(2, 9)))


def test_attention_dropout_leaves_the_default_generator_alone() -> None:
    model = build(dataclasses.replace(LLAMA, dropout=0.5))
    model.set_dropout_seed(3)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    model(tokens(1, 4))
    assert torch.equal(torch.rand(4), expected)


def test_dropout_keeps_the_mean() -> None:
    x = torch.ones(500, 200)
    out = dropout(x, DropoutState(probability=0.3, seed=5), "a", None)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(out, dropout(x, DropoutState(probability=0.3, seed=5), "b", None))


@pytest.mark.slow
def test_compiled_blocks_agree() -> None:
    for cfg in (LLAMA, GPT2):
        plain, compiled = build(cfg, torch.float32), build(cfg, torch.float32)
        apply_activation_checkpointing(compiled, "full")
        apply_compile(compiled)
        inputs = {"tokens": tokens(2, 16), "labels": tokens(2, 16, seed=1)}
        expected, actual = gradients(plain, **dict(inputs)), gradients(compiled, **dict(inputs))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, atol=1e-4, rtol=1e-4)
