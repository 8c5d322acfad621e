"""Problems are found, all of them, with the keys, the values and the remedy."""

from __future__ import annotations

import pytest

from paro_lm.config import ModelConfig, RopeScalingConfig
from paro_lm.model.transformer import Transformer
from paro_lm.model.validate import check_model
from paro_lm.parallel.tensor import TensorParallel


@pytest.mark.parametrize("kv_heads", [5, 0, -1, 64])
def test_kv_heads_must_divide_heads(kv_heads: int) -> None:
    (problem,) = check_model(ModelConfig(num_heads=32, num_kv_heads=kv_heads))
    for part in ("model.num_kv_heads", "model.num_heads=32", f"got {kv_heads}", "1, 2, 4, 8, 16, 32"):
        assert part in problem


def test_kv_heads_and_tp() -> None:
    assert check_model(ModelConfig(num_heads=32, num_kv_heads=2), tp=4) == []  # shared by two ranks each
    (problem,) = check_model(ModelConfig(hidden_size=96, num_heads=12, num_kv_heads=3, ffn_size=96), tp=4)
    for part in ("model.num_kv_heads", "3 heads", "parallel.tp=4", "1, 2, 4, 12"):
        assert part in problem


def test_what_the_check_accepts_can_be_built_and_the_rest_cannot() -> None:
    for tp in (2, 3, 4):
        for heads in (4, 6, 12):
            for kv_heads in (1, 2, 3, 4, 6, 12):
                if heads % kv_heads:
                    continue
                cfg = ModelConfig(
                    hidden_size=24, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=2, ffn_size=24, vocab_divisor=12
                )
                tensor = TensorParallel(group=None, rank=tp - 1, size=tp)
                if check_model(cfg, tp=tp):
                    with pytest.raises(ValueError, match=f"tp={tp}"):
                        Transformer(cfg, vocab_size=10, tensor=tensor)
                else:
                    Transformer(cfg, vocab_size=10, tensor=tensor)


def test_all_problems_at_once() -> None:
    cfg = ModelConfig(hidden_size=30, num_heads=4, num_kv_heads=3, ffn_size=33, vocab_divisor=7, max_positions=8)
    problems = check_model(cfg, tp=2, seq_length=16)
    keys = [problem.split(":")[0] for problem in problems]
    assert keys == ["model.num_kv_heads", "model.hidden_size", "model.ffn_size", "model.vocab_divisor", "model.max_positions"]


@pytest.mark.parametrize(
    ("cfg", "part"),
    [
        (ModelConfig(norm="rms"), "rmsnorm, layernorm, got 'rms'"),
        (ModelConfig(activation="relu"), "swiglu, gelu, gelu_tanh"),
        (ModelConfig(dropout=1.0), "below 1, got 1.0"),
        (ModelConfig(num_layers=0), "at least 1, got 0"),
        (ModelConfig(head_dim=5), "even width, got 5"),
        (ModelConfig(rope_scaling=RopeScalingConfig(type="ntk")), "none, linear, llama3, yarn, got 'ntk'"),
        (ModelConfig(rope_scaling=RopeScalingConfig(factor=2.0)), "has no effect"),
        (ModelConfig(rope_scaling=RopeScalingConfig(type="yarn", beta_slow=32.0)), "below model.rope_scaling.beta_fast, got 32.0 and 32.0"),
        (ModelConfig(rope_theta=1.0, rope_scaling=RopeScalingConfig(type="yarn")), "must be above 1 with model.rope_scaling.type=yarn"),
        (ModelConfig(positions="learned", rope_scaling=RopeScalingConfig(type="linear", factor=2.0)), "needs model.positions=rope"),
        (ModelConfig(rope_scaling=RopeScalingConfig(type="llama3", low_freq_factor=4.0)), "below model.rope_scaling.high_freq_factor"),
    ],
)
def test_single_values(cfg: ModelConfig, part: str) -> None:
    (problem,) = check_model(cfg)
    assert part in problem


def test_defaults_are_right() -> None:
    assert check_model(ModelConfig(), tp=2, seq_length=256) == []
