"""Console commands called inside the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def call(main: Callable[[Sequence[str]], Any], *arguments: str) -> int:
    """The exit code of a command's main."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code
