"""Checks that span groups: batch sizes (T37), groups (T7), precision, the refused combinations."""

import dataclasses

import pytest

from paro_lm.config import (
    SHARDING_NAMES,
    BatchRampConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
)
from paro_lm.validation import num_micro_batches, validate

FP64 = PrecisionConfig(name="fp64", param_dtype="fp64", grad_dtype="fp64", reduce_dtype="fp64", main_dtype="fp64")


def test_the_default_is_valid():
    assert validate(Config(), 1) == []
    assert validate(Config(), 4, 2) == []


def test_micro_batches_follow_from_global_numbers():
    cfg = Config(global_batch_size=128, micro_batch_size=2)
    assert validate(cfg, 16) == []
    assert num_micro_batches(cfg, 16) == 4
    with_tp = dataclasses.replace(cfg, parallel=ParallelConfig(tp=4))
    assert validate(with_tp, 64) == []
    assert num_micro_batches(with_tp, 64) == 4
    assert num_micro_batches(with_tp, 64, global_batch_size=32) == 1


@pytest.mark.parametrize(("batch", "micro", "world", "numbers"), [(128, 3, 1, ("128", "3", "126 or 129")), (6, 4, 2, ("6", "4", "8"))])
def test_batches_that_do_not_divide_are_refused_with_the_numbers(batch, micro, world, numbers):
    (problem,) = validate(Config(global_batch_size=batch, micro_batch_size=micro), world)
    assert problem.startswith("global_batch_size:")
    assert all(number in problem for number in numbers)


@pytest.mark.parametrize("group_size", [3, 8])
def test_groups_that_do_not_divide_are_refused_with_the_numbers(group_size):
    (problem,) = validate(Config(parallel=ParallelConfig(group_size=group_size)), 4)
    assert problem.startswith(f"parallel.group_size: {group_size} ")
    assert "world 4" in problem
    assert "1, 2, 4" in problem


def test_groups_that_divide():
    for group_size in (1, 2, 4):
        assert validate(Config(parallel=ParallelConfig(group_size=group_size)), 4) == []


@pytest.mark.parametrize(("pp", "tp", "world"), [(2, 2, 6), (1, 4, 2), (3, 1, 4)])
def test_worlds_that_do_not_split(pp, tp, world):
    problems = [p for p in validate(Config(parallel=ParallelConfig(pp=pp, tp=tp)), world) if f"{world} ranks cannot be split" in p]
    assert len(problems) == 1
    assert f"multiple of {pp * tp}" in problems[0]


def test_tensor_parallel_ranks_do_not_straddle_nodes():
    assert any("straddle" in problem for problem in validate(Config(parallel=ParallelConfig(tp=2)), 6, 3))
    assert validate(Config(parallel=ParallelConfig(tp=2)), 8, 4) == []


