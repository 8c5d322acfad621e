"""A torch profiler trace of some steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import record_function, supported_activities


def profile_problems(profile_steps: Sequence[int]) -> list[str]:
    """What is wrong with `logging.profile_steps`; empty means off."""
    if not profile_steps or (len(profile_steps) == 2 and 1 <= profile_steps[0] <= profile_steps[1]):
        return []
    return [
        f"logging.profile_steps={list(profile_steps)} must be the first and the last step to trace, counted from 1, as in [3,5]; [] is off."
    ]


class Profiler:
    """Traces steps `profile_steps` = (first, last) of this rank into `folder`/rank_<r>_steps_<first>-<last>.json (Chrome trace format).

    A resume in the middle traces what is left of the range. Off when `profile_steps` is empty. Raises ValueError for a bad range.
    """

    def __init__(self, profile_steps: Sequence[int], folder: Path, *, rank: int = 0) -> None:
        problems = profile_problems(profile_steps)
        if problems:
            raise ValueError(problems[0])
        self.first, self.last = profile_steps or (0, 0)
        self.folder, self.rank = folder, rank
        self._profile: torch.profiler.profile | None = None
        self._seen: tuple[int, int] | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround one step; step counts from 1."""
        if not self.first <= step <= self.last or self.last == 0:
            yield
            return
        if self._profile is None:
            self._profile = torch.profiler.profile(activities=list(supported_activities()))
            self._profile.start()
        self._seen = (self._seen[0] if self._seen else step, step)
        with record_function(f"step {step}"):
            yield
        if step == self.last:
            self.close()

    def close(self) -> Path | None:
        """End a trace that is running and write it; the path, or None when none was running. A second call does nothing."""
        if self._profile is None or self._seen is None:
            return None
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.rank}_steps_{self._seen[0]}-{self._seen[1]}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return path
