"""paro-prepare and paro-inspect: what they print and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paro_lm.data.indexed import IndexedReader
from paro_lm.tools import inspect, prepare
from tests.command import call


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text number {i}"}) + "\n" for i in range(20)))
    return [f"data.train={path}", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=bytes", "data.valid_fraction=0.1"]


def test_prepare_says_what_it_made(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(prepare.main, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    train, valid = lines[0].split()[1], lines[1].split()[1]
    assert lines[0].startswith("train: ")
    assert lines[1].startswith("valid: ")
    assert f"{IndexedReader(train).num_documents} documents, {IndexedReader(train).num_tokens} tokens, uint16" in lines[0]
    assert IndexedReader(train).num_documents == 18
    assert IndexedReader(valid).num_documents == 2
    assert lines[2].startswith("tokenizer: bytes  257 ids, end of document 256")


def test_inspect_shows_documents_and_samples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(inspect.main, *arguments, "seq_length=24", "data.document_mask=true", "data.valid_fraction=0") == 0
    out = capsys.readouterr().out
    assert "20 documents, 290 tokens of type uint16" in out
    assert "tokens per document: least 14, median 14, mean 14.5, most 15" in out
    assert "document 0 (14 tokens): 'text number 0<|endoftext|>'" in out
    samples = [line for line in out.splitlines() if line.startswith("sample ")]
    assert [line.split(":")[0] for line in samples] == ["sample 0", "sample 1", "sample 2"]
    masks = [line.split(": ")[1] for line in out.splitlines() if "loss mask" in line]
    stated = [int(line.split("loss on ")[1].split()[0]) for line in samples]
    assert [mask.count("1") for mask in masks] == stated
    assert all(len(mask) == 24 and 0 < mask.count("0") < 3 for mask in masks)


@pytest.mark.parametrize("tool", [prepare, inspect])
def test_exit_codes(tool: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool.main  # type: ignore[attr-defined]
    assert call(main, "--help") == 0
    examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {tool.TOOL.name} ")]  # type: ignore[attr-defined]
    assert len(examples) >= 2
    assert call(main, f"data.train={tmp_path / 'none.txt'}", f"data.cache_dir={tmp_path}") == 2
    assert "none.txt" in capsys.readouterr().err
    assert call(main, "data.trian=x") == 2
    assert "data.trian" in capsys.readouterr().err


def test_too_little_text_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("short")
    arguments = [f"data.train={tmp_path / 'a.txt'}", f"data.cache_dir={tmp_path}", "data.tokenizer=bytes", "data.valid_fraction=0"]
    assert call(inspect.main, *arguments, "seq_length=64") == 2
    assert "has 6 tokens, one sample of seq_length=64 needs 65" in capsys.readouterr().err
