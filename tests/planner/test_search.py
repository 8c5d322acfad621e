"""Memory terms by hand, what a plan lists, the paper's sets, speed, and mixed plans against the best uniform cell."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from paro_lm.cli import load
from paro_lm.config import Config, ParallelConfig
from paro_lm.parallel import engine
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.cost import ElementBytes, memory
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner.activations import Activations
from paro_lm.planner.inventory import UnitProfile, rank_profiles, unit_sizes
from paro_lm.planner.memory import PENDING_REDUCTIONS, rank_memory
from paro_lm.planner.mixed import knapsack
from paro_lm.planner.search import Plan, PlanOptions, plan

PAPER = (
    "cluster=a100_roce",
    "precision=bf16",
    "seq_length=512",
    "global_batch_size=1280",
    "precision.grad_dtype=bf16",
    "precision.reduce_dtype=bf16",
)
FIXED = PlanOptions(tp=[1], pp=[1], micro_batch_size=[4], group_size=[8], mixed=False)


def paper_plan(model: str, options: PlanOptions) -> Plan:
    return plan(load([f"model={model}", *PAPER]), world_size=32, options=options)


def test_peak_by_hand() -> None:
    """III on 2 groups of 2, three blocks of 64 elements: the peak is the backward of the last block or of one before it."""
    shape, element = MeshShape(dp_inter=2, dp_intra=2), ElementBytes()
    profiles = [UnitProfile(name="layers.0", kind="block", trainable=(64,), count=3)]
    held = Activations(embedding=0, block=1000, head=0, block_working=100, head_loss=0, head_projection=0)
    found = rank_memory(profiles, [Cell.parse("III")], shape, element, held)
    assert (found.param, found.grad, found.main) == (3 * 64, 3 * 128, 3 * 64 * 6)
    assert found.gathered == 2 * 64 * 2
    assert found.reducing == 3 * 64 * 4
    assert (found.activations, found.working, found.scratch) == (3000, 100 + 128, 0)
    assert found.total == sum(found.terms().values())
    replicated = rank_memory(profiles, [Cell.parse("NNN")], shape, element, held, micro_batches_held=2)
    assert (replicated.gathered, replicated.reducing, replicated.activations) == (0, 0, 6000)
    assert rank_memory(profiles, [Cell.parse("III")], shape, element, held, overlap=False).gathered == 64 * 2
    assert PENDING_REDUCTIONS == engine.MAX_PENDING_REDUCTIONS


def test_states_equal_the_inventory_of_the_config() -> None:
    cfg = load(["model=llama_125m", "precision=bf16", "parallel=iig"])
    shape = MeshShape(dp_inter=2, dp_intra=3)
    exact = memory(unit_sizes(cfg, shape), shape, ElementBytes())
    held = Activations(embedding=0, block=0, head=0, block_working=0, head_loss=0, head_projection=0)
    profiles = rank_profiles(cfg, shape)
    found = rank_memory(profiles, [Cell.parse("IIG")] * len(profiles), shape, ElementBytes(), held)
    assert found.states == exact.total


def test_every_kept_cell_is_listed_once_and_ranked() -> None:
    result = paper_plan("llama_7b", FIXED)
    assert {candidate.cell for candidate in result.candidates} == set(KEPT_CELLS)
    assert len(result.candidates) == 14
    fitting = [candidate.time.total for candidate in result.candidates if candidate.fits]
    assert fitting == sorted(fitting)
    assert [candidate.fits for candidate in result.candidates] == sorted((c.fits for c in result.candidates), reverse=True)
    assert result.best is result.candidates[0]
    assert not next(c for c in result.candidates if str(c.cell) == "NNN").fits


def test_65b_fits_only_where_the_paper_says() -> None:
    """R3: with checkpointing, GGG, IGG, GIG and IIG are the cells that fit 80 GB (GIG by the formula, not in the paper's text)."""
    result = paper_plan("llama_65b", replace(FIXED, activation_checkpointing=["full"]))
    assert {str(c.cell) for c in result.candidates if c.fits} == {"GGG", "IGG", "GIG", "IIG"}
    assert str(result.best.cell) == "IIG"


def test_a_thousand_ranks_in_seconds() -> None:
    cfg = load(["model=llama_7b", "cluster=h100_ib", "precision=bf16", "seq_length=4096", "global_batch_size=4096"])
    start = time.process_time()
    result = plan(cfg, world_size=1024)
    assert time.process_time() - start < 4.0
    assert len(result.candidates) > 1000
    assert {c.layout.shape.tp for c in result.candidates} == {1, 2, 4, 8}
    assert all(c.layout.accumulation * c.layout.micro_batch_size * c.layout.shape.dp == 4096 for c in result.candidates)


def between_gig_and_iig() -> float:
    """A budget in bytes half way between the peaks of two uniform cells."""
    light, heavy = (next(c for c in paper_plan("llama_7b", FIXED).candidates if str(c.cell) == name) for name in ("GIG", "IIG"))
    return (light.memory.total + heavy.memory.total) / 2


def test_the_overrides_of_a_candidate_are_a_valid_config() -> None:
    options = replace(FIXED, mixed=True, budget_gb=between_gig_and_iig() / 1e9, activation_checkpointing=["none"])
    result = paper_plan("llama_7b", options)
    assert result.mixed is not None
    cfg = load(["model=llama_7b", *PAPER, *result.mixed.overrides()])
    assert cfg.parallel.sharding == str(result.mixed.cell)
    assert cfg.parallel.sharding_overrides == {name: str(cell) for name, cell in result.mixed.unit_cells.items()}
    assert cfg.parallel.group_size == 8


def test_tensor_parallel_over_two_nodes_counts_the_chosen_collectives() -> None:
    options = PlanOptions(cells=["GGG"], tp=[1, 8, 16], pp=[1], micro_batch_size=[4], mixed=False)
    native = plan(load(["model=llama_7b", *PAPER]), world_size=32, options=options)
    assert {c.layout.shape.tp for c in native.candidates} == {1, 8, 16}
    grouped = plan(load(["model=llama_7b", *PAPER, "parallel.tp=16", "parallel.tp_collectives=ho_ring"]), world_size=32, options=options)
    assert {c.layout.shape.tp for c in grouped.candidates} == {8, 16}  # with tp=1 the config refuses tp_collectives
    seconds = [next(c.time.tp for c in found.candidates if c.layout.shape.tp == 16) for found in (native, grouped)]
    assert 1.1 < seconds[0] / seconds[1] < 16


def test_a_mixed_plan_fills_a_budget_between_two_cells() -> None:
    """Between GIG and IIG the best uniform cell gathers globally; some blocks as IIG save a large part of that."""
    budget = between_gig_and_iig()
    heavy = next(c for c in paper_plan("llama_7b", FIXED).candidates if str(c.cell) == "IIG")
    options = replace(FIXED, mixed=True, budget_gb=budget / 1e9, activation_checkpointing=["none"])
    result = paper_plan("llama_7b", options)
    assert result.best is not None
    assert result.mixed is not None
    assert result.mixed.memory.total <= budget
    assert result.mixed.time.total < 0.8 * result.best.time.total
    assert len({result.mixed.cell, *result.mixed.unit_cells.values()}) >= 2
    assert heavy.time.total < result.mixed.time.total


def test_knapsack_equals_trying_everything() -> None:
    """Random small instances; the grid rounds weights up, so integer weights below the grid are exact."""
    random = np.random.default_rng(0)
    for _ in range(20):
        times, weights = random.random((4, 3)), random.integers(1, 50, (4, 3)).astype(float)
        budget = float(random.integers(20, 150))
        every = [
            (sum(times[row, at] for row, at in enumerate(choice)), choice)
            for choice in itertools.product(range(3), repeat=4)
            if sum(weights[row, at] for row, at in enumerate(choice)) <= budget
        ]
        found = knapsack(times, weights, budget)
        assert (found is None) == (not every)
        if found is not None:
            assert sum(times[row, at] for row, at in enumerate(found)) == pytest.approx(min(every)[0])


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 3"):
        plan(Config(global_batch_size=16, parallel=ParallelConfig()), world_size=3, options=PlanOptions(tp=[1], pp=[1]))


def test_unknown_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="XYZ"):
        plan(Config(), world_size=2, options=PlanOptions(cells=["XYZ"]))
