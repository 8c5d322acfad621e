"""Initial values: a function of (seed, name), whatever box a rank holds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from paro_lm.config import ModelConfig
from paro_lm.model.spec import ParameterSpec, initial_value
from paro_lm.model.transformer import Transformer

FULL = ParameterSpec(shape=(264, 7), offset=(0, 0), local_shape=(264, 7), std=0.5, valid_rows=257)


@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0), (132, 7)), ((132, 0), (132, 7)), ((0, 3), (264, 4)), ((63, 1), (66, 1)), ((260, 0), (4, 7))]
)
def test_boxes_are_parts_of_the_whole(offset: tuple[int, int], shape: tuple[int, int]) -> None:
    whole = initial_value("a", FULL, 3)
    part = initial_value("a", dataclasses.replace(FULL, offset=offset, local_shape=shape), 3)
    assert torch.equal(part, whole[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]])


def test_padding_is_zero_and_does_not_move_other_rows() -> None:
    whole = initial_value("a", FULL, 3)
    assert (whole[257:] == 0).all()
    assert (whole[:257] != 0).all()
    unpadded = dataclasses.replace(FULL, shape=(257, 7), local_shape=(257, 7))
    assert torch.equal(initial_value("a", unpadded, 3), whole[:257])


def test_values_differ_by_seed_and_name_and_repeat() -> None:
    values = [initial_value(name, FULL, seed) for name, seed in (("a", 3), ("b", 3), ("a", 4))]
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(values[0], initial_value("a", FULL, 3))
    assert len(torch.unique(values[0][:257])) > 1700  # blocks of rows do not repeat


def test_scale_of_each_kind_of_parameter() -> None:
    cfg = ModelConfig(hidden_size=128, num_layers=8, num_heads=4, qkv_bias=True, init_std=0.1)
    model = Transformer(cfg, vocab_size=300).initialize(7)
    values = dict(model.named_parameters())
    assert values["embedding.tokens.weight"][:300].std().item() == pytest.approx(0.1, rel=0.02)
    assert values["layers.3.attention.q.weight"].std().item() == pytest.approx(0.1, rel=0.02)
    for name in ("layers.3.attention.o.weight", "layers.3.mlp.down.weight"):
        assert values[name].std().item() == pytest.approx(0.1 / math.sqrt(16), rel=0.02)
    assert (values["layers.3.attention.q.bias"] == 0).all()
    assert (values["layers.3.mlp_norm.weight"] == 1).all()


def test_decay_is_for_matrices() -> None:
    cfg = ModelConfig(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        norm="layernorm",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=True,
    )
    model = Transformer(cfg, vocab_size=5)
    specs = model.parameter_specs()
    assert list(specs) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert specs[name].decay == (parameter.dim() == 2), name
        assert specs[name].shape == specs[name].local_shape == tuple(parameter.shape)
