"""Tokenizers: each kind loads, gives back the text, knows its special ids, and refuses what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paro_lm.data.encoding import build_encoder, flatten
from paro_lm.data.tokenizer import END_OF_TEXT, BytesTokenizer, load_tokenizer, tokenizer_digest, train_tokenizer

TEXT = ["The state of the Union is strong.\n\n", "naïve café — 12,345 \U0001f600", " two  spaces", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(iter(TEXT * 30), folder, vocab_size=300)
    return folder


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_batch(["aé", ""]) == [[97, 0xC3, 0xA9], []]
    assert tokenizer.decode([97, 0xC3, 0xA9, 256, 0xFF]) == f"aé{END_OF_TEXT}\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.eos) == (257, 256, None, 256)


def test_trained_tokenizer_loads_everywhere(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for ours in (load_tokenizer(folder), load_tokenizer(folder / "tokenizer.json")):
        ids = ours.encode_batch(TEXT)
        assert ids == [theirs(t, add_special_tokens=False)["input_ids"] for t in TEXT]
        assert [ours.decode(i) for i in ids] == TEXT
        assert 257 < ours.vocab_size == len(theirs) <= 300
        assert ours.eod == 0
        assert ours.decode([0]) == END_OF_TEXT
    assert [p.name for p in folder.parent.iterdir()] == ["bpe"]
    assert theirs.eos_token_id == 0


def test_training_needs_room_for_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size=256: .* at least 257"):
        train_tokenizer(iter(TEXT), tmp_path / "t", vocab_size=256)


def test_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("the state of the union is strong and the people are free\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), vocab_size=60, model_type="bpe", minloglevel=2
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    for source in (tmp_path / "sp.model", tmp_path):  # a folder with one .model
        tokenizer = load_tokenizer(source)
        assert tokenizer.encode_batch(["the union", "free"]) == reference.encode(["the union", "free"])
        assert tokenizer.decode(tokenizer.encode_batch(["the union"])[0]) == "the union"
        assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.eod) == (60, 1, 2, 2)
    assert build_encoder(tokenizer.spec)(["the union"]) == reference.encode(["the union"])


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.model").write_text("no model")
    (tmp_path / "bad.json").write_text("{}")
    for source, message in [
        ("none", "no such file"),
        ("empty", "has no tokenizer.json"),
        ("bad.model", "sentencepiece"),
        ("bad.json", "does not load"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path / source)


def test_truncation_and_padding_of_a_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode_batch(TEXT) == load_tokenizer(folder).encode_batch(TEXT)


def test_lone_surrogates_are_replaced(folder: Path) -> None:
    assert load_tokenizer(folder).encode_batch(["a\ud800b"]) == load_tokenizer(folder).encode_batch(["a?b"])
    assert BytesTokenizer().encode_batch(["a\ud800b"]) == [[97, 63, 98]]


def test_digest_follows_content_not_place_nor_weights(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(tmp_path / "copy") == tokenizer_digest(folder)
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    assert tokenizer_digest(tmp_path / "copy") != tokenizer_digest(folder)


def test_flatten() -> None:
    tokens, lengths = flatten([[1, 2], [], [65_535]], np.uint16)
    assert tokens.tolist() == [1, 2, 65_535]
    assert lengths.tolist() == [2, 0, 1]
    assert tokens.dtype == np.uint16
    with pytest.raises(OverflowError):
        flatten([[70_000]], np.uint16)
