"""The folder of a run: its copy of the tokenizer, and what an earlier attempt may have left in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paro_lm.config import Config
from paro_lm.data.tokenizer import load_tokenizer, train_tokenizer
from paro_lm.run import Run


def make_tokenizer(folder: Path, text: str) -> Path:
    train_tokenizer(iter([text] * 20), folder, vocab_size=300)
    return folder


def test_a_tokenizer_that_an_attempt_left_is_replaced(tmp_path: Path) -> None:
    first, second = make_tokenizer(tmp_path / "a", "abab abab abc"), make_tokenizer(tmp_path / "b", "xyz xyz yzx yzx")
    folder = tmp_path / "run"
    attempt = Run(folder=folder, checkpoint=None, finished=False)
    for tokenizer in (first, second):
        attempt.create(Config(), tokenizer)
        assert (attempt.tokenizer / "tokenizer.json").read_text() == (tokenizer / "tokenizer.json").read_text()
    going_on = Run(folder=folder, checkpoint=folder / "checkpoints" / "step_2", finished=False)
    assert (going_on.goes_on, attempt.goes_on) == (True, False)
    going_on.create(Config(), first)
    assert (attempt.tokenizer / "tokenizer.json").read_text() == (second / "tokenizer.json").read_text()
    branch = Run(folder=tmp_path / "branch", checkpoint=folder / "checkpoints" / "step_2", finished=False)
    assert not branch.goes_on
    branch.create(Config(), first)
    assert sorted(path.name for path in branch.folder.iterdir()) == ["config.yaml", "tokenizer"]


def test_a_file_of_any_name_becomes_a_folder_that_loads(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes((make_tokenizer(tmp_path / "a", "abab abab abc") / "tokenizer.json").read_bytes())
    run = Run(folder=tmp_path / "run", checkpoint=None, finished=False)
    run.create(Config(), file)
    assert load_tokenizer(run.tokenizer).encode_batch(["abab"]) == load_tokenizer(file).encode_batch(["abab"])


def test_a_tokenizer_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the tokenizer .*gone that the data were made with is not there; set data.tokenizer"):
        Run(folder=tmp_path / "run", checkpoint=None, finished=False).create(Config(), tmp_path / "gone")
