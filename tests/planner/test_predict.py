"""What a run asks of the planner: its own figures, the cell for `auto`, and the report when memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.parallel.axes import MeshShape
from paro_lm.planner.predict import choice_text, choose, out_of_memory_text, predict, stage_memories

ARGUMENTS = ("model=llama_7b", "cluster=a100_roce", "precision=bf16", "seq_length=512", "global_batch_size=1280", "micro_batch_size=4")
WORLD = {"world_size": 32, "local_world_size": 8}


def config(*more: str) -> Config:
    return load([*ARGUMENTS, *more])


def test_a_run_and_the_plan_agree() -> None:
    chosen = choose(config(), **WORLD)
    for candidate in chosen.candidates[:4]:
        alone = predict(config(f"parallel.sharding={candidate.cell}"), **WORLD)
        assert alone.memory.total == pytest.approx(candidate.memory.total)
        assert alone.time.total == pytest.approx(candidate.time.total)
        assert alone.layout == candidate.layout


def test_cells_of_single_units_count() -> None:
    uniform = predict(config("parallel.sharding=IIG"), **WORLD)
    cfg = config("parallel.sharding=IIG")
    mixed = predict(replace(cfg, parallel=replace(cfg.parallel, sharding_overrides={"layers.3*": "NIG"})), **WORLD)
    assert set(mixed.unit_cells) == {"layers.3", "layers.30", "layers.31"}
    assert mixed.memory.param - uniform.memory.param == pytest.approx(3 * 7 / 8 * 2 * 202.4e6, rel=1e-3)
    assert mixed.time.param < uniform.time.param


def test_auto_leaves_only_the_cell_open() -> None:
    cfg = config("parallel.activation_checkpointing=full")
    result = choose(cfg, **WORLD)
    assert {(c.layout.micro_batch_size, c.layout.checkpointing, c.layout.shape.dp_intra) for c in result.candidates} == {(4, "full", 8)}
    assert choice_text(result).startswith(f"parallel.sharding=auto chose {result.best.cell}: ")


def test_auto_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no cell fits the 2.0 GB of a rank, the lightest, GGG, needs"):
        choice_text(choose(config(), **WORLD, budget_gb=2.0))


def test_one_rank_has_one_cell() -> None:
    result = choose(config("global_batch_size=8"), world_size=1)
    assert [str(c.cell) for c in result.candidates] == ["NNN"]


def test_every_stage_of_a_pipeline() -> None:
    cfg = config("parallel.sharding=NIG", "parallel.pp=4", "parallel.tp=2")
    found = stage_memories(cfg, MeshShape(pp=4, dp_inter=2, dp_intra=2, tp=2))
    assert len(found) == 4
    assert found[0].param > found[1].param  # the embedding
    assert found[1].activations > found[2].activations  # fewer micro-batches in flight
    whole = predict(cfg, world_size=32, local_world_size=4)
    assert whole.memory.total == pytest.approx(max(memory.total for memory in found))


def test_out_of_memory_names_lighter_cells_with_their_cost() -> None:
    cfg = config("parallel.sharding=NNN")
    text = out_of_memory_text(cfg, **WORLD, actual={"total": 81e9, "states": 112e9})
    assert "states       planned   121.29" in text  # 18 bytes per parameter: bf16 with fp32 gradients
    assert "actual    81.00" in text
    lighter = [line for line in text.splitlines() if "parallel.sharding=" in line and "needs" in line]
    assert len(lighter) == 3
    assert all("% time per step" in line for line in lighter)
    light = out_of_memory_text(replace(cfg, parallel=replace(cfg.parallel, sharding="GGG")), **WORLD, actual={"total": 1e9})
    assert "no other cell needs less" in light
