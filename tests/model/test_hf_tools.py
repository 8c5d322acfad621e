"""The console commands on Hugging Face folders: export of a run, generation, evaluation, and what they refuse (exit code 2)."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paro_lm.checkpoint.checkpointer import Checkpointer
from paro_lm.config import Config, ModelConfig, PrecisionConfig
from paro_lm.data.tokenizer import BytesTokenizer, train_tokenizer
from paro_lm.model.generate import generate as generate_tokens
from paro_lm.model.hf.tokenizer import copy_tokenizer, token_ids, write_bytes_tokenizer
from paro_lm.model.sizes import ModelSizes
from paro_lm.model.transformer import Transformer
from paro_lm.restore import restore
from paro_lm.run import Run
from paro_lm.tools import evaluate, export, generate
from tests.command import call
from tests.model.hf_models import make_model, stored

TEXT = "Les éléments du naïve façade, 東京 \U0001f600\n\ttabs and  spaces\x00\x7f"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_run(folder: Path, model: ModelConfig, *, vocab_size: int, tokenizer: str | None = "bytes", dtype: str = "fp32") -> Path:
    """A run folder with one checkpoint of a random model; rows of padding are not zero, as nothing may depend on them."""
    cfg = Config(model=model, precision=PrecisionConfig(name=dtype, param_dtype=dtype))
    network = Transformer(model, vocab_size=vocab_size).initialize(7)
    tensors = {f"model/{name}": value.detach() for name, value in network.named_parameters()}
    for name in ("embedding.tokens", "head.output"):
        if f"model/{name}.weight" in tensors:
            tensors[f"model/{name}.weight"][vocab_size:] = 9.0
    meta = {"config": asdict(cfg), "vocab_size": vocab_size, "tokenizer": tokenizer}
    Checkpointer(folder / "checkpoints", mesh=None, keep_last=1, async_save=False).save(5, tensors, meta=meta, rank_state={})
    return folder


SMALL = ModelConfig(hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=24, max_positions=64, init_std=0.3)


def test_export_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", SMALL, vocab_size=257)
    out = tmp_path / "exports" / "mine"
    assert call(export.main, f"run={run}", f"to={out}", "verify=true", "max_shard_size=20KB") == 0
    assert "verified: largest difference of logits to transformers" in capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["mine"]
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1

    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    ours = BytesTokenizer()
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ours.encode_batch([TEXT])[0]
    assert tokenizer.decode(tokenizer.encode(TEXT), clean_up_tokenization_spaces=False) == TEXT
    assert len(tokenizer) == ours.vocab_size

    model = restore(run, device=torch.device("cpu")).model
    prompt = torch.tensor([[72, 101, 256, 33]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(prompt).logits, model(prompt), atol=1e-5, rtol=1e-5)
    expected = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()
    assert generate_tokens(model, prompt, max_new_tokens=20) == expected

    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert call(export.main, f"run={run}", f"to={out}") == 2
    assert f"to={out} exists; nothing is overwritten" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "divisor", "padded"), [(10, 8, 16), (50257, 128, 50304), (16, 8, 16)])
def test_export_has_no_rows_of_padding(vocab: int, divisor: int, padded: int, tied: bool, tmp_path: Path) -> None:
    model = replace(SMALL, vocab_divisor=divisor, hidden_size=8, num_layers=1, tie_embeddings=tied)
    assert ModelSizes.of(model, vocab).padded_vocab == padded
    run = make_run(tmp_path / "run", model, vocab_size=vocab, tokenizer=None)
    assert call(export.main, f"run={run}", f"to={tmp_path / 'out'}", "verify=true") == 0
    files = stored(tmp_path / "out")
    tables = {name: value for name, value in files.items() if name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert len(tables) == (1 if tied else 2)
    assert all(table.shape == (vocab, 8) and table.max() < 9.0 for table in tables.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == vocab


def test_export_in_16_bits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", SMALL, vocab_size=257, dtype="bf16")
    assert call(export.main, f"run={run}", f"to={tmp_path / 'a'}", "verify=true") == 0
    assert {value.dtype for value in stored(tmp_path / "a").values()} == {torch.bfloat16}
    assert call(export.main, f"run={run}", f"to={tmp_path / 'b'}", "dtype=fp16", "verify=true") == 0
    assert {value.dtype for value in stored(tmp_path / "b").values()} == {torch.float16}


def test_nothing_is_left_of_an_export_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", SMALL, vocab_size=257)
    save, calls = safetensors.torch.save_file, []

    def fail_second(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail_second)
        assert call(export.main, f"run={run}", f"to={tmp_path / 'out'}", "max_shard_size=20KB") == 1
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    assert call(export.main, f"run={run}", f"to={tmp_path / 'out'}", "verify=true") == 2
    assert "the logits of transformers differ by" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_export_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", replace(SMALL, norm="layernorm"), vocab_size=257)
    for arguments, message in (
        ([f"run={run}"], "to= is missing"),
        ([f"run={run}", f"to={tmp_path / 'out'}"], "nearest is llama, which cannot have model.norm=layernorm"),
        ([f"run={run}", f"to={tmp_path / 'out'}", "dtype=int8"], "dtype: must be one of fp64, fp32, bf16, fp16, got 'int8'"),
        ([f"run={tmp_path / 'none'}", f"to={tmp_path / 'out'}"], "There is no complete checkpoint"),
    ):
        assert call(export.main, *arguments) == 2
        assert message in capsys.readouterr().err
    good = make_run(tmp_path / "good", SMALL, vocab_size=257)
    assert call(export.main, f"run={good}", f"to={tmp_path / 'out'}", "max_shard_size=big") == 2
    assert "max_shard_size=big: give a size such as 500MB" in capsys.readouterr().err
    lost = make_run(tmp_path / "lost", SMALL, vocab_size=257, tokenizer="/somewhere/tokenizer")
    assert call(export.main, f"run={lost}", f"to={tmp_path / 'out'}") == 2
    assert "its run has no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A tiny Llama with the tokenizer of bytes."""
    make_model("llama", vocab_size=257).save_pretrained(tmp_path / "hf")
    write_bytes_tokenizer(tmp_path / "hf")
    return tmp_path / "hf"


