"""What a command line composes to: strings stay strings (T34), unknown keys and choices are refused, all at once."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from paro_lm.cli import load
from paro_lm.config import ConfigError
from paro_lm.overrides import quote


def problems_of(*overrides, **options):
    with pytest.raises(ConfigError) as caught:
        load(overrides, **options)
    return caught.value.problems


STRINGS = [
    "7e12", "1234e567", "1_000", "007", "true", "null", "inf", "nan", "", "a b", "a,b", "a=b", "[x]", "{x:1}", "it's", '"half',
    "back\\slash", "end\\", "\\'", "choice(a,b)", "é", "a#b", "a: b", "$5", "~x", " padded ",
]  # fmt: skip


@pytest.mark.parametrize("text", STRINGS)
def test_quoting_survives_the_grammar_of_hydra(text):
    override = OverridesParser.create().parse_override(f"run_name={quote(text)}")
    assert override.value() == text


def test_strings_stay_strings():
    for text in ("7e12", "1234e567", "007", "true", "a b", "it's", "a,b", "end\\"):
        assert load([f"run_name={text}"]).run_name == text
    assert load(["run_name='quoted'"]).run_name == "quoted"
    assert load(['run_name="7e12"']).run_name == "7e12"
    assert load(["data.tokenizer=null"]).data.tokenizer is None
    assert load(["+run_name=7e12"]).run_name == "7e12"


def test_interpolations_are_resolved():
    assert load(["run_name=lr_${optim.lr}", "optim.lr=2e-4", "optim.min_lr=${optim.lr}"]).run_name == "lr_0.0002"
    assert "no.such" in problems_of("run_name=${no.such}")[0]


def test_numbers():
    lr = load(["optim.lr=1e-5"]).optim.lr
    assert (lr, type(lr)) == (1e-5, float)
    assert load(["steps=1e3"]).steps == 1000
    assert load(["optim.decay_steps=null"]).optim.decay_steps is None


def test_lists():
    assert load(["data.train=my/*.txt"]).data.train == ["my/*.txt"]
    assert load(["data.train=[a b.txt, 7e12,'c,d']"]).data.train == ["a b.txt", "7e12", "c,d"]
    assert load(["data.train=a.txt,b.txt", "data.weights=1,3"]).data.weights == [1.0, 3.0]
    assert load(["data.train=[]"]).data.train == []


def test_mappings():
    cfg = load(["parallel.sharding_overrides.embedding=NNG", "parallel.sharding_overrides.layers.3=IIG"])
    assert cfg.parallel.sharding_overrides == {"embedding": "NNG", "layers.3": "IIG"}
    cfg = load(["parallel.sharding_overrides={layers.*:NIG}"])
    assert cfg.parallel.sharding_overrides == {"layers.*": "NIG"}


def test_wrong_type_names_the_key():
    (problem,) = problems_of("optim.lr=fast")
    assert problem.startswith("optim.lr:")
    assert "'fast'" in problem


@pytest.mark.parametrize("override", ["a.b=1", "+a.b=1", "++a.b=1", "+optim.lrr=1", "optim.lrr=1", "optim.lr.x=1"])
def test_unknown_keys_are_refused_by_their_full_name(override):
    (problem,) = problems_of(override)
    key = override.lstrip("+").partition("=")[0]
    assert problem.startswith(f"{key}: there is no such option")
    assert "optim.lr" in problem or "config.md" in problem


def test_everything_that_is_wrong_is_told_at_once():
    problems = problems_of("optim.lr=fast", "+a.b=1", "model=tinny", "optim.schedule=sine", "steps=0", "eval=3", "nonsense")
    assert {problem.partition(":")[0] for problem in problems} == {
        "optim.lr", "a.b", "model", "optim.schedule", "steps", "eval", "nonsense",
    }  # fmt: skip
    assert "did you mean tiny" in next(problem for problem in problems if problem.startswith("model"))


def test_a_refused_value_draws_no_follow_up_about_its_default():
    assert len(problems_of("model.num_heads=none")) == 1


def test_own_config_folder(tmp_path):
    folder = tmp_path / "my conf's"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nsteps: 7\noptim: {lr: 1e-5}\nrun_name: '7e12'\n")
    cfg = load(["experiment=mine", "seed=3"], config_dir=folder)
    assert (cfg.steps, cfg.optim.lr, cfg.run_name, cfg.seed) == (7, 1e-5, "7e12", 3)


def test_yaml_of_the_user_is_judged_like_the_command_line(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nrun_name: 7e12\noptim: {lrr: 1, lr: fast}\nb: {c: 1}\n")
    problems = problems_of("experiment=mine", config_dir=tmp_path)
    assert [problem.partition(":")[0] for problem in problems] == ["run_name", "optim.lr", "optim.lrr", "b.c"]
    assert "quotes" in problems[0]


def test_own_root_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nsteps: 9\n")
    assert load([], config_dir=tmp_path, config_name="mine").steps == 9


def test_the_command_line_wins_over_an_experiment():
    assert load(["experiment=smoke"]).steps != 5
    assert load(["steps=5", "experiment=smoke"]).steps == 5
