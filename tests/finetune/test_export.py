"""What fine-tuning gives back: a merged model or adapters that other libraries load, and the checkpoint that was best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paro_lm.checkpoint.folder import latest_checkpoint, read_meta
from paro_lm.restore import restore
from paro_lm.testing import run_distributed
from paro_lm.tools import export
from tests.command import call
from tests.finetune.plain import make_config, make_folder
from tests.finetune.test_finetune import fit
from tests.test_trainer import records

LORA = ["finetune.lora_rank=3", "finetune.lora_alpha=6", "steps=5", "optim.lr=0.1"]


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(4, 24).view(1, -1) * 11 % 250
    with torch.no_grad():
        output = model.eval()(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize(
    ("name", "targets"), [("llama_tied_head_dim", "q,k,v,o,gate,up,down"), ("gpt2", "q,v,o,up,down"), ("qwen3", "k,down")]
)
def test_adapters_merged_and_in_the_format_of_peft(tmp_path: Path, name: str, targets: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder = make_folder(tmp_path / "model", name, torch.float64)
    cfg = make_config(folder, "run_name=lora", *LORA, f"finetune.lora_targets=[{targets}]", "precision=fp64")
    run_distributed(fit, 1, [cfg])
    run = f"{cfg.output_dir}/lora"
    expected = logits_of(restore(run, device=torch.device("cpu")).model)
    assert call(export.main, f"run={run}", f"to={tmp_path / 'merged'}", "verify=true") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == name.split("_")[0]
    # transformers computes norms and rotations in fp32 also for fp64 weights
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=1e-5)

    assert call(export.main, f"run={run}", f"to={tmp_path / 'adapter'}", "adapter=true") == 0
    base = AutoModelForCausalLM.from_pretrained(folder)
    before = logits_of(base)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 0.1


def test_adapters_of_a_run_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "model")
    assert call(export.main, f"run={folder}", f"to={tmp_path / 'adapter'}", "adapter=true") == 2
    assert "has no LoRA adapters" in capsys.readouterr().err
    assert call(export.main, f"run={folder}", f"to={tmp_path / 'adapter'}", "adapter=true", "verify=true") == 2
    assert not (tmp_path / "adapter").exists()


def test_epochs_and_the_best_checkpoint(tmp_path: Path) -> None:
    """Two epochs of 1454 tokens in samples of 17, 8 a step: 172 samples, 22 steps. A rate that ruins the model in the end leaves the
    best in the middle; a resumed run does not forget it."""
    folder = make_folder(tmp_path / "model")
    options = [
        "epochs=2", "eval.every=4", "eval.batches=0", "checkpoint.keep_best=val_loss", "optim.schedule=constant", "optim.lr=0.02",
        "checkpoint.keep_last=1",
    ]  # fmt: skip
    half = make_config(folder, "run_name=best", *options, "epochs=1")
    whole = make_config(folder, "run_name=best", *options)
    run_distributed(fit, 1, [half, whole])
    run = Path(whole.output_dir) / "best"
    seen = {record["step"]: record["val_loss"] for record in records(whole) if "val_loss" in record}
    samples = -(-1454 // 17)
    assert max(seen) == -(-2 * samples // 8)
    trained = {step: loss for step, loss in seen.items() if step}
    best = min(trained, key=lambda step: trained[step])
    found = latest_checkpoint(run / "best")
    assert found is not None
    meta = read_meta(found)
    assert (meta["step"], meta["val_loss"]) == (best, trained[best])
    assert len(list((run / "best").glob("step_*"))) == 1
    assert {path.name for path in (run / "checkpoints").glob("step_*")} == {f"step_{max(seen)}"}
    assert not list((run / "tokenizer").glob("*.safetensors"))
    assert restore(run / "best", device=torch.device("cpu")).tokenizer is not None
