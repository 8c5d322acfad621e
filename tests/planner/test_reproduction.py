"""The reproduction against the method's printed values and the published text."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from paro_lm.parallel.cost import ideal_memory
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner import paper as paper_model
from paro_lm.planner import published as paper
from paro_lm.planner.paper import FITTED, TOLERANCE, Constants, deviation, fit, guideline, predict, ring_seconds, scenario
from paro_lm.planner.published import CLAIMS
from paro_lm.planner.reproduction import TABLES, reproduce
from paro_lm.tools.reproduce import main
from tests.command import call

FREE = Constants(efficiency=1.0, latency=0.0, partial=1.0, peft=1.0)


@pytest.mark.parametrize(
    ("name", "setting", "seconds", "unit"),
    [
        ("NII", paper.FULL_7B, 0.801, 0.001), ("IIG", paper.FULL_7B, 1.733, 0.001), ("GGG", paper.FULL_7B, 40.688, 0.001),
        (paper.HPZ, paper.FULL_7B, 27.6, 0.1), ("IIG", paper.FULL_65B, 16.09, 0.01), ("GGG", paper.FULL_65B, 377.8, 0.1),
        ("NGG", paper.PART_7B, 0.932, 0.001), ("ING", paper.PEFT_65B, 9.141, 0.001), ("GGG", paper.PEFT_65B, 252.25, 0.01),
    ],
)  # fmt: skip
def test_without_latency_and_computation_scenarios_are_the_goldens(
    name: str, setting: paper.Setting, seconds: float, unit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_model, "INTRA_LATENCY", 0.0)
    found = scenario.__wrapped__(name, setting, ranks=32, samples=1280)
    assert found.communication == pytest.approx(seconds, abs=0.51 * unit)


def test_hops_of_zero3_by_hand() -> None:
    """7B: 34 units gathered twice and 14 buckets scattered, 31 hops each, ten micro-batches."""
    assert scenario("ZeRO-3", paper.FULL_7B, ranks=32, samples=1280).hops == pytest.approx(10 * 31 * (2 * 34 + 14))
    assert scenario("IIG", paper.FULL_7B, ranks=32, samples=1280).hops == pytest.approx(14 * (3 + 3))


def test_computation_at_the_peak() -> None:
    """6 Psi tokens / ranks / 312 TFLOP/s; 8 Psi with recomputation."""
    assert scenario("IIG", paper.FULL_7B, ranks=32, samples=1280).compute == pytest.approx(6 * 7e9 * 1280 * 512 / 32 / 312e12)
    assert scenario("IIG", paper.FULL_65B, ranks=32, samples=1280).compute == pytest.approx(8 * 65e9 * 1280 * 512 / 32 / 312e12)


def test_the_guideline_chooses_what_was_published_but_for_peft() -> None:
    for setting, wanted in paper.CHOICES.items():
        sizes = {"num_params": setting.num_params, "num_trainable": setting.num_trainable, "shape": paper_model.shape_of(32)}
        fitting = [cell for cell in KEPT_CELLS if ideal_memory(cell, **sizes).total < 80e9 and str(cell) not in paper.NOT_CANDIDATES]
        ranked = [str(cell) for cell, _, _ in guideline(setting, fitting)]
        expected = {"III", "IIG"} if setting == paper.PEFT_65B else set(wanted)
        assert set(ranked[: len(expected)]) == expected, setting
    peft = {str(cell): seconds for cell, seconds, _ in guideline(paper.PEFT_65B, KEPT_CELLS)}
    assert (round(peft["INI"], 3), round(peft["III"], 3), round(peft["ING"], 3)) == (9.109, 9.121, 9.141)
    assert guideline(paper.FULL_7B, [Cell.parse("NII")])[0][2] == pytest.approx(-math.log(0.801), abs=1e-3)


def test_the_constants_are_what_a_fit_finds_from_any_seed() -> None:
    """Relative 3 %: the search is random and the optimum flat."""
    for seed in (0, 1):
        assert asdict(fit(seed=seed)) == pytest.approx(asdict(FITTED), rel=0.03)


def test_published_claims_are_met_but_for_those_that_are_named() -> None:
    off = {claim.name: deviation(claim, predict(claim, FITTED)) for claim in CLAIMS}
    assert {name for name, value in off.items() if abs(value) > TOLERANCE} == {"R7 IIG", "R7 NIG", "R7 ZeRO-2", "R9"}
    assert all(value > -1 for value in off.values()), "a sign is wrong"


def test_orders_are_those_of_the_text() -> None:
    ours = {claim.name: predict(claim, FITTED) for claim in CLAIMS}
    assert ours["R7 IIG"] > ours["R7 NIG"] > ours["R7 ZeRO-2"] > ours["R7 ZeRO-3"]
    assert ours["R4 NII"] > ours["R4 NIG"] > 1
    assert ours["R5 IIG"] == pytest.approx(ours["R5 III"], rel=1e-3)


def test_ring_gains_on_bandwidth_alone_are_those_of_the_method() -> None:
    gains = {ranks: round(100 * (1 - ho / flat), 1) for ranks in (16, 32, 64, 128) for flat, ho in [ring_seconds(ranks, 1e12, FREE)]}
    assert gains == pytest.approx({16: 46.7, 32: 22.6, 64: 11.1, 128: 5.5}, abs=2.0)  # HO-Ring's last round inside the node is not free


def test_the_cost_tables_are_the_formulas_as_printed() -> None:
    """Every printed formula, evaluated as it is written, equals the value beside it (four decimals)."""
    values = {"V'": 112e9, "V": 112e9, "B'": 2000e9, "B": 80e9, "n": 32, "m": 8, "g": 4}
    for term, letters, formula, shown in reproduce(["formulas"])[0].rows:
        text = re.sub(r"(?<=[\w')]) (?=[(V])", " * ", str(formula))
        text = re.sub(r"[VB]'?|[nmg]", lambda match: str(values[match[0]]), text)
        assert eval(text) == pytest.approx(float(str(shown)), abs=5.1e-5), (term, letters, text)


def test_every_table_is_made_and_unknown_ones_are_refused() -> None:
    tables = reproduce()
    assert [table.name for table in tables] == list(TABLES)
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows), table.name
    assert [table.name for table in reproduce(["ring"])] == ["ring"]
    with pytest.raises(ValueError, match="nothing"):
        reproduce(["nothing"])
    cells = reproduce(["cells"])[0]
    assert sum(row[1] == "kept" for row in cells.rows) == 14


def test_the_command_writes_markdown_csv_and_figures(tmp_path: Path) -> None:
    assert call(main, f"folder={tmp_path}") == 0
    text = (tmp_path / "reproduce.md").read_text()
    readings = ("Three readings were chosen after", "shaped around the tolerance", "outside the 27")
    for words in (*readings, "seed of the fit: 0", "commit: ", "!["):
        assert words in text
    assert {path.stem for path in tmp_path.glob("*.csv")} == set(TABLES)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"scaling", "ring", "claims", "throughput"}
    rows = list(csv.DictReader((tmp_path / "claims.csv").open()))
    assert [row["claim"] for row in rows] == [claim.name for claim in CLAIMS]
    assert all(row["label"].startswith("modelled") for row in rows)
