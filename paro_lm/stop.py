"""Requests to stop: signals and the time limit. A rank only notes them; all ranks act on them together at the end of a step."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Set by SIGINT, SIGTERM or after `max_minutes` (0 = never). A second SIGINT ends the process at once, without saving."""

    def __init__(self, max_minutes: float) -> None:
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes > 0 else None
        self._received: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop; None to go on."""
        if self._received is not None:
            return self._received
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "runtime.max_minutes"
        return None
