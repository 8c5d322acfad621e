"""config.json in both directions, and what is refused by name."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paro_lm.cli import load
from paro_lm.config import ModelConfig
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.hf.config import model_from_hf, model_to_hf
from paro_lm.model.rope import inverse_frequencies, rotation_factor
from paro_lm.model.sizes import ModelSizes
from tests.model.hf_models import LLAMA, LLAMA3, YARN, save_model, stored

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}, {"rope_parameters": LLAMA3}),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}, "dtype": "float16"},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            {"rope_parameters": {**YARN, "rope_theta": 1e6}},
        ),
        ({"rope_theta": 2e4, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ],
)
def test_old_and_new_keys_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA}
    assert model_from_hf(values | old) == model_from_hf(values | new)
    _, cfg = model_from_hf(values | old)
    assert cfg.rope_theta == new["rope_parameters"]["rope_theta"]
    written = model_to_hf(cfg, vocab_size=50, dtype="float32")
    both = {"model_type", "rope_theta", "rope_scaling", "torch_dtype"} & written.keys(), {"rope_parameters", "dtype"} & written.keys()
    assert sum(map(len, both)) == 6
    for keys in (("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")):
        assert model_from_hf({key: value for key, value in written.items() if key not in keys}) == model_from_hf(written)
    assert AutoConfig.for_model(**written).rope_parameters["rope_theta"] == cfg.rope_theta


def test_frequencies_of_llama3() -> None:
    scaling = {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    _, cfg = model_from_hf({"model_type": "llama", **LLAMA, "head_dim": 8, "rope_parameters": scaling})
    expected = torch.tensor([1, 0.013042256, 0.00125, 0.000125])
    torch.testing.assert_close(inverse_frequencies(8, cfg.rope_theta, cfg.rope_scaling), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 8},  # nothing turns 32 times: the range begins below the first dimension
        {"attention_factor": 1.5},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"factor": 1.0},
        {"rope_theta": 1e6, "factor": 40.0, "original_max_position_embeddings": 4096},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, Any]) -> None:
    """Frequencies and the factor on queries and keys, directly and after the way through our config and back."""
    values = {"model_type": "llama", **LLAMA, "head_dim": 32, "rope_parameters": {**YARN, **changes}}
    _, cfg = model_from_hf(values)
    written = model_to_hf(cfg, vocab_size=50, dtype="float32")
    for theirs in (AutoConfig.for_model(**values), AutoConfig.for_model(**written)):
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
        torch.testing.assert_close(inverse_frequencies(32, cfg.rope_theta, cfg.rope_scaling), frequencies, atol=0, rtol=1e-6)
        assert rotation_factor(cfg.rope_scaling) == pytest.approx(factor, rel=1e-12)
    assert model_from_hf(written)[1] == cfg


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_exported(preset: str) -> None:
    cfg = load([f"model={preset}"]).model
    vocab_size = cfg.vocab_size or 300
    written = model_to_hf(cfg, vocab_size=vocab_size, dtype="bfloat16")
    assert written["bos_token_id"] is written["eos_token_id"] is None  # no ids of somebody else's tokenizer
    _, read = model_from_hf(written)
    assert ModelSizes.of(read, vocab_size) == ModelSizes.of(cfg, vocab_size)
    same = {"name": "", "vocab_size": None, "num_kv_heads": None, "head_dim": None, "ffn_size": None, "vocab_divisor": 128}
    assert replace(read, **same) == replace(cfg, **same)


def test_other_keys_of_the_original_stay() -> None:
    original = {"model_type": "mistral", **LLAMA, "sliding_window": 9, "pad_token_id": 7, "use_cache": False, "my_note": "x"}
    _, cfg = model_from_hf(original)
    assert cfg.sliding_window == 9
    written = model_to_hf(cfg, vocab_size=50, dtype="float32", like=original)
    assert {key: written[key] for key in original} == original
    assert written["architectures"] == ["MistralForCausalLM"]
    assert model_to_hf(replace(cfg, sliding_window=None), vocab_size=50, dtype="float32")["model_type"] == "llama"
    assert model_to_hf(cfg, vocab_size=50, dtype="float32")["model_type"] == "mistral"  # no other family has windows
    changed = model_to_hf(replace(cfg, sliding_window=None, qkv_bias=True), vocab_size=50, dtype="float32", like=original)
    assert changed["model_type"] == "qwen2"
    assert "my_note" not in changed


def test_dropout_of_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    values = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 1}
    assert model_from_hf(values)[1].dropout == 0.1  # the default of the architecture
    assert model_from_hf({**values, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})[1].dropout == 0.0
    with caplog.at_level(logging.WARNING):
        assert model_from_hf({**values, "attn_pdrop": 0.3})[1].dropout == 0.0
    assert "attn_pdrop=0.3" in caplog.text


REFUSED = [
    ({"model_type": "mixtral"}, "model_type='mixtral' is not supported; supported: llama .*, mistral .*, qwen2 .*, qwen3 .*, gpt2"),
    ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe' is not supported"),
    ({"model_type": None}, "has no model_type; supported: llama"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* not supported; LlamaForCausalLM is"),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        "rope_type='dynamic' is not supported; supported: default, linear, llama3, yarn",
    ),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama; supported: silu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"hidden_size": "wide"}, "is refused by transformers: .*hidden_size"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
        "use_sliding_window=true with sliding_window=32 and max_window_layers=1 is not supported",
    ),
    ({"model_type": "gpt2", "n_embd": 16, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"my/config.json.*{message}"):
        model_from_hf({"model_type": "llama", **LLAMA, **changes}, where="my/config.json")


def test_window_as_long_as_the_model_is_none() -> None:
    values = {"model_type": "qwen2", **LLAMA, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert model_from_hf(values)[1].sliding_window is None


def test_model_that_no_architecture_has() -> None:
    with pytest.raises(ValueError, match=r"nearest is llama, which cannot have model.norm=layernorm. Supported: llama"):
        model_to_hf(ModelConfig(norm="layernorm"), vocab_size=50, dtype="float32")
    gpt2 = ModelConfig(norm="layernorm", positions="learned", activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True)
    with pytest.raises(ValueError, match=r"model.num_kv_heads=2"):
        model_to_hf(replace(gpt2, num_kv_heads=2), vocab_size=50, dtype="float32")


def _change(folder: Path, change: Any) -> None:
    from safetensors.torch import save_file

    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)  # written by old versions
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(24, 16)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(16, 8)

    _change(tmp_path, change)
    with pytest.raises(ValueError, match="does not fit its config.json") as error:
        HFCheckpoint(tmp_path)
    text = str(error.value)
    assert "2 tensors missing: lm_head.weight, model.layers.1.mlp.up_proj.weight;" in text
    assert "1 tensor unknown: model.layers.2.mlp.up_proj.weight;" in text
    assert "1 tensor of a wrong shape: model.layers.0.self_attn.k_proj.weight (file (16, 8), config.json (8, 16))." in text


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    save_model("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file \(\d+ bytes"):
        HFCheckpoint(tmp_path)


def test_index_that_lies(tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="4KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"model.layers.9.x": files[0]}}))
    with pytest.raises(ValueError, match=r"index.json names tensors that its files lack: model.layers.9.x"):
        HFCheckpoint(tmp_path)
    path.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match="has no weight_map"):
        HFCheckpoint(tmp_path)
    path.write_text(json.dumps(index))
    HFCheckpoint(tmp_path)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"{files[1]} is missing, though the index names it"):
        HFCheckpoint(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is missing"):
        HFCheckpoint(tmp_path)
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        HFCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        HFCheckpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, r"hf://owner/name is gated: accept its conditions .*hf auth login"),
        (RepositoryNotFoundError, r"the hub has no such model, or it is private"),
        (LocalEntryNotFoundError, r"not in the local cache and the hub cannot be reached"),
        (ConnectionError, r"the hub cannot be reached \(ConnectionError\)"),
    ],
)
def test_hub_that_says_no(error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        assert name == "owner/name"
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for source in ("owner/name", "hf://owner/name"):
        with pytest.raises(ValueError, match=message):
            HFCheckpoint(source)


def test_hub_id_is_downloaded_once_and_read_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert (name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns) == ("owner/name", True, False)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert HFCheckpoint("hf://owner/name").folder == tmp_path
