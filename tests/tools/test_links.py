"""What the links of an emulated cluster carry is what the ledger counts, within 5 %: headers and a few numbers per step."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_emulated_cluster import needs_cluster

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_links.py"


@pytest.mark.slow
@needs_cluster
def test_links_carry_what_the_ledger_counts(tmp_path: Path) -> None:
    out = tmp_path / "links.csv"
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader(out.open()))
    assert [(row["cell"], row["node"]) for row in rows] == [(c, n) for c in ("NNN", "III", "IIG", "NIG", "GGG") for n in "01"]
    for row in rows:
        assert int(row["ledger_bytes"]) > 4 << 20, row
        assert 1.0 < float(row["ratio"]) < 1.05, row
