"""Learning rate and batch size as pure functions, so that a resume needs no state of its own and may change either.

Two counters, kept apart: an *attempt* is one step of the run (`steps` of them), an *update* is an attempt that was not skipped.
The learning rate is a function of the number of updates made so far, the batch size of the number of samples consumed so far.
The length of a decay is counted in steps too, never in samples: a batch ramp makes early steps smaller but not fewer, so the
decay ends exactly where the run ends, with or without a ramp.
"""

from __future__ import annotations

import math

from paro_lm.config import BatchRampConfig, OptimConfig

SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


def learning_rate(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the update that follows `step` updates, in a run of `total_steps` steps.

    Warm-up step k uses (k+1)/warmup_steps of the peak. After it:
    constant stays at lr; linear and cosine fall to min_lr over decay_steps (null = until the end) and stay there;
    wsd stays at lr and falls linearly over the last decay_steps (null = a tenth of the run), never before the warm-up is over;
    inverse_sqrt is lr * sqrt(warmup_steps / (step+1)), at least min_lr. Without steps to decay over the rate stays at lr.
    The rate after the last update, `learning_rate(cfg, total_steps, total_steps)`, is min_lr for a decay that fills the run.
    Raises ValueError for an unknown schedule.
    """
    if cfg.schedule not in SCHEDULES:
        raise ValueError(f"optim.schedule={cfg.schedule} is unknown; choose one of {', '.join(SCHEDULES)}.")
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "inverse_sqrt":
        return max(cfg.min_lr, cfg.lr * math.sqrt(max(cfg.warmup_steps, 1) / (step + 1)))
    start, length = _decay_window(cfg, total_steps)
    if length <= 0:
        return cfg.lr
    progress = min(max(step - start, 0) / length, 1.0)
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1.0 - progress
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * remaining


def _decay_window(cfg: OptimConfig, total_steps: int) -> tuple[int, int]:
    """First step and length of the decay."""
    if cfg.schedule == "wsd":
        length = max(1, total_steps // 10) if cfg.decay_steps is None else cfg.decay_steps
        start = max(cfg.warmup_steps, total_steps - length)
        return start, total_steps - start
    length = total_steps - cfg.warmup_steps if cfg.decay_steps is None else cfg.decay_steps
    return cfg.warmup_steps, length


def ramp_problems(cfg: BatchRampConfig, global_batch: int, multiple: int) -> list[str]:
    """What is wrong with a batch ramp; `multiple` = micro batch x data-parallel ranks, which every batch size must fill evenly."""
    if cfg.start == 0:
        return []
    problems = []
    if cfg.start < 0 or cfg.increment <= 0 or cfg.samples <= 0:
        problems.append(
            f"batch_ramp.start={cfg.start} needs batch_ramp.increment > 0 and batch_ramp.samples > 0, "
            f"got {cfg.increment} and {cfg.samples}."
        )
    elif cfg.start > global_batch or (global_batch - cfg.start) % cfg.increment:
        problems.append(
            f"batch_ramp.start={cfg.start} does not reach global_batch_size={global_batch} in whole increments of "
            f"{cfg.increment}; their difference must be a multiple of batch_ramp.increment."
        )
    for name, value in (("start", cfg.start), ("increment", cfg.increment)):
        if value % multiple:
            problems.append(
                f"batch_ramp.{name}={value} is not a multiple of {multiple} (micro_batch_size x data-parallel ranks), so some step could "
                f"not be divided evenly; use a multiple of {multiple} or a smaller micro_batch_size."
            )
    return problems


def batch_size_at(cfg: BatchRampConfig, global_batch: int, consumed_samples: int, multiple: int) -> int:
    """Samples of the step that starts after `consumed_samples` samples.

    The ramp has (global_batch - start) / increment stages that share `cfg.samples` samples equally, then comes the global batch.
    The result does not depend on the layout: sizes that do not divide by `multiple` (micro batch x data ranks) are refused
    rather than rounded. Raises ValueError with all problems of the ramp, see `ramp_problems`.
    """
    if cfg.start == 0:
        return global_batch
    problems = ramp_problems(cfg, global_batch, multiple)
    if problems:
        raise ValueError("\n".join(problems))
    stages = (global_batch - cfg.start) // cfg.increment
    stage = min(consumed_samples * stages // cfg.samples, stages)
    return cfg.start + stage * cfg.increment


def total_samples(cfg: BatchRampConfig, global_batch: int, steps: int, multiple: int) -> int:
    """Samples that the first `steps` steps of a run consume, ramp included."""
    consumed = 0
    for step in range(steps):
        size = batch_size_at(cfg, global_batch, consumed, multiple)
        if size == global_batch:
            return consumed + (steps - step) * global_batch
        consumed += size
    return consumed
