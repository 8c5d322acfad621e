"""A progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts input bytes and tokens of one job on stderr. Lines come every `SECONDS_BETWEEN_LINES`, so short jobs are silent."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total = title, total_bytes
        self._bytes = self._tokens = 0
        self._start = self._last = time.monotonic()
        self._rich: RichProgress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._rich.add_task(title, total=total_bytes, rate="")

    def advance(self, num_bytes: int, *, tokens: int = 0) -> None:
        self._bytes += num_bytes
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        if self._rich is not None:
            self._rich.update(self._task, completed=self._bytes, rate=f"{rate:,.0f} tokens/s" if self._tokens else "")
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            share = 100 * self._bytes / max(self._total, 1)
            print(
                f"{self._title}: {share:.0f}% of {self._total:,} bytes, {self._tokens:,} tokens, {rate:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Self:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()