def test_generate_from_a_hugging_face_folder(hf_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(generate.main, f"run={hf_folder}", "prompt=Hello", "temperature=0", "max_new_tokens=9", "device=cpu") == 0
    told = capsys.readouterr().out
    tokenizer, theirs = AutoTokenizer.from_pretrained(hf_folder), AutoModelForCausalLM.from_pretrained(hf_folder)
    rows = theirs.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=9, do_sample=False, eos_token_id=256)
    assert told == BytesTokenizer().decode([i for i in rows[0].tolist() if i != 256]) + "\n"
    (hf_folder / "tokenizer.json").unlink()
    (hf_folder / "tokenizer_config.json").unlink()
    assert call(generate.main, f"run={hf_folder}", "prompt=Hello") == 2
    assert "has no tokenizer (tokenizer.json, vocab.json or a sentencepiece .model)" in capsys.readouterr().err


def test_evaluate_a_hugging_face_folder(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is that of transformers over the same windows."""
    monkeypatch.chdir(tmp_path)
    text = "".join(chr(97 + i * i % 23) for i in range(700))
    (tmp_path / "text.txt").write_text(text)
    assert call(evaluate.main, f"run={hf_folder}", f"valid=[{tmp_path / 'text.txt'}]", "device=cpu") == 0
    told = capsys.readouterr().out
    ids = torch.tensor([*text.encode(), 256])
    theirs = AutoModelForCausalLM.from_pretrained(hf_folder)
    windows = [ids[i : i + 65] for i in range(0, len(ids) - 64, 64)]
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(theirs(w[None, :-1]).logits[0], w[1:]).item() for w in windows]
    assert float(told.split("validation loss ")[1].split(",")[0]) == pytest.approx(float(np.mean(losses)), abs=1e-5)


def test_bad_folders_end_the_tools_with_exit_code_2(hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config = hf_folder / "model.safetensors", hf_folder / "config.json"
    data, values = weights.read_bytes(), json.loads(config.read_text())

    def check(message: str) -> None:
        for main, arguments in ((generate.main, ["prompt=x"]), (evaluate.main, []), (export.main, [f"to={tmp_path / 'out'}"])):
            assert call(main, f"run={hf_folder}", *arguments) == 2
            assert message in capsys.readouterr().err

    weights.write_bytes(data[:-100])
    check("model.safetensors is not a complete safetensors file")
    weights.write_bytes(data)
    config.write_text(json.dumps(values | {"intermediate_size": 25}))
    check("model.layers.0.mlp.gate_proj.weight (file (24, 16), config.json (25, 16))")
    config.write_text(json.dumps(values | {"model_type": "mixtral"}))
    check("model_type='mixtral' is not supported; supported: llama")
    config.write_text(json.dumps(values))
    weights.unlink()
    check("has no weights")
    assert not (tmp_path / "out").exists()


def test_pickles_are_converted_once(hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = stored(hf_folder)
    torch.save(given, hf_folder / "pytorch_model.bin")
    (hf_folder / "model.safetensors").unlink()
    assert call(generate.main, f"run={hf_folder}", "prompt=x") == 2
    assert f"paro-export run={hf_folder} to=<new folder> allow_pickle=true" in capsys.readouterr().err
    assert call(export.main, f"run={hf_folder}", f"to={tmp_path / 'new'}", "allow_pickle=true", "verify=true") == 0
    written = stored(tmp_path / "new")
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)
    assert call(generate.main, f"run={tmp_path / 'new'}", "prompt=x", "max_new_tokens=2", "device=cpu") == 0


def test_hub_that_cannot_be_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert call(generate.main, "run=hf://owner/name-that-nobody-has", "prompt=x") == 2
    assert "hf://owner/name-that-nobody-has is not in the local cache and the hub cannot be reached" in capsys.readouterr().err


def test_stop_tokens_of_a_chat_model(tmp_path: Path) -> None:
    """End of text and end of turn, in the generation config; a run with this tokenizer has them, too."""
    train_tokenizer(iter(["some words of text"] * 3), tmp_path / "plain", vocab_size=280)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    run = tmp_path / "run"
    tokenizer.save_pretrained(run / "tokenizer")
    (run / "tokenizer" / "model.safetensors").write_bytes(b"weights that are no part of a tokenizer")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_ids(run / "tokenizer").stop == (0, end)
    make_run(run, SMALL, vocab_size=len(tokenizer), tokenizer="anywhere")
    assert call(export.main, f"run={run}", f"to={tmp_path / 'out'}", "verify=true") == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, end]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [0, end]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("some <|im_end|>") == tokenizer.encode("some <|im_end|>")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0


def test_tokenizer_whose_class_follows_from_the_model(tmp_path: Path) -> None:
    """As GPT-2 lies on the hub: vocab.json, merges.txt and a config that names no class of tokenizer."""
    train_tokenizer(iter(["some words of text"] * 3), tmp_path / "plain", vocab_size=280)
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    hf = tmp_path / "hf"
    make_model("gpt2", vocab_size=len(plain), bos_token_id=0, eos_token_id=0).save_pretrained(hf)
    plain.backend_tokenizer.model.save(str(hf))
    (hf / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    text = "some words of text<|endoftext|>some"
    expected = AutoTokenizer.from_pretrained(hf).encode(text)
    assert expected == plain.encode(text)
    assert call(export.main, f"run={hf}", f"to={tmp_path / 'out'}") == 0
    run = make_run(tmp_path / "run", SMALL, vocab_size=len(plain), tokenizer="anywhere")  # a Llama with this tokenizer
    Run(folder=run, checkpoint=None, finished=False).create(Config(), hf)
    assert not list((run / "tokenizer").glob("*.safetensors"))
    assert call(export.main, f"run={run}", f"to={tmp_path / 'llama'}") == 0
    for out in ("out", "llama"):
        assert AutoTokenizer.from_pretrained(tmp_path / out).encode(text) == expected
        assert json.loads((tmp_path / out / "generation_config.json").read_text())["eos_token_id"] == 0


def test_tokenizers_that_are_one_file(tmp_path: Path) -> None:
    import sentencepiece

    train_tokenizer(iter(["some words of text"] * 3), tmp_path / "plain", vocab_size=280)
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    for path in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "plain" / path).unlink(missing_ok=True)
    for name, source in (("json", tmp_path / "plain" / "tokenizer.json"), ("json_folder", tmp_path / "plain")):
        (tmp_path / name).mkdir()
        copy_tokenizer(source, tmp_path / name)
        assert AutoTokenizer.from_pretrained(tmp_path / name).encode(TEXT) == plain.encode(TEXT)
        assert token_ids(tmp_path / name).stop == (0,)

    (tmp_path / "corpus.txt").write_text("some words of text and other words\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "pieces"), vocab_size=40, model_type="bpe", minloglevel=2
    )
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    text = "other words of some text"
    (tmp_path / "folder").mkdir()
    shutil.copyfile(tmp_path / "pieces.model", tmp_path / "folder" / "tokenizer.model")
    for name, source in (("model", tmp_path / "pieces.model"), ("model_folder", tmp_path / "folder")):
        (tmp_path / name).mkdir()
        copy_tokenizer(source, tmp_path / name)
        assert AutoTokenizer.from_pretrained(tmp_path / name).encode(text, add_special_tokens=False) == own.encode(text)
        assert token_ids(tmp_path / name).stop == (2,)
