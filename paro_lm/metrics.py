"""Numbers of a run: what is measured per step, and the file that holds one record per step whatever happened in between.

`metrics.jsonl` has three kinds of records, each a JSON object on a line of its own:
per step `StepRecord.as_dict()`; per evaluation `step, val_loss, val_ppl`; once per run `state_bytes`, a list over ranks of the bytes of
`param`, `grad` and `main`. Floats are written with full precision; what is not finite (a skipped step) is written as null, since
JSON has no other word for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from rich.console import Console

from paro_lm.config import LoggingConfig
from paro_lm.console import ProgressReporter
from paro_lm.trackers import TensorboardTracker, WandbTracker, tracker_problems

PEAK_TFLOPS_16BIT = (
    (r"\bGB200\b|\bB200\b", 2250.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bG?H200\b|\bH100\b|\bH800\b", 989.0),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
    (r"\bV100\b", 125.0),
    (r"\bRTX 4090\b", 165.0),
    (r"\bMI300X\b", 1307.0),
)
"""Name of a device -> TFLOP/s of its dense 16-bit matrix products with fp32 accumulation, from the vendors' data sheets."""


def peak_tflops(stated: float | None, device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of one device for MFU: as stated in the config, else known devices in bf16 / fp16; None (no MFU) for all others."""
    if stated is not None:
        return stated
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return known_peak(name_of(device)) if name_of else None


def known_peak(device_name: str) -> float | None:
    """Entry of the table for a device name as the driver reports it."""
    return next((peak for pattern, peak in PEAK_TFLOPS_16BIT if re.search(pattern, device_name)), None)


def memory_gb(device: torch.device) -> float:
    """Most memory this process has held, in 1e9 bytes: of the accelerator's allocator, else resident memory of the process."""
    if device.type not in ("cpu", "mps"):
        return torch.accelerator.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) / 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one step. `tflops` is per rank; `mfu` its share of the peak of one device, None when the peak is not known."""

    seconds: float
    tokens_per_sec: float
    tokens_per_sec_per_rank: float
    tflops: float
    mfu: float | None


class Throughput:
    """Measures steps: `start()` before the data of a step is fetched, `stop(tokens)` when its loss is on the host.

    What happens between a stop and the next start (evaluation, checkpoints) does not count. `flops_per_token` are model FLOPs,
    forward and backward, see `model.flops.model_flops`; `num_ranks` are all ranks of the world, whatever they are used for.
    """

    def __init__(
        self, *, num_ranks: int, flops_per_token: float, peak_tflops: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_ranks = num_ranks
        self.flops_per_token = flops_per_token
        self.peak_tflops = peak_tflops
        self._clock = clock
        self._started: float | None = None

    def start(self) -> None:
        """Begin a step."""
        self._started = self._clock()

    def stop(self, tokens: int) -> Rates:
        """End a step of `tokens` tokens: the global batch times the sequence, each token once, not once per rank that computed on it."""
        assert self._started is not None, "stop() without start()"
        seconds = max(self._clock() - self._started, 1e-9)
        self._started = None
        tflops = tokens * self.flops_per_token / seconds / self.num_ranks / 1e12
        return Rates(
            seconds=seconds,
            tokens_per_sec=tokens / seconds,
            tokens_per_sec_per_rank=tokens / seconds / self.num_ranks,
            tflops=tflops,
            mfu=None if self.peak_tflops is None else tflops / self.peak_tflops,
        )


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, over all ranks. `step` counts from 1 (the k-th attempt); numbers are global unless said otherwise."""

    step: int
    loss: float
    """Mean over the loss tokens of the step."""
    lr: float
    """Learning rate of this update."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens of this step, each counted once."""
    consumed_tokens: int
    """Tokens of all steps so far."""
    skipped: int
    """Steps skipped so far because something was not finite."""
    rates: Rates
    memory_gb: float
    """Of the rank that logs, see `memory_gb`."""
    loss_scale: float | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the logging rank sent in this step, per axis of the mesh."""

    def as_dict(self) -> dict[str, Any]:
        """The record of `metrics.jsonl`."""
        result = {name: getattr(self, name) for name in ("step", "loss", "lr", "grad_norm", "tokens", "consumed_tokens")}
        result |= {name: getattr(self.rates, name) for name in ("tokens_per_sec", "tokens_per_sec_per_rank", "seconds", "tflops", "mfu")}
        result |= {"skipped": self.skipped, "memory_gb": self.memory_gb, "bytes": dict(self.bytes)}
        if self.loss_scale is not None:
            result["loss_scale"] = self.loss_scale
        return result


class Tracker(Protocol):
    """A place that flat numbers go to, beside the file."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self, *, failed: bool) -> None:
        """Write out what is left."""


