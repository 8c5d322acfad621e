"""scripts/check_predictions.py: its verdicts by hand; as slow test, memory of all cells on an emulated cluster within 5 %."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_emulated_cluster import needs_cluster

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_predictions.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_predictions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(cell: str, seconds: float, predicted: float, held: float = 100.0, planned: float = 100.0) -> dict[str, str]:
    values = (cell, seconds, 0.9 * seconds, 1.1 * seconds, predicted, held * 2**20, planned * 2**20)
    return {
        name: str(value)
        for name, value in zip(("cell", "seconds", "low", "high", "predicted_seconds", "bytes", "predicted_bytes"), values, strict=True)
    }


def test_verdicts(script, tmp_path: Path) -> None:
    rows = [row("NII", 2.0, 2.2), row("IIG", 2.08, 2.1, planned=104), row("GGG", 4.0, 3.0, planned=93)]
    text = script.table(rows, "2x2")
    assert "median absolute error of the step time: 10.0%, target 15%: met" in text
    assert "best predicted cell IIG over best measured NII: 4.0%, target 5%: met" in text
    assert "largest absolute error of memory: 7.0%, target 5%: missed" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("| ") and "cell" not in line] == ["NII", "IIG", "GGG"]
    script.plot(rows, tmp_path / "p.png", "2x2")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.slow
@needs_cluster
def test_memory_on_an_emulated_cluster(tmp_path: Path) -> None:
    """Step times depend on what else the machine does; bytes do not."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--rounds", "1", "--cells", "NNN", "NIG", "IIG", "GGG"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "2x2-500mbit" / "predictions.csv").open()))
    assert [found["cell"] for found in rows] == ["NNN", "NIG", "IIG", "GGG"]
    for found in rows:
        assert float(found["predicted_bytes"]) == pytest.approx(float(found["bytes"]), rel=0.05), found
