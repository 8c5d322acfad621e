"""Conversion of plain values to the typed config, its hash, its YAML and its differences."""

import dataclasses
import subprocess
import sys

import pytest

from paro_lm.config import (
    Config,
    ConfigError,
    DataConfig,
    OptimConfig,
    config_hash,
    difference,
    leaves,
    load_config,
    read_config,
    resolved_yaml,
)


def problems_of(values):
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    return caught.value.problems


def test_missing_keys_have_their_defaults():
    assert load_config({}) == Config()
    assert load_config({"optim": {"lr": 0.5}}) == Config(optim=OptimConfig(lr=0.5))


def test_every_problem_is_reported_at_once_with_its_full_key():
    problems = problems_of(
        {"steps": "many", "optim": {"lr": "fast", "learning_rate": 1}, "a": {"b": 1}, "eval": 3, "model": {"rope_scaling": {"factr": 2}}}
    )
    assert [problem.partition(":")[0] for problem in problems] == [
        "steps", "optim.lr", "optim.learning_rate", "a.b", "eval", "model.rope_scaling.factr",
    ]  # fmt: skip
    assert "'fast'" in problems[1]
    assert "model.rope_scaling.factor" in problems[5]


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("steps", 1e3, 1000),
        ("steps", 10**15, 10**15),
        ("seed", 0, 0),
        ("run_name", "7e12", "7e12"),
    ],
)
def test_values_that_fit(key, value, kept):
    result = getattr(load_config({key: value}), key)
    assert result == kept
    assert type(result) is type(kept)


def test_an_int_given_for_a_float_becomes_a_float():
    lr = load_config({"optim": {"lr": 1}}).optim.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("optim", "lr", True),
        ("optim", "lr", None),
        ("optim", "lr", float("nan")),
        ("optim", "lr", float("inf")),
        ("optim", "lr", "1e-3"),
        ("optim", "warmup_steps", 1.5),
        ("optim", "warmup_steps", False),
        ("parallel", "overlap", 1),
        ("parallel", "overlap", "yes"),
        ("parallel", "sharding", 7),
        ("parallel", "sharding", None),
        ("parallel", "sharding_overrides", ["NNN"]),
        ("data", "train", [1]),
        ("data", "weights", ["a"]),
        ("model", "rope_scaling", "linear"),
    ],
)
def test_wrong_types_are_refused_by_name(group, key, value):
    (problem,) = problems_of({group: {key: value}})
    assert problem.startswith(f"{group}.{key}:")
    assert repr(value[0] if isinstance(value, list) and "[" not in problem else value) in problem


def test_optional_fields_take_null_and_lists_take_one_value():
    assert load_config({"model": {"vocab_size": None}}).model.vocab_size is None
    assert load_config({"data": {"train": "a.txt"}}).data == DataConfig(train=["a.txt"])


def test_names_with_dots_in_a_mapping():
    cfg = load_config({"parallel": {"sharding_overrides": {"layers": {"3": "IIG"}, "embedding": "NNG"}}})
    assert cfg.parallel.sharding_overrides == {"layers.3": "IIG", "embedding": "NNG"}


def test_yaml_reads_back_to_an_equal_config(tmp_path):
    cfg = load_config({"run_name": "7e12", "optim": {"lr": 1e-5, "decay_steps": None}, "data": {"train": ["1234e567", "null", "a: b"]}})
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(cfg))
    assert read_config(path) == cfg


def test_hash_depends_on_every_value():
    base = config_hash(Config())
    for key, kind, item in leaves(Config):
        value = item.default if item.default is not dataclasses.MISSING else item.default_factory()
        changed = {"str": "x", "int": 77, "float": 0.77, "bool": not value}.get(getattr(kind, "__name__", ""))
        if changed is None:
            changed = {"a": "b"} if value == {} else [1] if value == [] else 7
        assert config_hash(replaced(Config(), key, changed)) != base, key


def test_hash_is_the_same_in_another_process():
    code = (
        "from paro_lm.config import *; overrides = {'b': 'NNN', 'a': 'III'}; "
        "print(config_hash(Config(run_name='é', parallel=ParallelConfig(sharding_overrides=overrides))))"
    )
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 1


def replaced(cfg, key, value):
    head, _, rest = key.partition(".")
    return dataclasses.replace(cfg, **{head: replaced(getattr(cfg, head), rest, value) if rest else value})


def test_difference_lists_changed_keys_with_both_values():
    new = replaced(replaced(Config(), "optim.lr", 0.5), "parallel.sharding_overrides", {"head": "NNG"})
    assert difference(Config(), new) == {"optim.lr": (1e-3, 0.5), "parallel.sharding_overrides.head": (None, "NNG")}
    assert difference(new, new) == {}


def test_every_option_has_a_sentence_and_a_default_that_is_allowed():
    from paro_lm.validation import check_fields

    for key, _, item in leaves(Config):
        assert item.metadata["doc"].strip(), key
    assert check_fields(Config()) == []
