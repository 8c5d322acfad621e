"""scripts/slurm/train.sbatch with stubs of SLURM: one torchrun per node, a signal before the limit, requeue, resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"

SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then printf '127.0.0.1\\nlocalhost\\n'; else echo "$@" >> "$STUBS/scontrol.log"; fi
"""
# Starts the command once per node and hands signals on, as srun does; its exit code is the largest of its tasks.
SRUN = """#!/usr/bin/env bash
nodes=1
while [[ "$1" == --* ]]; do
  [ "$1" = --nodes ] && nodes="$2"
  [[ "$1" == *=* ]] && shift || shift 2
done
pids=()
for ((node = 0; node < nodes; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
code=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; own=$?; done
  wait "$pid" 2>/dev/null; [ "${own:-0}" -gt "$code" ] && code=$own
done
exit "$code"
"""
# Writes down how it was started; ends at once with $CODE, or on SIGTERM after "saving" for a second.
TORCHRUN = """#!/usr/bin/env python3
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["STUBS"])
(folder / f"torchrun{os.environ['SLURM_NODEID']}.json").write_text(json.dumps([sys.argv[1:], os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]]))
if os.environ["CODE"] != "wait":
    sys.exit(int(os.environ["CODE"]))
def stop(*_):
    time.sleep(1)
    (folder / f"saved{os.environ['SLURM_NODEID']}").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
(folder / f"ready{os.environ['SLURM_NODEID']}").touch()
time.sleep(60)
"""


def stubs(folder: Path) -> dict[str, str]:
    """An environment in which SLURM's commands are stubs, for a job of two nodes."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "stub-torchrun": TORCHRUN}.items():
        path = folder / name
        path.write_text(text.replace("/usr/bin/env python3", sys.executable))
        path.chmod(0o755)
    port = free_port()
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STUBS": str(folder),
        "SLURM_JOB_ID": str(port - 20000 if 20000 <= port < 30000 else 4321),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "TORCHRUN": str(folder / "stub-torchrun"),
        "RANKS_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A free port between 20000 and 30000."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def requeued(folder: Path) -> list[str]:
    log = folder / "scontrol.log"
    return log.read_text().splitlines() if log.exists() else []


def wait_for(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("code", [0, 3])
def test_one_torchrun_per_node_and_no_requeue_without_a_signal(tmp_path: Path, code: int) -> None:
    env = stubs(tmp_path) | {"CODE": str(code)}
    done = subprocess.run(
        ["bash", str(SCRIPT), "run_name=a b", "data.train='x/*.txt'"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert requeued(tmp_path) == []
    for node in (0, 1):
        arguments, seconds = json.loads((tmp_path / f"torchrun{node}.json").read_text())
        expected = (
            f"--nnodes 2 --nproc-per-node 1 --node-rank {node} --master-addr 127.0.0.1 --master-port {20000 + int(env['SLURM_JOB_ID'])}"
        )
        assert arguments == [*expected.split(), "--max-restarts", "0", "-m", "paro_lm.train", "run_name=a b", "data.train='x/*.txt'"]
        assert int(seconds) > 30


def test_the_signal_before_the_limit_saves_and_requeues(tmp_path: Path) -> None:
    env = stubs(tmp_path) | {"CODE": "wait"}
    job = subprocess.Popen(["bash", str(SCRIPT), "run_name=a"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists(), 20)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 0, output
    assert (tmp_path / "saved0").exists()  # the script waited for it
    assert (tmp_path / "saved1").exists()
    assert requeued(tmp_path) == [f"requeue {env['SLURM_JOB_ID']}"]
    assert "goes back to the queue" in output


def test_the_script_asks_slurm_for_what_it_needs() -> None:
    options = [line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--ntasks-per-node=1", "--open-mode=append", "--signal=B:USR1@600"} <= set(options)


@pytest.mark.slow
def test_a_requeued_job_continues_the_run(tmp_path: Path) -> None:
    """Two real torchruns of one rank each: signal, checkpoint, requeue, and the second job goes on to the end."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {i} of some text to learn" for i in range(400)))
    env = stubs(tmp_path) | {"TORCHRUN": f"{sys.executable} -m torch.distributed.run", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    size = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_size=16"]
    common = [
        f"output_dir={tmp_path}",
        "run_name=r",
        f"data.train={tmp_path}/text.txt",
        f"data.cache_dir={tmp_path}/cache",
        "seq_length=16",
    ]
    common += [*size, "data.tokenizer=bytes", "global_batch_size=4", "micro_batch_size=2", "eval.every=0", "parallel.sharding=IIG"]
    metrics = tmp_path / "r" / "metrics.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"loss"' in line] if metrics.exists() else []

    with (tmp_path / "job.log").open("w") as log:
        job = subprocess.Popen(["bash", str(SCRIPT), *common, "steps=100000"], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
        wait_for(lambda: len(steps()) > 3 or job.poll() is not None, 90)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=90) == 0, (tmp_path / "job.log").read_text()[-3000:]
    stopped_at = len(steps())
    assert requeued(tmp_path) == [f"requeue {env['SLURM_JOB_ID']}"]
    assert (tmp_path / "r" / "checkpoints" / f"step_{stopped_at}").is_dir()
    again = ["bash", str(SCRIPT), *common, f"steps={stopped_at + 3}"]
    done = subprocess.run(again, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert steps() == list(range(1, stopped_at + 4))
    assert len(requeued(tmp_path)) == 1
