"""Exit codes and messages of the command line; in processes only where the process is the point."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paro_lm.cli import EXIT_ERROR, EXIT_OK, EXIT_REFUSED, EXIT_STOPPED, Tool, hydra_entry, run_task
from paro_lm.config import Config, ConfigError, OptimConfig
from paro_lm.optim.schedule import learning_rate
from paro_lm.train import TOOL

ROOT = Path(__file__).resolve().parents[2]


def paro_train(*arguments, cwd=ROOT, **environment):
    command = [sys.executable, "-m", "paro_lm.train", *arguments]
    full = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=full, capture_output=True, text=True, timeout=120)


def entry(*arguments, task=lambda cfg: EXIT_OK):
    with pytest.raises(SystemExit) as caught:
        hydra_entry(task, TOOL, arguments)
    return caught.value.code


def test_refused_input_exits_with_2_and_says_everything_on_stderr(tmp_path):
    result = paro_train("optim.lr=fast", "+a.b=1", cwd=tmp_path)
    assert result.returncode == 2
    assert "2 problems" in result.stderr
    assert "optim.lr: " in result.stderr
    assert "a.b: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_prints_the_composed_config_and_leaves_nothing_behind(tmp_path):
    result = paro_train("--cfg", "job", "run_name=7e12", "optim.lr=1e-5", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "run_name: '7e12'" in result.stdout.splitlines()
    assert "  lr: 1.0e-05" in result.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_batches_are_checked_against_the_world_of_the_launcher(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert entry("global_batch_size=16", "micro_batch_size=4") == EXIT_REFUSED
    assert "16 is not divisible by micro_batch_size=4 x 3 data-parallel ranks = 12" in capsys.readouterr().err


def test_the_codes_of_the_trainer_are_those_that_are_documented():
    from paro_lm import trainer

    assert (trainer.EXIT_DONE, trainer.EXIT_STOPPED) == (EXIT_OK, EXIT_STOPPED)


def test_help_shows_examples_and_choices(capsys):
    assert entry("--help") == 0
    text = capsys.readouterr().out
    assert text.count("paro-train ") >= 3
    for word in ("experiment=quickstart", "quickstart, smoke", "fp16, fp32, fp64", "--config-dir", "75"):
        assert word in text


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_STOPPED])
def test_the_code_of_the_task_is_the_code_of_the_process(code):
    assert entry("seed=3", task=lambda cfg: code if cfg.seed == 3 else EXIT_ERROR) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "key=value"),
        (["--config-dir", "no/such/folder"], "no/such/folder"),
        (["--cfg", "job", "--config-dir", "no/such/folder"], "no/such/folder"),
        (["--config-name", "nothing"], "nothing"),
        (["experiment=nothing"], "experiment/nothing.yaml"),
        (["-m", "optim.lrr=1,2"], "optim.lrr"),
    ],
)
def test_refused_command_lines(arguments, words, capsys):
    assert entry(*arguments) == EXIT_REFUSED
    assert words in capsys.readouterr().err


def test_multirun_runs_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    seen = []

    def task(cfg):
        seen.append((cfg.run_name, cfg.optim.lr))
        return EXIT_OK

    assert entry("-m", "optim.lr=1e-3,1e-5", "run_name=lr_${optim.lr}", task=task) == 0
    assert seen == [("lr_0.001", 1e-3), ("lr_1e-05", 1e-5)]


def outcome(error, capsys):
    def task(cfg):
        raise error

    code = run_task(task, Config(), Tool(name="tool", description="", examples=()))
    return code, capsys.readouterr().err


def test_a_missing_file_is_refused_input(capsys):
    code, message = outcome(FileNotFoundError(2, "No such file", "data.txt"), capsys)
    assert code == EXIT_REFUSED
    assert "data.txt" in message
    assert "Traceback" not in message


def test_errors_from_elsewhere_keep_their_traceback(capsys):
    for error in (ValueError("shapes"), RuntimeError("broken")):
        code, message = outcome(error, capsys)
        assert code == EXIT_ERROR
        assert "Traceback" in message


def test_a_value_error_of_this_package_is_refused_input(capsys):
    def task(cfg):
        return learning_rate(OptimConfig(schedule="sine"), 0, 1)

    code = run_task(task, Config(), Tool(name="tool", description="", examples=()))
    message = capsys.readouterr().err
    assert code == EXIT_REFUSED
    assert "sine" in message
    assert "Traceback" not in message


def test_a_config_error_lists_its_problems(capsys):
    code, message = outcome(ConfigError(["a: wrong", "b: wrong"]), capsys)
    assert code == EXIT_REFUSED
    assert "a: wrong\n" in message
    assert "b: wrong\n" in message
