"""The words, the files and the command of a plan."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paro_lm.cli import load
from paro_lm.planner.report import mixed_sentence, pareto, reason, sentence
from paro_lm.planner.search import PlanOptions, plan
from paro_lm.tools.plan import TOOL, main
from tests.command import call

FIXED = PlanOptions(tp=[1], pp=[1], micro_batch_size=[4], group_size=[8])
ARGUMENTS = ("model=llama_7b", "cluster=a100_roce", "precision=bf16", "seq_length=512", "global_batch_size=1280")


def test_reasons_say_what_and_by_how_much() -> None:
    result = plan(load(ARGUMENTS), world_size=32, options=FIXED)
    assert result.best is not None
    texts = {str(candidate.cell): reason(candidate, result.best) for candidate in result.candidates}
    assert texts[str(result.best.cell)] == "first choice"
    assert texts["NNN"].startswith("out of memory by ")
    assert "GB (" in texts["NNN"]
    assert "slower (gathers of parameters +" in texts["GGG"]
    assert "GB lighter" in texts["GGG"]
    assert sentence(result).startswith(f"{result.best.cell} with groups of 8, micro-batch 4 x 10")


def test_when_nothing_fits_it_says_what_is_missing() -> None:
    result = plan(load(ARGUMENTS), world_size=32, options=PlanOptions(tp=[1], pp=[1], micro_batch_size=[4], budget_gb=2.0))
    assert result.best is None
    assert sentence(result).startswith("Nothing fits: the lightest candidate, GGG")
    assert mixed_sentence(result) is None


def test_the_pareto_front_is_beaten_by_nobody() -> None:
    candidates = plan(load(ARGUMENTS), world_size=32, options=FIXED).candidates
    front = pareto(candidates)
    for candidate in candidates:
        beaten = any(f.memory.total <= candidate.memory.total and f.time.total <= candidate.time.total for f in front)
        assert beaten
    assert len(front) > 1


def test_the_command_writes_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("plan.tp=1", "plan.pp=1", "plan.budget_gb=20", "plan.group_size=8", "plan.micro_batch_size=4")
    others = ("plan.activation_checkpointing=none", "plan.trace=true", f"plan.folder={tmp_path}")
    assert call(main, *ARGUMENTS, *sizes, *others) == 0
    text = capsys.readouterr().out
    assert "Mixed plan: " in text
    assert "paro-train parallel.sharding=" in text
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert {row["cell"] for row in rows} >= {"GGG", "IIG", "NNN"}
    assert rows[-1]["mixed_units"]
    for row in rows:
        terms = [float(value) for name, value in row.items() if name.startswith("seconds_")]
        assert sum(terms) == pytest.approx(float(row["seconds"]))
        held = [float(value) for name, value in row.items() if name.startswith("bytes_") and name != "bytes_total"]
        assert sum(held) == pytest.approx(float(row["bytes_total"]))
    for name in ("plan.png", "timeline.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert '"gather layers.7"' in (tmp_path / "trace.json").read_text()


def test_wrong_choices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, words in (("plan.cells=XYZ", "XYZ"), ("plan.activation_checkpointing=some", "some"), ("cluster=nothing", "a100_roce")):
        assert call(main, argument) == 2
        assert words in capsys.readouterr().err


def test_it_knows_experiments_and_starts_from_its_own_file() -> None:
    cfg = load(["experiment=llama_7b"], tool=TOOL)
    assert (cfg.global_batch_size, cfg.plan.mixed) == (2048, True)


def test_a_thousand_ranks_answer_in_five_seconds_without_torch(tmp_path: Path) -> None:
    """CPU seconds of the whole process, import included: the wall clock of a busy machine says nothing."""
    code = (
        "import sys, time, paro_lm.tools.plan as tool\n"
        "try:\n    tool.main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\nassert time.process_time() < 5, time.process_time()"
    )
    arguments = ["model=llama_7b", "cluster=h100_ib", "cluster.nodes=128", "global_batch_size=4096", f"plan.folder={tmp_path}"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert "on 1024 ranks of h100_ib" in done.stdout
    assert time.monotonic() - start < 60
