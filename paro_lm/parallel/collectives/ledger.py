"""Counts what collectives send, so that traffic can be compared with its formula."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class ByteLedger:
    """Bytes sent by this rank, per (operation, axis). Written by communication threads, read by any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[tuple[str, str]] = Counter()

    def record(self, operation: str, axis: str, num_bytes: int) -> None:
        """Add `num_bytes` payload bytes that this rank sent along `axis`."""
        with self._lock:
            self._sent[operation, axis] += num_bytes

    def by_axis(self) -> dict[str, int]:
        """Bytes per mesh axis."""
        return self._sum(1)

    def by_operation(self) -> dict[str, int]:
        """Bytes per operation: all_gather, reduce_scatter, all_reduce."""
        return self._sum(0)

    def entries(self) -> dict[tuple[str, str], int]:
        """Bytes per (operation, axis)."""
        with self._lock:
            return dict(self._sent)

    def reset(self) -> None:
        """Forget everything, as at the start of a step."""
        with self._lock:
            self._sent.clear()

    def restore(self, entries: Mapping[tuple[str, str], int]) -> None:
        """Go back to what `entries` gave, leaving out what was counted since."""
        with self._lock:
            self._sent = Counter(entries)

    def _sum(self, part: int) -> dict[str, int]:
        result: Counter[str] = Counter()
        for key, num_bytes in self.entries().items():
            result[key[part]] += num_bytes
        return dict(result)
