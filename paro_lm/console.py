"""What a person sees while training: the table before the first step, then a live bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: no markup, no wrapping at the width of a terminal that is not there."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts about a run that are known before its first step. Token counts are numbers of tokens, memory is in bytes of one rank."""

    run_name: str
    model_name: str
    num_params: int
    num_trainable: int
    data_tokens: int
    """Tokens of the training data, one epoch."""
    samples_per_step: int
    """Samples of a step at the full batch size."""
    seq_length: int
    steps: int
    total_tokens: int
    """Tokens of the whole run, batch ramp included."""
    state_bytes: Mapping[str, int]
    """Bytes of params, grads, main parameters with moments, by name; `shared` are those that two of them count."""
    layout: str
    """Mesh, sharding, accumulation, precision and device in words."""

    @property
    def epochs(self) -> float:
        return self.total_tokens / max(self.data_tokens, 1)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of every line of the table."""
        trainable = "" if self.num_trainable == self.num_params else f", {self.num_trainable:,} of them trainable"
        shared = self.state_bytes.get("shared", 0)
        held = {name: size for name, size in self.state_bytes.items() if name != "shared"}
        parts = " + ".join(f"{name} {size / 1e9:.3f}" for name, size in held.items()) + (f" - shared {shared / 1e9:.3f}" if shared else "")
        return [
            ("run", self.run_name),
            ("model", f"{self.model_name}, {self.num_params:,} parameters{trainable}"),
            ("data", f"{self.data_tokens:,} tokens"),
            ("step", f"{self.samples_per_step * self.seq_length:,} tokens ({self.samples_per_step:,} samples of {self.seq_length:,})"),
            ("total", f"{self.total_tokens:,} tokens in {self.steps:,} steps, {self.epochs:.2f} epochs"),
            ("tokens per parameter", f"{self.total_tokens / max(self.num_params, 1):.2f} (about 20 is compute-optimal)"),
            ("memory per rank", f"{(sum(held.values()) - shared) / 1e9:.3f} GB = {parts}, activations not counted"),
            ("layout", self.layout),
        ]

    def warnings(self) -> list[str]:
        """What the person may not have meant."""
        if self.epochs <= 1:
            return []
        return [
            f"The data repeats: {self.total_tokens:,} tokens are {self.epochs:.2f} epochs of {self.data_tokens:,}. "
            "Give more data or fewer steps if every token should be seen once."
        ]


def describe_run(summary: RunSummary, console: Console) -> None:
    """Print the table and its warnings."""
    rows = summary.rows()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        say(console, f"{label:<{width}}  {value}")
    for warning in summary.warnings():
        say(console, f"warning: {warning}", style="yellow")


class ProgressReporter:
    """Progress of training on a console: a live bar where there is a terminal, else a line every `every` steps and for the last one."""

    WINDOW = 50

    def __init__(
        self, console: Console, *, total_steps: int, first_step: int = 0, every: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.total_steps, self.every = console, total_steps, every
        self._clock = clock
        self._times: deque[tuple[float, int]] = deque(maxlen=self.WINDOW)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None), TextColumn("{task.description}"),
                console=console, expand=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total_steps, completed=first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one step record of metrics.jsonl."""
        step = record["step"]
        self._times.append((self._clock(), step))
        eta = self._eta(record)
        if self._bar is not None:
            short = f"loss {record['loss']:.4f} | {record['tokens_per_sec']:,.0f} tokens/s | eta {eta}"
            self._bar.start()
            self._bar.update(self._task, completed=step, description=short)
        elif step % self.every == 0 or step == self.total_steps:
            say(self.console, f"step {step}/{self.total_steps} | {describe_step(record)} | eta {eta}")

    def evaluation(self, step: int, loss: float, perplexity: float) -> None:
        """Show one evaluation; above the bar, where it stays."""
        say(self.console, f"step {step}/{self.total_steps} | validation loss {loss:.4f} | perplexity {perplexity:.2f}", style="bold")

    def _eta(self, record: Mapping[str, Any]) -> str:
        """Time to the last step at the pace of the last steps, pauses for evaluation and checkpoints included."""
        (first_time, first_step), (last_time, last_step) = self._times[0], self._times[-1]
        pace = (last_time - first_time) / (last_step - first_step) if last_step > first_step else record["seconds"]
        return str(timedelta(seconds=round(pace * max(self.total_steps - last_step, 0))))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def describe_step(record: Mapping[str, Any]) -> str:
    """One step in one line, without what is unknown or zero."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"grad norm {record['grad_norm']:.3f}",
        f"{record['tokens_per_sec']:,.0f} tokens/s",
        f"{record['tflops']:.3g} TFLOP/s per rank",
    ]
    if record["mfu"] is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f} %")
    parts.append(f"{record['memory_gb']:.2f} GB")
    if any(record["bytes"].values()):
        parts.append("sent " + ", ".join(f"{axis} {value / 1e6:,.1f} MB" for axis, value in record["bytes"].items()))
    if record["skipped"]:
        parts.append(f"skipped {record['skipped']}")
    return " | ".join(parts)
