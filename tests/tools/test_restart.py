"""A rank or a whole node is lost: torchrun starts the others again, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.test_trainer import losses, make_config, overrides, tokens  # noqa: F401 (a fixture)
from tests.tools.test_slurm import free_port

ROOT = Path(__file__).resolve().parents[2]


OPTIONS = ("steps=7", "checkpoint.every=2", "parallel.sharding=GGG")


def torchrun(*flags: str, tokens: Path, run_name: str, **environment: str) -> subprocess.Popen[str]:  # noqa: F811
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        "-m",
        "tests.tools.killed",
        *overrides(tokens, *OPTIONS, f"run_name={run_name}"),
    ]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _fit(rank: int, world_size: int, tokens: Path) -> int:  # noqa: F811
    return Trainer(make_config(tokens, *OPTIONS, "run_name=whole")).fit()


def check_losses(tokens: Path, run_name: str) -> None:  # noqa: F811
    """Those of one process that nothing happened to."""
    whole = make_config(tokens, *OPTIONS, "run_name=whole")
    if not (Path(whole.output_dir) / "whole").exists():
        run_distributed(_fit, 1, tokens)
    mine = losses(make_config(tokens, *OPTIONS, f"run_name={run_name}"))
    assert len(mine) == 7
    torch.testing.assert_close(mine, losses(whole), rtol=0, atol=1e-10)


def test_a_killed_rank(tokens: Path) -> None:  # noqa: F811
    job = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", tokens=tokens, run_name="rank", KILLED="rank")
    told, _ = job.communicate(timeout=120)
    assert job.returncode == 0, told[-5000:]
    check_losses(tokens, "rank")


@pytest.mark.slow
def test_a_lost_node(tokens: Path) -> None:  # noqa: F811
    """The other node goes on alone, with half the ranks, in the same global batches."""
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "lost"]
    flags += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf"]
    stays = torchrun(*flags, "is_host=1,last_call_timeout=20", tokens=tokens, run_name="node")
    lost = torchrun(*flags, "is_host=0,last_call_timeout=20", tokens=tokens, run_name="node", KILLED="node")
    told = stays.communicate(timeout=200)[0]
    lost.communicate(timeout=60)
    assert lost.returncode == -9
    assert stays.returncode == 0, told[-5000:]
    assert "dp_intra 2" in told or "dp_inter 2" in told
    check_losses(tokens, "node")
