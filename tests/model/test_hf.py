"""Every supported architecture, in and out: the same logits, the same tensors bit for bit, the same config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paro_lm.model.generate import generate
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.spec import ParameterSpec
from paro_lm.model.transformer import Transformer
from paro_lm.restore import open_source, restore
from paro_lm.tools.export import export
from tests.model.hf_models import MODELS, VOCAB, save_model, stored, tokens

TOLERANCE = 1e-5  # on logits, fp32
CPU = torch.device("cpu")


def _export(source: Path, target: Path, **options: Any) -> Path:
    target.mkdir()
    export(open_source(source), target, **options)
    return target


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    theirs = save_model(name, tmp_path / "in")
    expected = theirs(tokens()).logits
    assert expected.abs().max() > 0.5  # so that the tolerance means something
    ours = restore(tmp_path / "in", device=CPU)
    assert ours.cfg.precision.param_dtype == "fp32"
    logits = ours.model(tokens())
    assert logits.shape == (2, 41, VOCAB)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    out = _export(tmp_path / "in", tmp_path / "out")
    given, written = stored(tmp_path / "in"), stored(out)
    assert written.keys() == given.keys()
    for key in given:
        assert written[key].dtype == given[key].dtype
        assert torch.equal(written[key], given[key]), key

    again, told = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again.eval()(tokens()).logits, expected)
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "in", out)]
    assert {**configs[0], "_name_or_path": str(out)} == configs[1]
    assert HFCheckpoint(out).model == HFCheckpoint(tmp_path / "in").model

    prompt = tokens(5)
    theirs_text = again.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generate(ours.model, prompt, max_new_tokens=12) == theirs_text.tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama_tied_head_dim", "qwen3", "gpt2"])
def test_pipeline_stages_are_filled_with_their_own_layers(name: str, tmp_path: Path) -> None:
    expected = save_model(name, tmp_path)(tokens()).logits
    checkpoint = HFCheckpoint(tmp_path)
    hidden = tokens()
    for stage in range(2):
        part = Transformer(
            checkpoint.model, vocab_size=VOCAB, layers=range(stage, stage + 1), has_embedding=stage == 0, has_head=stage == 1
        ).eval()
        specs = part.parameter_specs()
        part.load_state_dict({key: checkpoint.value_of(key, specs[key]) for key in specs})
        hidden = part(hidden)
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_windows_of_attention_with_documents_and_batches(tmp_path: Path) -> None:
    """A document in a row of several, or a prompt in a batch of unequal ones, sees what it sees alone: the last 7 tokens."""
    theirs = save_model("mistral_window", tmp_path)
    model = restore(tmp_path, device=CPU).model
    first, second = tokens(9)[:1], tokens(23)[1:]
    row = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 9 + [1] * 23])
    positions = torch.cat([torch.arange(9), torch.arange(23)])[None]
    together = model(row, documents=documents, positions=positions)
    for part, logits in ((first, together[:, :9]), (second, together[:, 9:])):
        torch.testing.assert_close(logits, theirs(part).logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert model.cfg.sliding_window == 7
    without_window = Transformer(replace(model.cfg, sliding_window=None), vocab_size=VOCAB)
    without_window.load_state_dict(model.state_dict())
    assert (without_window.eval()(second) - theirs(second).logits).abs().max() > 0.01  # the window matters
    prompts = [first[0].tolist(), second[0].tolist()]
    alone = [theirs.generate(torch.tensor([p]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)[0] for p in prompts]
    assert generate(model, prompts, max_new_tokens=10) == [row.tolist() for row in alone]


@pytest.mark.parametrize("name", ["llama_tied_head_dim", "gpt2"])
def test_16_bit_weights_come_back_bitwise_also_over_several_files(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "in", torch.bfloat16, max_shard_size="3KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    out = _export(tmp_path / "in", tmp_path / "out", max_shard_size="2KB")
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    given, written = stored(tmp_path / "in"), stored(out)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in given.values())
    assert written.keys() == given.keys()
    assert all(torch.equal(written[key], given[key]) and written[key].dtype == torch.bfloat16 for key in given)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert restore(out, device=CPU).cfg.precision.param_dtype == "bf16"
    assert next(restore(out, device=CPU, dtype="fp64").model.parameters()).dtype == torch.float64


def test_exported_type_can_be_chosen(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "in")
    out = _export(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    given, written = stored(tmp_path / "in"), stored(out)
    assert all(torch.equal(written[key], given[key].half()) for key in given)
    values = json.loads((out / "config.json").read_text())
    assert values["dtype"] == values["torch_dtype"] == "float16"


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_any_box_is_read_and_nothing_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd boxes of every parameter equal slices of the whole; padded rows are zero; the file is asked for no more."""
    save_model(name, tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    whole = {key: checkpoint.value_of(key) for key in checkpoint.specs}
    asked: list[int] = []
    read = checkpoint._files.read
    monkeypatch.setattr(checkpoint._files, "read", lambda key, region: asked.append(_numel(region)) or read(key, region), raising=True)
    for key, spec in checkpoint.specs.items():
        offset = tuple(size // 3 for size in spec.shape)
        local = tuple(size // 2 for size in spec.shape)
        asked.clear()
        box = checkpoint.value_of(key, _box(spec, offset, local))
        assert torch.equal(box, whole[key][tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]), key
        assert sum(asked) <= box.numel()
    embedding = checkpoint.specs["embedding.tokens.weight"]
    assert embedding.shape == (128, 16)
    assert not whole["embedding.tokens.weight"][VOCAB:].any()
    asked.clear()
    only_padding = checkpoint.value_of("embedding.tokens.weight", _box(embedding, (64, 0), (64, 16)))
    assert only_padding.shape == (64, 16)
    assert not only_padding.any()
    assert not asked


def _box(spec: ParameterSpec, offset: tuple[int, ...], local: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec(shape=spec.shape, offset=offset, local_shape=local, valid_rows=spec.valid_rows)


def _numel(region: list[slice]) -> int:
    return torch.Size(part.stop - part.start for part in region).numel()


def test_rows_of_heads_are_taken_as_they_are(tmp_path: Path) -> None:
    """8 query heads, 2 kv heads, head_dim 8: the stored layout is the half layout (dim j turns with j + 4); `test_round_trip` compares
    the logits at all positions, where the interleaved layout (rows 0 4 1 5 2 6 3 7 of a head) would give others from position 1 on.
    """
    save_model("llama_8_heads", tmp_path)
    checkpoint, files = HFCheckpoint(tmp_path), stored(tmp_path)
    for x, rows in (("q", 64), ("k", 16)):
        value = checkpoint.value_of(f"layers.0.attention.{x}.weight")
        assert value.shape == (rows, 32)
        assert torch.equal(value, files[f"model.layers.0.self_attn.{x}_proj.weight"])


def test_head_dim_is_free(tmp_path: Path) -> None:
    """Hidden 16, 4 heads of width 8, 2 kv heads: q [32, 16], k and v [16, 16], o [16, 32], as stored; no permutation of rows."""
    save_model("llama_tied_head_dim", tmp_path)
    checkpoint, files = HFCheckpoint(tmp_path), stored(tmp_path)
    shapes = {x: checkpoint.value_of(f"layers.0.attention.{x}.weight").shape for x in "qkvo"}
    assert shapes == {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32)}
    for x in "qkvo":
        assert torch.equal(checkpoint.value_of(f"layers.1.attention.{x}.weight"), files[f"model.layers.1.self_attn.{x}_proj.weight"])
    attention = restore(tmp_path, device=CPU).model.layers["0"].attention  # type: ignore[union-attr]
    assert attention.head_dim == 8  # scaled_dot_product_attention divides by its root


def _rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import save_file

    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tied_weights_in_either_name_and_files_of_the_bare_model(tmp_path: Path) -> None:
    theirs = save_model("gpt2", tmp_path / "both")
    expected = theirs(tokens()).logits.detach()
    table = theirs.transformer.wte.weight.detach().clone()
    _rewrite(tmp_path / "both", lambda t: t.update({"lm_head.weight": table}))
    for folder in ("output", "bare"):
        save_model("gpt2", tmp_path / folder)
    _rewrite(tmp_path / "output", lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")}))

    def make_bare(tensors: dict[str, torch.Tensor]) -> None:  # as on the hub, with masks that are no parameters
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    _rewrite(tmp_path / "bare", make_bare)
    for folder in ("both", "output", "bare"):
        logits = restore(tmp_path / folder, device=CPU).model(tokens())
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    _rewrite(tmp_path / "both", lambda t: t["lm_head.weight"].add_(1.0))
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but transformer.wte.weight and lm_head.weight differ"):
        restore(tmp_path / "both", device=CPU)


def test_pickles_only_when_asked_for(tmp_path: Path) -> None:
    theirs = save_model("llama", tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only as pickles \(pytorch_model.bin\).*allow_pickle=true"):
        HFCheckpoint(tmp_path)
    checkpoint = HFCheckpoint(tmp_path, allow_pickle=True)
    assert torch.equal(checkpoint.value_of("layers.1.mlp.down.weight"), theirs.model.layers[1].mlp.down_proj.weight)
