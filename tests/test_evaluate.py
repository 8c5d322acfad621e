"""How validation samples are shared by the datasets."""

from __future__ import annotations

import pytest

from paro_lm.evaluate import shares


@pytest.mark.parametrize(
    ("sizes", "total", "expected"),
    [
        ([7], 3, [3]),
        ([7], 0, [7]),
        ([10, 30], 8, [2, 6]),
        ([30, 10], 8, [6, 2]),
        ([10, 30], 0, [10, 30]),
        ([10, 30], 100, [10, 30]),
        ([0, 5, 0], 2, [0, 2, 0]),
        ([3, 3, 3], 4, [1, 1, 2]),
        ([0], 5, [0]),
        ([], 5, []),
    ],
)
def test_shares(sizes: list[int], total: int, expected: list[int]) -> None:
    assert shares(sizes, total) == expected
