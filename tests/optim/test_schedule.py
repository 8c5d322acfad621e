"""Schedules against lists worked out by hand. Tolerance: 1e-15 relative, floating-point rounding of one formula."""

from __future__ import annotations

import math

import pytest

from paro_lm.config import BatchRampConfig, OptimConfig
from paro_lm.optim.schedule import SCHEDULES, batch_size_at, learning_rate, ramp_problems, total_samples


def rates(total: int, **options: object) -> list[float]:
    cfg = OptimConfig(**{"lr": 1.0, **options})
    return [learning_rate(cfg, step, total) for step in range(total)]


@pytest.mark.parametrize("decay_steps", [8, None])
def test_linear_with_warmup_is_the_golden_list(decay_steps: int | None) -> None:
    expected = [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert rates(10, schedule="linear", warmup_steps=2, decay_steps=decay_steps) == expected


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_no_decay_steps_means_constant(schedule: str) -> None:
    assert rates(10, schedule=schedule, decay_steps=0) == [1.0] * 10
    assert rates(10, schedule=schedule, decay_steps=0, warmup_steps=2) == [0.5] + [1.0] * 9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_step_has_the_peak(schedule: str) -> None:
    assert rates(10, schedule=schedule)[0] == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_longer_than_the_run_only_warms_up(schedule: str) -> None:
    assert rates(3, schedule=schedule, warmup_steps=4) == [0.25, 0.5, 0.75]


def test_cosine_halfway_and_ends() -> None:
    cfg = OptimConfig(schedule="cosine", lr=6e-4, min_lr=6e-5)
    assert learning_rate(cfg, 0, 100) == 6e-4
    assert learning_rate(cfg, 50, 100) == pytest.approx(3.3e-4, rel=1e-15)
    assert learning_rate(cfg, 100, 100) == 6e-5
    assert learning_rate(cfg, 1000, 100) == 6e-5
    assert learning_rate(OptimConfig(schedule="cosine", lr=1.0), 50, 100) == pytest.approx(0.5, rel=1e-15)


def test_wsd_decays_over_the_last_steps_only() -> None:
    assert rates(10, schedule="wsd", warmup_steps=2, decay_steps=4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(20, schedule="wsd") == [1.0] * 19 + [0.5]
    assert rates(4, schedule="wsd", warmup_steps=2, decay_steps=50) == [0.5, 1.0, 1.0, 0.5]


def test_inverse_sqrt_is_continuous_at_the_end_of_the_warmup() -> None:
    values = rates(400, schedule="inverse_sqrt", warmup_steps=4, min_lr=0.2)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == pytest.approx(math.sqrt(4 / 5), rel=1e-15)
    assert values[15] == 0.5
    assert values[399] == 0.2


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_decay_fills_the_run_exactly(schedule: str, warmup: int) -> None:
    cfg = OptimConfig(schedule=schedule, lr=1.0, min_lr=0.1, warmup_steps=warmup)
    assert learning_rate(cfg, 37, 37) == 0.1
    assert learning_rate(cfg, 36, 37) > 0.1


def test_unknown_schedule_names_the_choices() -> None:
    with pytest.raises(ValueError, match="optim.schedule=step .*inverse_sqrt"):
        learning_rate(OptimConfig(schedule="step"), 0, 1)


def ramp(cfg: BatchRampConfig, global_batch: int, steps: int, multiple: int = 2) -> list[int]:
    sizes: list[int] = []
    for _ in range(steps):
        sizes.append(batch_size_at(cfg, global_batch, sum(sizes), multiple))
    return sizes


def test_batch_ramp() -> None:
    cfg = BatchRampConfig(start=8, increment=4, samples=40)
    assert ramp(cfg, 16, 7) == [8, 8, 8, 12, 12, 16, 16]  # stages start at 0, 20 and 40 consumed samples
    assert total_samples(cfg, 16, 7, 2) == 80
    assert [total_samples(cfg, 16, steps, 2) for steps in (0, 1, 4)] == [0, 8, 36]
    assert ramp(BatchRampConfig(), 16, 3) == [16] * 3
    assert total_samples(BatchRampConfig(), 16, 3, 2) == 48


def test_ramp_that_starts_at_the_global_batch_is_none() -> None:
    assert ramp(BatchRampConfig(start=16, increment=4, samples=40), 16, 3) == [16, 16, 16]


def test_decay_ends_with_the_run_under_a_ramp() -> None:
    """Ramp 8 -> 16: samples are fewer than steps x global batch, the decay still reaches its end after the last step."""
    steps, cfg = 10, BatchRampConfig(start=8, increment=8, samples=32)
    optim = OptimConfig(schedule="linear", lr=1.0, warmup_steps=2)
    assert ramp(cfg, 16, steps, multiple=8) == [8] * 4 + [16] * 6
    assert total_samples(cfg, 16, steps, 8) == 128 < steps * 16
    assert [learning_rate(optim, step, steps) for step in (2, 9, 10)] == [1.0, 0.125, 0.0]


@pytest.mark.parametrize(
    ("options", "multiple", "message"),
    [
        ({"start": 8, "increment": 0, "samples": 8}, 1, "increment > 0"),
        ({"start": 8, "increment": 4, "samples": 0}, 1, "samples > 0"),
        ({"start": 32, "increment": 4, "samples": 8}, 1, "global_batch_size=16"),
        ({"start": 8, "increment": 3, "samples": 8}, 1, "whole increments of 3"),
        ({"start": 6, "increment": 2, "samples": 8}, 4, "batch_ramp.start=6 is not a multiple of 4"),
    ],
)
def test_bad_ramp_is_refused_with_its_numbers(options: dict[str, int], multiple: int, message: str) -> None:
    cfg = BatchRampConfig(**options)
    assert any(message in problem for problem in ramp_problems(cfg, 16, multiple))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        batch_size_at(cfg, 16, 0, multiple)
