"""Bad input: exit code 2, a message that names the problem, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from paro_lm.train import main
from tests.command import call
from tests.test_trainer import MODEL, tokens  # noqa: F401 (a fixture)

SHORT = [*MODEL, "seq_length=16", "global_batch_size=4", "micro_batch_size=2", "steps=1", "eval.every=0"]


def train(folder: Path, *overrides: str) -> int:
    arguments = [*SHORT, f"output_dir={folder / 'outputs'}", f"data.cache_dir={folder / 'cache'}", "run_name=bad", *overrides]
    return call(main, *arguments)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


ENGLISH = "the quick brown fox jumps over the lazy dog and then sleeps for a while\n" * 40


@pytest.mark.parametrize("kind", ["missing", "empty", "broken json", "too short", "bad magic", "only empty documents"])
def test_bad_data_files(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = {
        "missing": (tmp_path / "none.txt", "none.txt"),
        "empty": (write(tmp_path / "empty.txt", ""), "empty.txt"),
        "broken json": (write(tmp_path / "rows.jsonl", '{"text": "a"}\n{"text": "b"}\n{"text": \n'), "rows.jsonl:3"),
        "too short": (write(tmp_path / "short.txt", "ab"), "short"),
        "bad magic": (write(tmp_path / "old.idx", "TNTIDX\0\0") and write(tmp_path / "old.bin", "x") and tmp_path / "old", "TNTIDX"),
        "only empty documents": (write(tmp_path / "blank.jsonl", '{"text": ""}\n{"text": " "}\n'), "blank.jsonl"),
    }
    path, word = text[kind]
    assert train(tmp_path, f"data.train=[{path}]", "data.tokenizer=bytes", "data.valid_fraction=0") == 2
    assert word in capfd.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.vocab_size=100"], ["model.vocab_size=100", "257"]),
        (["optim.lr=fast"], ["optim.lr"]),
        (["optim.learning_rate=1"], ["optim.learning_rate"]),
        (["+a.b=1"], ["a.b"]),
        (["global_batch_size=5"], ["global_batch_size", "5", "2"]),
        (["parallel.tp=2"], ["parallel.tp", "1 ranks"]),
        (["parallel.group_size=3"], ["parallel.group_size", "3"]),
        (["model.num_heads=3"], ["model.num_heads", "20"]),
        (["logging.wandb=online"], ["logging.wandb"]),
        (["data.tokenizer=/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_bad_options(overrides: list[str], words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "text.txt", ENGLISH)
    tokenizer = [] if any("tokenizer" in override for override in overrides) else ["data.tokenizer=bytes"]
    assert train(tmp_path, f"data.train=[{path}]", "data.valid_fraction=0", *tokenizer, *overrides) == 2
    message = capfd.readouterr().err
    assert all(word in message for word in words), message
    assert not (tmp_path / "outputs").exists()


def test_all_problems_are_told_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "optim.lr=fast", "parallel.sharding=XYZ", "global_batch_size=5", "nonsense=1") == 2
    message = capfd.readouterr().err
    assert all(word in message for word in ("optim.lr", "parallel.sharding", "global_batch_size", "nonsense")), message


def test_output_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path / "text.txt", ENGLISH)
    blocked = write(tmp_path / "a_file", "")
    arguments = [f"data.train=[{text}]", "data.tokenizer=bytes", "data.valid_fraction=0", f"output_dir={blocked / 'outputs'}"]
    assert train(tmp_path, *arguments) == 2
    assert "output_dir" in capfd.readouterr().err


def test_resume_of_what_is_not_there_or_has_changed(tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    data = [f"data.train=[{tokens / 'train'}]", "data.tokenizer=bytes"]
    assert train(tmp_path, *data, "checkpoint.resume=/no/such/run") == 2
    assert "/no/such/run" in capfd.readouterr().err
    assert train(tmp_path, *data) == 0
    assert "checkpoint:" in capfd.readouterr().out
    assert train(tmp_path, *data) == 0  # finished
    assert "finished" in capfd.readouterr().out
    assert train(tmp_path, *data, "checkpoint.resume=/no/such/run") == 2
    assert train(tmp_path, *data, "checkpoint.resume=never") == 2
    assert "checkpoint.resume=never" in capfd.readouterr().err
    assert train(tmp_path, *data, "optim.lr=0.5", "steps=2") == 2
    message = capfd.readouterr().err
    assert "optim.lr: 0.001 -> 0.5" in message
    assert "steps" not in message.split("\n  ", 1)[1].split("\nTo continue")[0]
    assert train(tmp_path, *data, "optim.lr=0.5", "steps=2", f"checkpoint.resume={tmp_path / 'outputs' / 'bad'}") == 0
    other = f"checkpoint.resume={tmp_path / 'outputs' / 'bad'}"
    assert train(tmp_path, *data, "run_name=next", "steps=2", other) == 2
    assert "steps=2 leaves nothing to do after step 2" in capfd.readouterr().err
    assert not (tmp_path / "outputs" / "next").exists()
    older = tmp_path / "outputs" / "bad" / "checkpoints" / "step_1"
    assert train(tmp_path, *data, "steps=3", f"checkpoint.resume={older}") == 2
    assert "whose newest is step_2. To go back to it, move the newer ones out of" in capfd.readouterr().err
    other_size = ("model.num_layers=3", "steps=3", other)
    assert train(tmp_path, *data, *other_size) == 2
    assert "layers.2" in capfd.readouterr().err
    assert train(tmp_path, *data, "optim.lr=0.5", "steps=2") == 0  # what was refused has not changed what the run is
    assert "finished" in capfd.readouterr().out
    assert train(tmp_path, *data, "optim.lr=0.5", "steps=1") == 0
    assert "with steps=4" in capfd.readouterr().out
    shard = next((tmp_path / "outputs" / "bad" / "checkpoints" / "step_2").glob("*.distcp"))
    shard.write_bytes(b"")
    assert train(tmp_path, *data, "optim.lr=0.5", "steps=3", f"checkpoint.resume={tmp_path / 'outputs' / 'bad'}") == 2
    assert shard.name in capfd.readouterr().err


def test_a_tokenizer_that_changed_with_the_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More text makes another tokenizer of the same size; going on with it would train on ids that mean other text."""
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "a.txt", ENGLISH)
    data = [f"data.train={tmp_path / 'texts' / '*.txt'}", "data.vocab_size=300", "data.valid_fraction=0"]
    assert train(tmp_path, *data) == 0
    write(tmp_path / "texts" / "b.txt", "elle a vu les belles feuilles du vieux chêne\n" * 80)
    capfd.readouterr()
    assert train(tmp_path, *data, "steps=2") == 2
    told = capfd.readouterr().err
    run = tmp_path / "outputs" / "bad"
    assert "was trained with another tokenizer" in told
    remedy = f"data.tokenizer={run / 'tokenizer'} checkpoint.resume={run}"
    assert remedy in told
    assert train(tmp_path, *data, "steps=2", *remedy.split()) == 0
    assert f"continues from {run / 'checkpoints' / 'step_1'}" in capfd.readouterr().out
