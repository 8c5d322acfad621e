"""One command trains on two emulated nodes of two ranks, to the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_emulated_cluster import needs_cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@needs_cluster
def test_one_command_trains_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {i} of some text to learn" for i in range(400)))
    size = ["model.hidden_size=20", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_size=24"]
    options = [
        f"output_dir={tmp_path}",
        f"data.train={tmp_path}/text.txt",
        f"data.cache_dir={tmp_path}/cache",
        "data.tokenizer=bytes",
        *size,
    ]
    options += ["precision=fp64", "seq_length=17", "global_batch_size=12", "micro_batch_size=1", "steps=8", "eval.every=0", "optim.lr=0.01"]
    train = [sys.executable, "-m", "paro_lm.train", *options]
    cluster = [sys.executable, "scripts/emulated_cluster.py", "run", "--nodes", "2", "--ranks", "2", "--rate", "500mbit", "--"]
    runs = {"one": train, "four": [*cluster, *train, "parallel.sharding=IGG", "parallel.check_replicas_every=3"]}
    losses = {}
    for name, command in runs.items():
        done = subprocess.run([*command, f"run_name={name}"], cwd=ROOT, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [record["loss"] for record in records if "loss" in record]
    assert len(losses["one"]) == 8
    assert losses["four"] == pytest.approx(losses["one"], abs=1e-10)
    config = (tmp_path / "four" / "config.yaml").read_text()
    assert "sharding: IGG" in config
