"""Loss scale and skipped steps. All values are exact: powers of two and counts."""

from __future__ import annotations

import math

import pytest
import torch

from paro_lm.config import OptimConfig, PrecisionConfig
from paro_lm.optim.scaler import LossScaler, NonFiniteError, SkipCounter
from paro_lm.optim.schedule import learning_rate


def test_overflow_at_the_second_of_three_updates() -> None:
    """Accumulation 2, six micro-steps: two updates count for the schedule, the scale is halved once, the weight moves twice."""
    scaler, counter = LossScaler(initial=1024.0, dynamic=True), SkipCounter(max_in_a_row=2)
    optim = OptimConfig(lr=1.0, schedule="linear", warmup_steps=4)
    weight, moved, scales = torch.zeros((), dtype=torch.float64, requires_grad=True), [], []
    for micro_step in range(6):
        factor = math.inf if micro_step == 2 else 0.5
        (weight * factor * scaler.scale).backward()
        if micro_step % 2 == 1:
            assert weight.grad is not None
            grad = weight.grad / scaler.scale
            finite = bool(torch.isfinite(grad))
            rate = learning_rate(optim, counter.updates, 10)
            if finite:
                weight.data -= rate * grad
            moved.append(weight.item())
            scaler.update(finite)
            counter.record(finite, step=micro_step // 2 + 1, loss=0.0, grad_norm=abs(grad.item()))
            scales.append(scaler.scale)
            weight.grad = None
    assert (counter.updates, counter.skipped, counter.in_a_row) == (2, 1, 0)
    assert scales == [1024.0, 512.0, 512.0]
    assert moved == [-0.25, -0.25, -0.75]  # rates 1/4, skipped, 2/4; gradient 1


def test_growth_needs_a_whole_window_without_overflow() -> None:
    scaler = LossScaler(initial=8.0, dynamic=True, window=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scaler.update(finite)
        seen.append(scaler.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8]


def test_scale_stays_within_its_bounds() -> None:
    scaler = LossScaler(initial=2.0, dynamic=True, window=1)
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale == LossScaler.MINIMUM
    for _ in range(60):
        scaler.update(True)
    assert scaler.scale == LossScaler.MAXIMUM


def test_static_and_off_never_change() -> None:
    for scaler, scale in (
        (LossScaler.from_config(PrecisionConfig(param_dtype="fp16", loss_scale=128.0)), 128.0),
        (LossScaler.from_config(PrecisionConfig(param_dtype="bf16")), 1.0),
    ):
        for finite in (True, False, False):
            scaler.update(finite)
        scaler.load_state_dict({"scale": 4.0, "good_updates": 1})
        assert scaler.scale == scale


def test_fp16_is_dynamic_by_default() -> None:
    scaler = LossScaler.from_config(PrecisionConfig(param_dtype="fp16", initial_loss_scale=1024.0, loss_scale_window=2))
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 2048.0


def test_a_loss_scale_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_scale=128.0 has no effect with precision.param_dtype=bf16"):
        LossScaler.from_config(PrecisionConfig(param_dtype="bf16", loss_scale=128.0))
    with pytest.raises(ValueError, match="must be positive, got 0"):
        LossScaler(initial=0.0)


def test_resume_continues_the_window() -> None:
    first = LossScaler(initial=8.0, dynamic=True, window=3)
    for finite in (False, True, True):
        first.update(finite)
    second = LossScaler(initial=8.0, dynamic=True, window=3)
    second.load_state_dict(first.state_dict())
    second.update(True)
    assert second.scale == 8.0  # halved to 4 by the first, doubled by the third good update


def test_abort_after_k_skips_in_a_row() -> None:
    counter = SkipCounter(max_in_a_row=3)
    for step, finite in enumerate((False, False, True, False, False), start=1):
        counter.record(finite, step=step, loss=math.nan, grad_norm=math.nan)
    assert (counter.updates, counter.skipped) == (1, 4)
    resumed = SkipCounter(max_in_a_row=3)
    resumed.load_state_dict(counter.state_dict())
    with pytest.raises(NonFiniteError, match=r"Step 6: loss nan and gradient norm inf .* 3 steps in a row.*max_skipped_steps=3.*optim.lr"):
        resumed.record(False, step=6, loss=math.nan, grad_norm=math.inf)
    assert resumed.skipped == 5
