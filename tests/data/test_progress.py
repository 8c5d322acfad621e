"""Progress without a terminal: a line now and then, nothing for short jobs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paro_lm.data import progress


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 4.0, 4.0, 10.0, 10.0, 10.0, 12.0, 12.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.Progress("preparing x", 4000) as bar:
        bar.advance(1000, tokens=300)
        bar.advance(1000, tokens=300)
        bar.advance(1000, tokens=300)
    assert capsys.readouterr().err == "preparing x: 50% of 4,000 bytes, 600 tokens, 60 tokens/s\n"
