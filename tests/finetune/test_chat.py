"""From conversations to a model that answers, by command; and input that cannot be trained on, with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paro_lm import train
from paro_lm.restore import restore
from tests.command import call
from tests.data.test_conversation import CHATML, make_tokenizer
from tests.finetune.plain import make_folder


def paro_train(*arguments: str) -> int:
    return call(train.main, *arguments)


def arguments(folder: Path, chats: Path, *others: str) -> list[str]:
    return [
        "model=hf", f"model.init_from={folder}", "model.vocab_divisor=4", "data=chat", f"data.train={chats}", "data.valid_fraction=0.1",
        f"data.cache_dir={folder / 'cache'}", f"output_dir={folder / 'outputs'}", "run_name=chat", "seq_length=48", "global_batch_size=8",
        "micro_batch_size=8", "runtime.device=cpu", *others,
    ]  # fmt: skip


def test_a_model_learns_to_answer_and_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question has its own one-letter answer; only answers carry loss, so the loss falls to nothing though questions are random."""
    folder = make_folder(tmp_path / "model", dtype=torch.float32)
    make_tokenizer(folder, CHATML)
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"{noise}{letter}"}, {"role": "assistant", "content": letter.upper()}]}
        for noise in range(10)
        for letter in "abc"
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["epochs=40", "optim.lr=0.01", "eval.every=20", "eval.batches=0", "checkpoint.keep_best=val_loss", "optim.schedule=linear"]
    assert paro_train(*arguments(folder, chats, *options)) == 0
    printed = capsys.readouterr().out
    assert "documents in" in printed
    assert "best: " in printed
    restored = restore(folder / "outputs" / "chat" / "best", device=torch.device("cpu"))
    assert restored.meta["val_loss"] < 0.1
    assert restored.meta["hf_config"]["model_type"] == "llama"
    tokenizer = restored.need_tokenizer()
    for letter in "abc":
        (ids,) = tokenizer.encode_batch([f"<|im_start|>user\n5{letter}<|im_end|>\n<|im_start|>assistant\n"])
        with torch.no_grad():
            said = restored.model(torch.tensor([ids]))[0, -1].argmax().item()
            then = restored.model(torch.tensor([[*ids, said]]))[0, -1].argmax().item()
        assert tokenizer.decode([int(said), int(then)]) == f"{letter.upper()}<|im_end|>"


def test_refusals_have_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "model", dtype=torch.float32)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}]}) + "\n")

    def refused(*others: str) -> str:
        assert paro_train(*arguments(folder, chats, "data.valid_fraction=0", "eval.every=0", *others)) == 2
        return capsys.readouterr().err

    assert "has no chat template" in refused()
    make_tokenizer(folder, CHATML)
    assert "no token of its 1 documents carries loss within the first 49 tokens; use a longer seq_length" in refused()
    assert "model.num_layers: comes from model.init_from, which has 2, got 3; leave it out" in refused("model.num_layers=3")
    assert "finetune.trainable: layer.* matches no parameter" in refused(
        "seq_length=200", "model.max_positions=256", "finetune.trainable=layer.*"
    )
    assert "finetune.last_blocks: the model has model.num_layers=2 blocks, got 3" in refused("finetune.last_blocks=3")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    assert "is not a complete safetensors file" in refused("seq_length=200", "model.max_positions=256")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "has no tokenizer" in refused()
    assert not (folder / "outputs").exists()
