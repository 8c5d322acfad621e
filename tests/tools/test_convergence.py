"""The convergence table: what it calls the same curve, and what it writes; the runs themselves are slow."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paro_lm.tools.convergence import CELLS, OTHER_ORDER, OTHER_SEED, Curves, convergence_table, run_config, train_all, write_curves
from paro_lm.validation import validate


def curves(**shifts: float) -> list[Curves]:
    base = {step: 5.0 - step / 10 for step in range(1, 7)}
    names = [*CELLS, OTHER_ORDER, OTHER_SEED]
    shift = {OTHER_SEED: 0.2} | shifts
    return [
        Curves(
            name=name,
            train={step: loss + shift.get(name, 0.0) for step, loss in base.items()},
            valid={step: base[step] + shift.get(name, 0.0) for step in (3, 6)},
        )
        for name in names
    ]


def test_what_is_the_same_curve() -> None:
    table = convergence_table(curves(NIG=0.019, IIG=-0.021), steps=6, provenance="here")
    verdicts = {row[0]: row[-1] for row in table.rows}
    scales = {OTHER_ORDER: "for scale", OTHER_SEED: "for scale"}
    assert verdicts == {"GGG": "reference", "NIG": "the same", "IIG": "another curve", "IGG": "the same"} | scales
    assert table.rows[1][1:5] == ("4.4190", "4.4190", "1.90e-02", "1.90e-02")
    assert "here" in table.notes


def test_curves_are_written(tmp_path: Path) -> None:
    assert write_curves(curves(), tmp_path) == "convergence.png"
    assert (tmp_path / "convergence.png").stat().st_size > 1000
    rows = list(csv.DictReader((tmp_path / "convergence_curves.csv").open()))
    assert len(rows) == 6 * 6
    assert [row["val_loss"] for row in rows[:3]] == ["", "", "4.7"]


def test_the_runs_differ_in_cell_and_seed_only(tmp_path: Path) -> None:
    configs = {name: run_config(name, steps=9, data=["a.txt", "b.txt"], folder=tmp_path) for name in (*CELLS, OTHER_ORDER, OTHER_SEED)}
    assert {cfg.parallel.sharding for cfg in configs.values()} == set(CELLS)
    assert configs["NIG"].seed == configs["GGG"].seed != configs[OTHER_SEED].seed
    assert configs[OTHER_ORDER].micro_batch_size == 8 != configs["GGG"].micro_batch_size
    assert len({cfg.run_name for cfg in configs.values()}) == 6
    assert all(validate(cfg, 4) == [] for cfg in configs.values())


@pytest.mark.slow
def test_cells_converge_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number * number} make {number + number * number}.\n" for number in range(4000)))
    found = train_all(steps=60, data=[str(text)], folder=tmp_path)
    table = convergence_table(found, steps=60, provenance="")
    assert [row[-1] for row in table.rows] == ["reference", "the same", "the same", "the same", "for scale", "for scale"]
    assert all(float(str(row[3])) < 1e-3 for row in table.rows[:4])
    assert found[0].train[60] < found[0].train[1] - 1
    assert "minutes in all" in capfd.readouterr().out
