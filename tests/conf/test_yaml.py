"""Every shipped YAML file composes to a valid config; docs/config.md is fresh."""

import importlib.util
from pathlib import Path

import pytest

from paro_lm import train
from paro_lm.cli import config_folder, load
from paro_lm.config import Config, field_types
from paro_lm.tools import evaluate, generate
from paro_lm.validation import validate

FILES = sorted(config_folder().glob("*/*.yaml"))
RANKS = {"gpt2_124m": 8, "llama_7b": 64}  # experiments that say for how many ranks they are


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_composes_and_validates(path):
    overrides = [f"{path.parent.name}={path.stem}"]
    if path.parent.name == "optim":
        overrides.append("steps=10000")
    if path.parent.name == "model" and path.stem == "hf":
        overrides.append("model.init_from=some/folder")
    if path.parent.name == "data" and path.stem in ("chat", "instructions"):
        overrides += ["data.train=rows.jsonl", "data.tokenizer=some/folder"]
    ranks = RANKS.get(path.stem, 1) if path.parent.name == "experiment" else 1
    cfg = load(overrides)
    assert validate(cfg, ranks, complete=cfg.model.init_from is None) == []


def test_every_group_file_sets_something_of_its_group():
    for path in FILES:
        assert path.parent.name == "experiment" or path.parent.name in field_types(Config), path
        assert any(line.strip() and not line.startswith("#") for line in path.read_text().splitlines()), path


@pytest.mark.parametrize("tool", [train.TOOL, generate.TOOL, evaluate.TOOL], ids=lambda tool: tool.name)
def test_root_files_compose(tool):
    assert load([], tool=tool) == (load([]) if tool is train.TOOL else tool.schema())
    assert (config_folder() / f"{tool.config_name}.yaml").is_file()


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_precision_chooses_all_types(name):
    precision = load([f"precision={name}"]).precision
    assert (precision.name, precision.param_dtype) == (name, name)
    wide = "fp64" if name == "fp64" else "fp32"
    assert (precision.grad_dtype, precision.reduce_dtype, precision.main_dtype) == (wide, wide, wide)


def test_experiments_name_their_runs():
    for path in FILES:
        if path.parent.name == "experiment":
            assert load([f"experiment={path.stem}"]).run_name == path.stem


def test_the_page_of_options_is_fresh():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("generate_config_docs", root / "scripts" / "generate_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.render(), "run `make docs`"
