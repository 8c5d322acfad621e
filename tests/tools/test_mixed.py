"""scripts/check_mixed.py: the budget it takes and its verdict."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from paro_lm.distributed import World

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("check_mixed", SCRIPTS / "check_mixed.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def test_the_budget_lies_between_two_cells(script, tmp_path: Path) -> None:
    folder = tmp_path / "2x2-500mbit" / "calibrate" / "cluster"
    folder.mkdir(parents=True)
    text = (SCRIPTS.parent / "conf" / "cluster" / "emulated_2x2_500mbit.yaml").read_text()
    (folder / "measured.yaml").write_text(text)
    args = argparse.Namespace(nodes=2, ranks=2, rate="500mbit", hidden=128, layers=4, seq_length=32, accumulation=2, out=tmp_path)
    world = World(
        rank=0, world_size=4, local_rank=0, local_world_size=2, device=torch.device("cpu"), backend="gloo", owns_process_group=True
    )
    uniform, mixed = script.choose(script.config("NNN", args, 4, tmp_path / "data"), world)
    assert not uniform.unit_cells
    assert mixed.unit_cells
    assert mixed.memory.total <= mixed.budget == uniform.budget
    assert mixed.time.total < uniform.time.total


def test_verdicts(script) -> None:
    def run(cell: str, units: dict[str, str], seconds: list[float]) -> dict[str, object]:
        return {
            "cell": cell,
            "units": units,
            "seconds": seconds,
            "predicted_seconds": 1.0,
            "bytes": 2**20,
            "predicted_bytes": 2**20,
            "budget": 2**21,
        }

    found = {"uniform": run("GGG", {}, [2.0, 2.2, 2.4]), "mixed": run("IGG", {"head": "GGG"}, [1.0, 1.1, 1.2])}
    text = script.report(found)
    assert "Budget 2.0 MiB" in text
    assert "| mixed | IGG, head GGG | 1.100 |" in text
    assert "uniform / mixed: 2.000 [2.000, 2.000] measured, 1.000 predicted: the mixed plan is faster" in text
    found["mixed"]["seconds"] = [1.0, 2.2, 4.8]
    assert "no difference beyond the noise" in script.report(found)
