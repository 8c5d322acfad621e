"""config.json to the options of a model, and back."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paro_lm.config import ModelConfig, RopeScalingConfig
from paro_lm.model.hf.families import Family, family_named, family_of, supported
from paro_lm.model.sizes import ModelSizes

logger = logging.getLogger(__name__)

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
REFUSED = {
    "quantization_config": (None,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
}
"""Keys of config.json that change what a model computes, with the values that mean what is computed here."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError that names the file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder of a complete Hugging Face checkpoint.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the checkpoint again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object; download the checkpoint again.")
    return values


def model_from_hf(values: Mapping[str, Any], *, where: object = "config.json") -> tuple[Family, ModelConfig]:
    """The family and options of a model from the values of its config.json, with old keys (rope_theta, rope_scaling, torch_dtype)
    or new ones (rope_parameters, dtype).

    Raises ValueError, naming `where` and the key, for an architecture or an option that is not supported.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{where} has no model_type; supported: {supported()}.")
    try:
        family = family_named(model_type)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    architectures = values.get("architectures") or [family.architecture]
    if not set(architectures) & {family.architecture, family.bare}:
        raise ValueError(f"{where}: architectures={architectures} is not supported; {family.architecture} is.")
    for key, allowed in REFUSED.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"{where}: {key}={values[key]!r} is not supported; only {allowed[-1]!r} is.")
    complete = _complete(family, values, where)
    options: dict[str, Any] = {option: complete.get(key) for option, key in family.keys.items()}
    options |= dict(family.fixed) | {"activation": _activation(family, complete, where), "dropout": _dropout(family, complete, where)}
    if family.fixed["positions"] == "rope":
        options["rope_theta"], options["rope_scaling"] = _rope(complete, where)
    _check_window(family, complete, where)
    return family, ModelConfig(name=model_type, vocab_size=complete["vocab_size"], **options)


def model_to_hf(
    cfg: ModelConfig, *, vocab_size: int, dtype: str, token_ids: Mapping[str, Any] | None = None, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of config.json for a model. Both the old and the new keys are written, so that any version of transformers loads it.

    dtype      name of the stored type, such as bfloat16
    token_ids  bos_token_id, eos_token_id, pad_token_id
    like       config.json of the model that this one was made from; its family is preferred and its other keys stay
    Raises ValueError when no supported architecture has the model's options.
    """
    like = dict(like or {})
    family = family_of(cfg, like.get("model_type"))
    if family.model_type != like.get("model_type"):
        like = {}
    sizes = ModelSizes.of(cfg, vocab_size)
    values = {key: getattr(cfg, option) for option, key in family.keys.items()}
    if family.fixed["positions"] == "rope":
        values |= {"num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim, "intermediate_size": sizes.ffn_size}
        values["rope_parameters"] = _same_rope(cfg, family, like) or _rope_values(cfg)
        if not family.has_head_dim and sizes.head_dim * sizes.num_heads == cfg.hidden_size:
            del values["head_dim"]
    names = family.activations[cfg.activation]
    values[family.activation_key] = like[family.activation_key] if like.get(family.activation_key) in names else names[0]
    values |= dict.fromkeys(family.dropouts, cfg.dropout) | {"vocab_size": vocab_size, "architectures": [family.architecture]}
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ids |= {key: like[key] for key in ids if key in like} | dict(token_ids or {})
    replaced = {*ROPE_KEYS, "torch_dtype", "dtype", "transformers_version", "layer_types"}
    kept = {key: value for key, value in like.items() if key not in replaced}
    from transformers import AutoConfig

    config = AutoConfig.for_model(family.model_type, **{"dtype": dtype} | _without_type(kept) | ids | values)
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    written |= ids
    return written | {"torch_dtype": dtype} | _old_rope(written.get("rope_parameters"))


def _without_type(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the key that chooses the class, which transformers takes apart from the others."""
    return {key: value for key, value in values.items() if key != "model_type"}


def _complete(family: Family, values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """All values with the defaults of the architecture and new keys for old ones, as transformers itself understands them."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(family.model_type, **_without_type(values)).to_dict()
    except Exception as error:
        raise ValueError(f"{where} is refused by transformers: {error}") from error


def _activation(family: Family, values: Mapping[str, Any], where: object) -> str:
    value = values[family.activation_key]
    for ours, theirs in family.activations.items():
        if value in theirs:
            return ours
    choices = ", ".join(name for names in family.activations.values() for name in names)
    raise ValueError(f"{where}: {family.activation_key}={value!r} is not supported for {family.model_type}; supported: {choices}.")


def _dropout(family: Family, values: Mapping[str, Any], where: object) -> float:
    found = {key: float(values.get(key) or 0.0) for key in (*family.dropouts, "attention_dropout") if key in values}
    if family.dropouts and len(set(found.values())) == 1:
        return next(iter(found.values()))
    if any(found.values()):
        told = ", ".join(f"{key}={value}" for key, value in found.items())
        logger.warning("%s: %s cannot be one dropout for all places; it is 0 here, set model.dropout to train with some.", where, told)
    return 0.0


def _rope(values: Mapping[str, Any], where: object) -> tuple[float, RopeScalingConfig]:
    rope = values.get("rope_parameters") or {}
    kind, theta = rope.get("rope_type", rope.get("type", "default")), float(rope.get("rope_theta", 10000.0))
    if kind == "default":
        return theta, RopeScalingConfig()
    try:
        if kind == "linear":
            return theta, RopeScalingConfig(type="linear", factor=float(rope["factor"]))
        if kind == "llama3":
            return theta, RopeScalingConfig(
                type="llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
        if kind == "yarn":
            return theta, _yarn(rope, int(values["max_position_embeddings"]))
    except KeyError as error:
        raise ValueError(f"{where}: rope_parameters of type {kind} lack {error.args[0]}.") from None
    raise ValueError(f"{where}: rope_type={kind!r} is not supported; supported: default, linear, llama3, yarn.")


def _yarn(rope: Mapping[str, Any], max_positions: int) -> RopeScalingConfig:
    """`mscale` and `mscale_all_dim` (DeepSeek) are two parts of one attention factor."""
    original = int(rope["original_max_position_embeddings"])
    factor = float(rope["factor"] or max_positions / original)
    attention = rope.get("attention_factor")
    above, below = (float(rope.get(part) or 0.0) for part in ("mscale", "mscale_all_dim"))
    if attention is None and above and below:
        attention = (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0) if factor > 1 else 1.0
    return RopeScalingConfig(
        type="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=None if attention is None else float(attention),
    )


def _same_rope(cfg: ModelConfig, family: Family, like: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rope_parameters of `like` where they mean what `cfg` does: there are several ways to write some of them."""
    if not any(like.get(key) for key in ROPE_KEYS):
        return None
    complete = _complete(family, like, "config.json")
    return complete["rope_parameters"] if _rope(complete, "config.json") == (cfg.rope_theta, cfg.rope_scaling) else None


def _rope_values(cfg: ModelConfig) -> dict[str, Any]:
    scaling = cfg.rope_scaling
    if scaling.type == "none":
        return {"rope_type": "default", "rope_theta": cfg.rope_theta}
    values: dict[str, Any] = {"rope_type": scaling.type, "rope_theta": cfg.rope_theta, "factor": scaling.factor}
    if scaling.type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.type == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.type == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        values |= {} if scaling.truncate else {"truncate": False}
        values |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return values


def _old_rope(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys under which older versions look for the same values; without them they would take their defaults in silence."""
    if rope is None:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}


def _check_window(family: Family, values: Mapping[str, Any], where: object) -> None:
    """Refuse layers with and without attention windows in one model, unless the window is longer than any sequence."""
    kinds = set(values.get("layer_types") or ()) - {"full_attention"}
    window = values.get("sliding_window")
    if kinds and "sliding_window" not in family.keys and (window is None or window < values["max_position_embeddings"]):
        raise ValueError(
            f"{where}: use_sliding_window=true with sliding_window={window} and max_window_layers={values.get('max_window_layers')} "
            "is not supported: attention windows are for all layers of a Mistral model only. "
            f"Sequences of at most {window} tokens do not need it: set use_sliding_window=false and max_position_embeddings={window}."
        )
