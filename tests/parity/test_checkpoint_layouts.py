"""Checkpoints saved under one layout load under another: bitwise the same state, moments included, and the same steps after it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paro_lm.config import Config
from paro_lm.run import Run
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.parity.test_layouts import Layout, fit_all
from tests.test_trainer import records, tokens, weights  # noqa: F401 (a fixture)

SAVED, STEPS = 3, 6

TP = Layout(tp=2, dp=2, group=2, cell="IIG", micro_batches=2)
PP = Layout(pp=2, dp=2, group=1, cell="NIG", micro_batches=2)
DP = Layout(dp=4, group=2, cell="GGG", micro_batches=2)
BOTH = Layout(tp=2, pp=2, cell="III", sequence_parallel=True, schedule="interleaved_1f1b", micro_batches=2)
STAGES = Layout(pp=2, cell="NNN", micro_batches=2)
SLICES = Layout(tp=2, cell="IGG", micro_batches=2)
ONE = Layout(micro_batches=2)

PAIRS = [*itertools.permutations((TP, PP, DP, BOTH), 2), (TP, STAGES)]
"""Among them the two of case T9: TP -> STAGES and TP -> DP."""
MORE = [(DP, STAGES), (BOTH, STAGES), (SLICES, STAGES), (STAGES, TP), (SLICES, PP), (ONE, BOTH), (DP, ONE), (STAGES, ONE)]


class _SavesAtOnce(Trainer):
    """Saves what it loaded before it goes on, in its own run folder."""

    def open(self) -> Run:
        run = super().open()
        assert self.step == SAVED
        self._save()
        self.checkpointer.wait()
        return run


def _continue(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    return [_SavesAtOnce(cfg).fit() for cfg in configs]


def by_world_size(layouts: list[Layout]) -> dict[int, list[Layout]]:
    return {size: [layout for layout in layouts if layout.world_size == size] for size in sorted({layout.world_size for layout in layouts})}


def saving(layout: Layout, folder: Path) -> Config:
    cfg = layout.config(folder, steps=STEPS)
    return replace(cfg, checkpoint=replace(cfg.checkpoint, every=SAVED, keep_last=0), eval=replace(cfg.eval, every=0))


def loading(saved: Layout, layout: Layout, folder: Path) -> Config:
    cfg = saving(layout, folder)
    source = Path(cfg.output_dir) / str(saved) / "checkpoints" / f"step_{SAVED}"
    return replace(cfg, run_name=f"from-{saved}-to-{layout}", checkpoint=replace(cfg.checkpoint, resume=str(source)))


def losses_from(cfg: Config, step: int) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(cfg) if "loss" in record and record["step"] >= step}


def run_and_check(folder: Path, pairs: list[tuple[Layout, Layout]]) -> None:
    for size, layouts in by_world_size(list(dict.fromkeys(saved for saved, _ in pairs))).items():
        assert run_distributed(fit_all, size, [saving(layout, folder) for layout in layouts]) == [[0] * len(layouts)] * size
    for size, layouts in by_world_size(list(dict.fromkeys(layout for _, layout in pairs))).items():
        configs = [loading(saved, layout, folder) for saved, layout in pairs if layout in layouts]
        assert run_distributed(_continue, size, configs) == [[0] * len(configs)] * size
    for saved, layout in pairs:
        check(saving(saved, folder), loading(saved, layout, folder))


def test_checkpoints_load_under_other_layouts(tokens: Path) -> None:  # noqa: F811
    assert len(set(PAIRS)) >= 12
    run_and_check(tokens, PAIRS)


@pytest.mark.slow
def test_checkpoints_load_on_other_numbers_of_ranks(tokens: Path) -> None:  # noqa: F811
    run_and_check(tokens, MORE)


def check(saved: Config, loaded: Config) -> None:
    before, after = weights(saved, SAVED), weights(loaded, SAVED)
    assert before.keys() == after.keys()
    kinds = {name.split("/")[0] for name in before}
    assert kinds == {"model", "exp_avg", "exp_avg_sq", "step"}
    for name, value in before.items():
        assert torch.equal(after[name], value), f"{loaded.run_name}: {name}"
    matrices = [before[f"{kind}/layers.{i}.mlp.up.weight"] for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(4)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(matrices, 2))  # so that a mixed-up layer would show

    want, got = losses_from(saved, SAVED + 1), losses_from(loaded, SAVED + 1)
    assert list(want) == [4, 5, 6]
    assert got == pytest.approx(want, abs=1e-10, rel=0), loaded.run_name
    end, expected = weights(loaded, STEPS), weights(saved, STEPS)
    for name, value in expected.items():
        torch.testing.assert_close(end[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{loaded.run_name} {n}: {m}")
