"""Every batch size of a ramp must suit the pipeline's schedule, not only the first and the last."""

from __future__ import annotations

from paro_lm.cli import load
from paro_lm.validation import validate

PIPELINE = ("parallel.pp=4", "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2", "model.num_layers=8", "micro_batch_size=1")


def problems(*options: str) -> list[str]:
    return validate(load([*PIPELINE, *options]), 4, 4, complete=False)


def test_sizes_of_a_ramp_that_the_schedule_cannot_run() -> None:
    ramp = ("batch_ramp.samples=100", "batch_ramp.start=4")
    assert any("divide by 2" in problem for problem in problems("global_batch_size=9"))
    assert any("divide by 2" in problem for problem in problems("global_batch_size=9", *ramp, "batch_ramp.increment=1"))
    assert any("got 9" in problem for problem in problems("global_batch_size=20", *ramp, "batch_ramp.increment=1"))
    assert problems("global_batch_size=12", *ramp, "batch_ramp.increment=4") == []