class MetricsFile:
    """`metrics.jsonl`, appended line by line; opening it for a resume removes what lies after the checkpoint."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.evaluated: set[int] = set()
        """Steps whose evaluation the file already holds."""
        kept = self._kept_lines(path, resume_step) if resume_step > 0 and path.exists() else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)  # a crash in here leaves the old file or the new one, never half of one
        self._file = path.open("a", encoding="utf-8")

    def _kept_lines(self, path: Path, resume_step: int) -> list[str]:
        """Complete records of steps up to the checkpoint. What has no step (state_bytes) is written anew by every start of a run."""
        kept = []
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if not line.endswith("\n") or not isinstance(record, dict) or record.get("step", math.inf) > resume_step:
                    continue
                if "val_loss" in record:
                    self.evaluated.add(record["step"])
                kept.append(line)
        return kept

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; it is on its way to the disk when this returns."""
        self._file.write(json.dumps(_finite_or_null(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite_or_null(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite_or_null(item) for item in value]
    return value


class MetricsLogger:
    """Takes the records of a run to metrics.jsonl, the console and the trackers that the config asks for; only rank 0 writes.

    `resume_step` is the step of the checkpoint that the run continues from, 0 for a run from the start: the file then holds exactly one
    record per step again. Raises ValueError, with every problem of the trackers, before anything is written.
    """

    def __init__(
        self,
        cfg: LoggingConfig,
        folder: Path,
        *,
        run_name: str,
        total_steps: int,
        rank: int = 0,
        resume_step: int = 0,
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self._file: MetricsFile | None = None
        self._progress: ProgressReporter | None = None
        self._trackers: list[Tracker] = []
        if rank != 0:
            return
        problems = tracker_problems(cfg)
        if problems:
            raise ValueError("\n".join(problems))
        self._file = MetricsFile(folder / "metrics.jsonl", resume_step=resume_step)
        self._progress = ProgressReporter(console or Console(), total_steps=total_steps, first_step=resume_step, every=cfg.every)
        if cfg.tensorboard:
            self._trackers.append(TensorboardTracker(folder / "tensorboard", resume_step=resume_step))
        if cfg.wandb != "off":
            self._trackers.append(
                WandbTracker(folder, mode=cfg.wandb, project=cfg.wandb_project, run_name=run_name, config=dict(config or {}))
            )

    def log_step(self, record: StepRecord) -> None:
        """Take one training step."""
        if self._file is None or self._progress is None:
            return
        values = record.as_dict()
        self._file.write(values)
        self._progress.step(values)
        self._track(record.step, "train", values)

    def log_evaluation(self, step: int, val_loss: float) -> None:
        """Take the mean loss per validation token after `step` steps. A step that was evaluated before the resume is kept as it is."""
        if self._file is None or self._progress is None:
            return
        # exp overflows from 710 nats on
        record = {"step": step, "val_loss": val_loss, "val_ppl": math.exp(val_loss) if val_loss < 700 else math.inf}
        if step not in self._file.evaluated:
            self._file.evaluated.add(step)
            self._file.write(record)
            self._track(step, "valid", record)
        self._progress.evaluation(step, record["val_loss"], record["val_ppl"])

    def log_state_bytes(self, per_rank: Sequence[Mapping[str, int]]) -> None:
        """Take the sizes of the real buffers, in rank order: one {param, grad, main} per rank. Once per start of a run."""
        if self._file is not None:
            self._file.write({"state_bytes": [dict(sizes) for sizes in per_rank]})

    def _track(self, step: int, prefix: str, record: Mapping[str, Any]) -> None:
        flat = {f"bytes/{axis}": value for axis, value in record.get("bytes", {}).items()}
        flat |= {f"{prefix}/{key}": value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(step, flat)

    def close(self, *, failed: bool = False) -> None:
        """Write out and close everything; a second call does nothing."""
        if self._file is None or self._progress is None:
            return
        self._progress.close()
        for tracker in self._trackers:
            tracker.close(failed=failed)
        self._file.close()
        self._file = None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=kind is not None)
