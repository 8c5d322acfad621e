"""The same weights give the same logits as Hugging Face's implementations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paro_lm.config import ModelConfig, RopeScalingConfig
from paro_lm.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5  # on logits, fp32
LLAMA = {"hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24, "max_positions": 64, "vocab_divisor": 8}
VOCAB = 50

LLAMA_NAMES = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
}


def _hf_llama_name(name: str) -> str:
    if name in LLAMA_NAMES:
        return LLAMA_NAMES[name]
    _, layer, rest = name.split(".", 2)
    rest = (
        rest.replace("attention_norm", "input_layernorm")
        .replace("mlp_norm", "post_attention_layernorm")
        .replace("attention.", "self_attn.")
    )
    if rest.startswith(("self_attn.", "mlp.")):
        group, leaf, kind = rest.split(".")
        rest = f"{group}.{leaf if leaf.endswith('norm') else leaf + '_proj'}.{kind}"
    return f"model.layers.{layer}.{rest}"


def _hf_gpt2_value(name: str, state: dict[str, Tensor], hidden: int) -> Tensor:
    """Our parameter from GPT-2's: its linear weights are stored transposed, q, k and v together."""
    special = {
        "embedding.tokens.weight": "transformer.wte.weight",
        "embedding.positions.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
    }
    if name in special:
        return state[special[name]]
    _, layer, rest = name.split(".", 2)
    parts = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    module, kind = rest.rsplit(".", 1)
    if module in parts:
        value = state[f"transformer.h.{layer}.{parts[module]}.{kind}"]
    else:
        index = "qkv".index(module[-1])
        value = state[f"transformer.h.{layer}.attn.c_attn.{kind}"][..., index * hidden : (index + 1) * hidden]
    return value if module.endswith("norm") else value.t() if value.dim() == 2 else value


@torch.no_grad()
def _fill(model: Transformer, value: object) -> Transformer:
    for name, parameter in model.named_parameters():
        source = value(name)  # type: ignore[operator]
        parameter.zero_()
        parameter[: len(source)].copy_(source)
    return model


def _randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))


def _compare(ours: Transformer, theirs: torch.nn.Module, tokens: Tensor) -> None:
    expected = theirs(tokens).logits
    logits = ours(tokens)
    assert logits.shape == (*tokens.shape, VOCAB)
    assert expected.abs().max() > 0.5  # so that the tolerance means something
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    labels = tokens.roll(-1, dims=1).masked_fill(torch.arange(tokens.shape[1]) == 3, -100)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(ours(tokens, labels=labels), expected_loss, atol=1e-3, rtol=1e-6)


def _tokens(length: int = 41) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


SCALINGS = {
    "none": (RopeScalingConfig(), {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (RopeScalingConfig(type="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}),
    "llama3": (
        RopeScalingConfig(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        },
    ),
    "yarn": (
        RopeScalingConfig(type="yarn", factor=4.0, original_max_position=16),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("tied", "head_dim"), [(False, None), (True, 8)])
def test_llama(scaling: str, tied: bool, head_dim: int | None) -> None:
    own, rope_parameters = SCALINGS[scaling]
    cfg = ModelConfig(**LLAMA, tie_embeddings=tied, head_dim=head_dim, rope_scaling=own)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim or 4,
            rms_norm_eps=cfg.norm_eps,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            rope_parameters=rope_parameters,
        )
    ).eval()
    _randomise(theirs)
    state = theirs.state_dict()
    ours = _fill(Transformer(cfg, vocab_size=VOCAB), lambda name: state[_hf_llama_name(name)])
    if head_dim == 8:
        shapes = {name: tuple(p.shape) for name, p in ours.layers["0"].attention.named_parameters()}  # type: ignore[union-attr]
        assert shapes == {"q.weight": (32, 16), "k.weight": (16, 16), "v.weight": (16, 16), "o.weight": (16, 32)}
    _compare(ours, theirs, _tokens())


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3(tied: bool) -> None:
    cfg = ModelConfig(**LLAMA, head_dim=8, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, tie_embeddings=tied)
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ).eval()
    _randomise(theirs)
    state = theirs.state_dict()
    _compare(_fill(Transformer(cfg, vocab_size=VOCAB), lambda name: state[_hf_llama_name(name)]), theirs, _tokens())


def test_gpt2() -> None:
    cfg = ModelConfig(
        hidden_size=16,
        num_layers=3,
        num_heads=4,
        max_positions=64,
        vocab_divisor=8,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=3, n_head=4)).eval()
    _randomise(theirs)
    state = theirs.state_dict()
    _compare(_fill(Transformer(cfg, vocab_size=VOCAB), lambda name: _hf_gpt2_value(name, state, 16)), theirs, _tokens())
