"""Exact counts, and the shipped presets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import paro_lm
from paro_lm.config import ModelConfig
from paro_lm.model.flops import count_parameters, model_flops
from paro_lm.model.transformer import Transformer
from paro_lm.model.validate import check_model

PRESETS = Path(paro_lm.__file__).parent.parent / "conf" / "model"


def preset(name: str) -> ModelConfig:
    return ModelConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def test_flops_goldens() -> None:
    assert model_flops(preset("llama_7b"), seq_length=4096) == 175_569_673_125_888
    assert model_flops(preset("llama3_8b"), seq_length=8192) == 421_645_529_382_912
    assert model_flops(preset("gpt2_124m"), vocab_size=50304, seq_length=1024) == 817_184_636_928
    small = ModelConfig(num_layers=2, hidden_size=8, ffn_size=16, num_heads=2, num_kv_heads=1, head_dim=4)
    assert model_flops(small, vocab_size=32, seq_length=4) == 35_328
    assert model_flops(small, vocab_size=32, seq_length=4, num_samples=3) == 3 * 35_328


def test_a_window_counts_what_it_shows() -> None:
    """Against the pairs of a mask, counted one by one, less half a window, as s^2 / 2 is the causal half less half a sequence."""
    plain = ModelConfig(num_layers=3, hidden_size=8, ffn_size=16, num_heads=2, head_dim=4)

    def attention(window: int) -> float:
        pairs = torch.ones(50, 50).tril().triu(1 - window).sum().item() - min(window, 50) / 2
        return 3 * 12 * 8 * pairs

    full = model_flops(plain, vocab_size=32, seq_length=50)
    for window in (1, 7, 49, 50, 80):
        windowed = model_flops(replace(plain, sliding_window=window), vocab_size=32, seq_length=50)
        assert full - windowed == attention(50) - attention(window)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2_124m", 124.4),
        ("llama_125m", 134.1),
        ("llama_1b", 1100.0),
        ("llama_7b", 6738.4),
        ("llama_65b", 65285.7),
        ("llama3_8b", 8030.3),
        ("qwen3_0.6b", 596.0),
        ("tiny", 0.8),
    ],
)
def test_presets(name: str, millions: float) -> None:
    """Parameter counts as published (tiny: as intended), and equal to those of the model that is built."""
    cfg = preset(name)
    assert cfg.name == name
    assert check_model(cfg, tp=2, seq_length=1024) == []
    assert count_parameters(cfg).total / 1e6 == pytest.approx(millions, rel=1e-3 if name != "tiny" else 0.2)
    with torch.device("meta"):
        model = Transformer(cfg, vocab_size=cfg.vocab_size or 50)
    counts = count_parameters(cfg, vocab_size=cfg.vocab_size or 50, padded=True)
    assert sum(p.numel() for p in model.parameters()) == counts.total
    by_unit = {unit.name: sum(p.numel() for p in unit.parameters()) for unit in model.units()}
    assert (by_unit["embedding"], by_unit["layers.0"], by_unit["head"]) == (counts.embedding, counts.block, counts.head)


def test_presets_name_only_what_differs() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} >= {"tiny", "gpt2_124m", "llama_125m", "llama_7b", "llama_65b"}
    for path in set(PRESETS.glob("*.yaml")) - {PRESETS / "hf.yaml"}:  # that one only says that a folder is to be named
        for key, value in yaml.safe_load(path.read_text()).items():
            assert key == "name" or getattr(ModelConfig(), key) != value, (path.name, key)