@pytest.mark.parametrize("kv_heads", [5, 0, -1, 64])
def test_key_value_heads_that_do_not_fit(kv_heads):
    cfg = Config(model=ModelConfig(num_heads=32, num_kv_heads=kv_heads))
    (problem,) = validate(cfg, 1)
    assert "num_heads" in problem
    assert "num_kv_heads" in problem
    assert "32" in problem
    assert str(kv_heads) in problem
    assert "16" in problem  # one of the valid choices


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("run_name", {"run_name": "../x"}),
        ("run_name", {"run_name": ""}),
        ("run_name", {"run_name": "/x"}),
        ("output_dir", {"output_dir": ""}),
        ("checkpoint.resume", {"checkpoint": CheckpointConfig(resume="")}),
        ("steps", {"steps": 0}),
        ("micro_batch_size", {"micro_batch_size": 0}),
        ("optim.schedule", {"optim": OptimConfig(schedule="sine")}),
        ("optim.eps", {"optim": OptimConfig(eps=0.0)}),
        ("optim.min_lr", {"optim": OptimConfig(min_lr=1.0)}),
        ("optim.beta2", {"optim": OptimConfig(beta2=1.0)}),
        ("optim.warmup_steps", {"optim": OptimConfig(warmup_steps=101)}),
        ("optim.decay_steps", {"optim": OptimConfig(schedule="wsd", warmup_steps=60, decay_steps=50)}),
        ("model.dropout", {"model": ModelConfig(dropout=1.0)}),
        ("model.norm", {"model": ModelConfig(norm="batch")}),
        ("precision.name", {"precision": PrecisionConfig(name="bf16")}),
        ("precision", {"precision": dataclasses.replace(FP64, main_dtype="fp32")}),
        ("precision.grad_dtype", {"precision": PrecisionConfig(grad_dtype="fp64")}),
        ("precision.loss_scale", {"precision": PrecisionConfig(loss_scale=2.0)}),
        ("precision.main_dtype", {"precision": PrecisionConfig(main_dtype="bf16")}),
        ("runtime.device", {"precision": FP64, "runtime": RuntimeConfig(device="mps")}),
        ("runtime.device", {"runtime": RuntimeConfig(device="tpu")}),
        ("runtime.world_size", {"runtime": RuntimeConfig(world_size=4)}),
        ("parallel.sequence_parallel", {"parallel": ParallelConfig(sequence_parallel=True)}),
        ("parallel.sharding", {"parallel": ParallelConfig(sharding="NNX")}),
        ("parallel.sharding", {"parallel": ParallelConfig(sharding="zero9")}),
        ("parallel.sharding_overrides", {"parallel": ParallelConfig(sharding="auto", sharding_overrides={"head": "NNG"})}),
        ("parallel.sharding_overrides.head", {"parallel": ParallelConfig(sharding_overrides={"head": "auto"})}),
        ("parallel.sharding_overrides.head", {"parallel": ParallelConfig(sharding_overrides={"head": "NG"})}),
        ("data.weights", {"data": DataConfig(train=["a"], weights=[1.0, 2.0])}),
        ("data.weights", {"data": DataConfig(train=["a"], weights=[0.0])}),
        ("data.valid_fraction", {"data": DataConfig(valid_fraction=1.0)}),
        ("eval.every", {"data": DataConfig(valid_fraction=0.0), "eval": EvalConfig(every=5)}),
        ("logging.profile_steps", {"logging": LoggingConfig(profile_steps=[3])}),
        ("logging.profile_steps", {"logging": LoggingConfig(profile_steps=[3, 101])}),
        ("batch_ramp.start", {"batch_ramp": BatchRampConfig(start=4, increment=8, samples=100)}),
        ("batch_ramp.start", {"batch_ramp": BatchRampConfig(start=4)}),
    ],
)
def test_what_is_refused_starts_with_its_key(key, changes):
    problems = validate(dataclasses.replace(Config(), **changes), 1)
    assert len(problems) == 1, problems
    assert problems[0].partition(" ")[0].partition("=")[0].rstrip(":") == key


def test_independent_problems_are_all_listed():
    cfg = Config(run_name="", steps=0, optim=OptimConfig(min_lr=1.0), parallel=ParallelConfig(sharding="XXX"))
    assert len(validate(cfg, 1)) == 4


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(sharding="IIG"),
        ParallelConfig(sharding="zero3"),
        ParallelConfig(sharding="auto"),
        ParallelConfig(sharding_overrides={"layers.*": "NIG"}),
    ],
)
def test_cells_that_are_valid(parallel):
    assert validate(Config(parallel=parallel), 4) == []


def test_names_of_strategies_are_those_of_the_engine():
    from paro_lm.parallel.sharding import ALIASES

    assert ALIASES == SHARDING_NAMES


def test_ramp_sizes_divide_by_what_all_ranks_take():
    ramp = BatchRampConfig(start=8, increment=4, samples=100)
    assert validate(Config(global_batch_size=16, micro_batch_size=2, batch_ramp=ramp), 2) == []
    problems = validate(Config(global_batch_size=16, micro_batch_size=2, batch_ramp=ramp), 4)
    assert len(problems) == 1
    assert "batch_ramp.increment=4" in problems[0]
