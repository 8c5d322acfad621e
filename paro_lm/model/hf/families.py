"""What each supported architecture calls the parameters and options of the one transformer class; read in both directions.

A new family is an entry of `FAMILIES`: a name map, the options that it fixes, and the names of those that it leaves open.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paro_lm.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """Where the tensors of one module lie: under `name` (`*` is the layer), as slice `part` of `parts` equal ones of the output
    features, with weights as [in, out] when `transposed`.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One architecture.

    places     module name here (`*` is the layer) -> where it lies in the files
    prefix     start of the names that files of the bare model leave out
    has_head_dim  whether a head_dim that follows from the other sizes is written, too
    ignored    patterns of stored tensors that are no parameters
    keys       option of ModelConfig -> key of config.json; several options may share a key
    fixed      options of ModelConfig that the architecture itself decides
    activations   value of model.activation -> its names in config.json, under `activation_key`
    dropouts   keys of the dropout probabilities that together are model.dropout
    """

    model_type: str
    architecture: str
    bare: str
    prefix: str
    places: Mapping[str, Place]
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    has_head_dim: bool = True
    activation_key: str = "hidden_act"
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"swiglu": ("silu", "swish")})
    dropouts: tuple[str, ...] = ()
    description: str = ""

    def place(self, name: str) -> Place:
        """The place of a parameter of ours, by its global name, with the layer and the last part (weight, bias) filled in."""
        module, kind = name.rsplit(".", 1)
        pattern, layer = module, ""
        if module.startswith("layers."):
            _, layer, rest = module.split(".", 2)
            pattern = f"layers.*.{rest}"
        found = self.places[pattern]
        transposed = found.transposed and kind == "weight"
        return Place(f"{found.name.replace('*', layer)}.{kind}", transposed, found.part, found.parts)

    def is_ignored(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.ignored)

    def differs(self, cfg: ModelConfig) -> list[str]:
        """The options of a model that this architecture cannot have, each as `option=value`; empty = it can be written so."""
        wrong = [f"{option}={getattr(cfg, option)}" for option, value in self.fixed.items() if getattr(cfg, option) != value]
        values: dict[str, Any] = {}
        for option, key in self.keys.items():
            if values.setdefault(key, getattr(cfg, option)) != getattr(cfg, option):
                wrong.append(f"{option}={getattr(cfg, option)}")
        if "head_dim" not in self.keys and cfg.head_dim not in (None, cfg.hidden_size // cfg.num_heads):
            wrong.append(f"head_dim={cfg.head_dim}")
        if "num_kv_heads" not in self.keys and cfg.num_kv_heads not in (None, cfg.num_heads):
            wrong.append(f"num_kv_heads={cfg.num_kv_heads}")
        if cfg.activation not in self.activations:
            wrong.append(f"activation={cfg.activation}")
        return wrong


def _plain(names: Mapping[str, str]) -> dict[str, Place]:
    return {ours: Place(theirs) for ours, theirs in names.items()}


LLAMA_PLACES = _plain(
    {
        "embedding.tokens": "model.embed_tokens",
        "layers.*.attention_norm": "model.layers.*.input_layernorm",
        **{f"layers.*.attention.{x}": f"model.layers.*.self_attn.{x}_proj" for x in "qkvo"},
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
        **{f"layers.*.mlp.{x}": f"model.layers.*.mlp.{x}_proj" for x in ("gate", "up", "down")},
        "head.norm": "model.norm",
        "head.output": "lm_head",
    }
)
QK_NORM_PLACES = _plain({f"layers.*.attention.{x}_norm": f"model.layers.*.self_attn.{x}_norm" for x in "qk"})
GPT2_PLACES = {
    "embedding.tokens": Place("transformer.wte"),
    "embedding.positions": Place("transformer.wpe"),
    "layers.*.attention_norm": Place("transformer.h.*.ln_1"),
    **{f"layers.*.attention.{x}": Place("transformer.h.*.attn.c_attn", True, i, 3) for i, x in enumerate("qkv")},
    "layers.*.attention.o": Place("transformer.h.*.attn.c_proj", True),
    "layers.*.mlp_norm": Place("transformer.h.*.ln_2"),
    "layers.*.mlp.up": Place("transformer.h.*.mlp.c_fc", True),
    "layers.*.mlp.down": Place("transformer.h.*.mlp.c_proj", True),
    "head.norm": Place("transformer.ln_f"),
    "head.output": Place("lm_head"),
}
LLAMA_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "ffn_size": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
LLAMA_FIXED = {"norm": "rmsnorm", "positions": "rope"}
NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)

FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        bare="LlamaModel",
        prefix="model.",
        places=LLAMA_PLACES,
        keys=LLAMA_KEYS | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        fixed=LLAMA_FIXED | {"qk_norm": False, "sliding_window": None},
        ignored=ROTARY_BUFFERS,
        description="Llama 1-3, SmolLM2",
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        bare="MistralModel",
        prefix="model.",
        places=LLAMA_PLACES,
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_norm": False},
        ignored=ROTARY_BUFFERS,
        description="Mistral",
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        bare="Qwen2Model",
        prefix="model.",
        places=LLAMA_PLACES,
        keys=LLAMA_KEYS,
        fixed=LLAMA_FIXED | NO_BIAS | {"qkv_bias": True, "qk_norm": False, "sliding_window": None},
        has_head_dim=False,
        ignored=ROTARY_BUFFERS,
        description="Qwen2, Qwen2.5",
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        bare="Qwen3Model",
        prefix="model.",
        places=LLAMA_PLACES | QK_NORM_PLACES,
        keys=LLAMA_KEYS | {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        fixed=LLAMA_FIXED | {"mlp_bias": False, "qk_norm": True, "sliding_window": None},
        ignored=ROTARY_BUFFERS,
        description="Qwen3 (dense)",
    ),
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        bare="GPT2Model",
        prefix="transformer.",
        places=GPT2_PLACES,
        keys=GPT2_KEYS,
        fixed={"norm": "layernorm", "positions": "learned", "qk_norm": False, "sliding_window": None}
        | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        activation_key="activation_function",
        activations={"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu": ("gelu",)},
        dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        description="GPT-2",
    ),
)


def supported() -> str:
    """The architectures that can be read and written, for messages."""
    return ", ".join(f"{family.model_type} ({family.description})" for family in FAMILIES)


def family_named(model_type: str) -> Family:
    """The family of a `model_type` of config.json. Raises ValueError with the supported ones."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise ValueError(f"model_type={model_type!r} is not supported; supported: {supported()}.")


def family_of(cfg: ModelConfig, preferred: str | None = None) -> Family:
    """The family that a model can be written as, `preferred` (a model_type) before others.

    Raises ValueError that says, for the nearest family, which options it cannot have.
    """
    ordered = sorted(FAMILIES, key=lambda family: family.model_type != preferred)
    differences = {family: family.differs(cfg) for family in ordered}
    for family, wrong in differences.items():
        if not wrong:
            return family
    nearest = min(ordered, key=lambda family: len(differences[family]))
    raise ValueError(
        f"no architecture of transformers that is known here has these options; nearest is {nearest.model_type}, "
        f"which cannot have model.{', model.'.join(differences[nearest])}. Supported: {supported()}."
    )
