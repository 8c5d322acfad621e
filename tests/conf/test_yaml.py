"""Every shipped YAML file composes to a valid config; docs/config.md is fresh."""

import importlib.util
from pathlib import Path

import pytest

from paro_lm import train
from paro_lm.cli import config_folder, load
from paro_lm.config import Config, field_types
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.cost import ElementBytes
from paro_lm.planner.inventory import element_bytes, rank_profiles
from paro_lm.tools import evaluate, generate
from paro_lm.validation import num_micro_batches, validate

FILES = sorted(config_folder().glob("*/**/*.yaml"))
RANKS = {"gpt2_124m": 8, "llama_7b": 64} | {f"paper/{path.stem}": 32 for path in FILES if path.parent.name == "paper"}


PAPER = (
    ("7b_iig", 6.74e9, 1.0),
    ("65b_iig", 65.3e9, 1.0),
    ("7b_partial_nig", 6.74e9, 1 / 16),
    ("65b_partial_iig", 65.3e9, 1 / 16),
    ("65b_peft_ing", 65.3e9, 3 / 1000),
)
"""Experiments with their parameters and the share that is trained."""


def place(path: Path) -> tuple[str, str]:
    """(group, choice) of a shipped file."""
    group, *choice = path.relative_to(config_folder()).with_suffix("").parts
    return group, "/".join(choice)


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(place(path)))
def test_composes_and_validates(path):
    group, choice = place(path)
    overrides = [f"{group}={choice}"]
    if group == "optim":
        overrides.append("steps=10000")
    if group == "model" and choice == "hf":
        overrides.append("model.init_from=some/folder")
    if group == "data" and choice in ("chat", "instructions"):
        overrides += ["data.train=rows.jsonl", "data.tokenizer=some/folder"]
    ranks = RANKS.get(choice, 1) if group == "experiment" else 1
    cfg = load(overrides)
    assert validate(cfg, ranks, complete=cfg.model.init_from is None) == []


def test_every_group_file_sets_something_of_its_group():
    for path in FILES:
        assert place(path)[0] == "experiment" or place(path)[0] in field_types(Config), path
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
        group, choice = place(path)
        if group == "experiment":
            assert load([f"experiment={choice}"]).run_name == choice.replace("/", "_")


def test_the_paper_s_settings():
    """Samples per step, ranks, types and trained shares as published."""
    for name, psi, trained in PAPER:
        cfg = load([f"experiment=paper/{name}"])
        assert (cfg.global_batch_size, cfg.micro_batch_size, cfg.seq_length) == (1280, 4, 512)
        assert num_micro_batches(cfg, 32) == 10
        assert element_bytes(cfg) == ElementBytes(param=2, grad=2, reduce=2, main=4)
        assert cfg.parallel.sharding == name[-3:].upper()
        units = [unit for profile in rank_profiles(cfg, MeshShape()) for unit in profile.expand()]
        numel = {kind: sum(sum(getattr(unit, kind)) for unit in units) for kind in ("trainable", "frozen")}
        assert sum(numel.values()) == pytest.approx(psi, rel=0.01)
        assert numel["trainable"] / sum(numel.values()) == pytest.approx(trained, rel=0.05)


def test_the_page_of_options_is_fresh():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("generate_config_docs", root / "scripts" / "generate_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.render(), "run `make docs`"
