"""Adapters: what they hold and compute, and their dropout."""

from __future__ import annotations

import math

import pytest
import torch

from paro_lm.config import FinetuneConfig, ModelConfig
from paro_lm.finetune import prepare_model
from paro_lm.model.lora import add_adapters, read_merged
from paro_lm.model.spec import initial_value
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing

MODEL = ModelConfig(hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=40, vocab_divisor=2)
TARGETS = ("q", "k", "down")
VOCAB = 31


def make(probability: float = 0.0, checkpointing: str = "none") -> Transformer:
    """A model with adapters that do something."""
    model = Transformer(MODEL, vocab_size=VOCAB)
    prepare_model(model, FinetuneConfig(lora_rank=5, lora_alpha=20, lora_dropout=probability, lora_targets=list(TARGETS)))
    model.initialize(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.b"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    apply_activation_checkpointing(model, checkpointing)
    return model.double()


def tokens() -> torch.Tensor:
    return torch.arange(26).view(2, 13) * 5 % VOCAB


def test_names_shapes_and_first_values() -> None:
    model = Transformer(MODEL, vocab_size=VOCAB)
    before = dict(model.parameter_specs())
    prepare_model(model, FinetuneConfig(lora_rank=5, lora_targets=list(TARGETS)))
    specs = model.parameter_specs()
    assert {name: spec for name, spec in specs.items() if ".lora." not in name} == before
    added = {name: spec.shape for name, spec in specs.items() if ".lora." in name and name.startswith("layers.1.")}
    assert added == {
        "layers.1.attention.q.lora.a": (5, 24), "layers.1.attention.q.lora.b": (24, 5), "layers.1.attention.k.lora.a": (5, 24),
        "layers.1.attention.k.lora.b": (12, 5), "layers.1.mlp.down.lora.a": (5, 40), "layers.1.mlp.down.lora.b": (24, 5),
    }  # fmt: skip
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {name for name in specs if ".lora." in name}
    model.initialize(3)
    values = dict(model.named_parameters())
    assert not values["layers.1.mlp.down.lora.b"].any()
    name = "layers.1.mlp.down.lora.a"
    assert torch.equal(values[name], initial_value(name, specs[name], 3))
    assert not torch.equal(values[name], values["layers.0.mlp.down.lora.a"])
    assert abs(float(values[name].detach().std()) * math.sqrt(3 * 40) - 1) < 0.15
    plain = Transformer(MODEL, vocab_size=VOCAB).initialize(3)
    assert torch.equal(plain(tokens()), model(tokens()))  # B is zero


def test_adapters_add_a_low_rank_product() -> None:
    model = make()
    values = dict(model.named_parameters())
    plain = Transformer(MODEL, vocab_size=VOCAB).double()
    merged = read_merged(
        lambda names: {name: values[name].detach() for name in names}, [name for name, _ in plain.named_parameters()], values, scale=4.0
    )
    name = "layers.0.attention.k"
    product = 4.0 * values[f"{name}.lora.b"] @ values[f"{name}.lora.a"]
    torch.testing.assert_close(merged[f"{name}.weight"], values[f"{name}.weight"] + product)
    assert torch.equal(merged["layers.0.attention.v.weight"], values["layers.0.attention.v.weight"])
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(tokens()), model(tokens()), rtol=0, atol=1e-10)


def test_dropout_of_adapters_follows_from_the_seed() -> None:
    model, off = make(0.5), make()

    def logits(seed: int) -> torch.Tensor:
        model.set_dropout_seed(seed)
        return model(tokens())

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    assert not torch.allclose(logits(1), off(tokens()))
    model.eval()
    assert torch.equal(logits(1), off.eval()(tokens()))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_repeats_their_dropout(mode: str) -> None:
    gradients = []
    for checkpointing in ("none", mode):
        model = make(0.5, checkpointing)
        model.set_dropout_seed(1)
        loss = model(tokens(), labels=tokens())
        model.set_dropout_seed(2)  # of the next micro-batch; the recomputation uses that of its forward
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradient is None) is (".lora." not in name)
        if gradient is not None:
            assert torch.equal(gradient, gradients[1][name]), name


def test_targets_that_the_model_does_not_have() -> None:
    model = Transformer(ModelConfig(hidden_size=24, num_layers=1, num_heads=4, activation="gelu"), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="finetune.lora_targets: the model has no gate in its blocks"):
        add_adapters(model, rank=2, alpha=2, probability=0.0, targets=["q", "gate"])
