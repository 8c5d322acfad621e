"""Norms of single gradients, before they are summed over ranks."""

from __future__ import annotations

import math

import pytest
import torch

from paro_lm.optim.clip import _norms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_of_16_bits_neither_overflow_nor_round(dtype: torch.dtype, norm_type: float) -> None:
    """Finite gradients whose norm no fp16 number holds, and one that bf16 would round to 8 bits."""
    parts = [torch.full((101,), 10304.0, dtype=dtype), torch.full((3,), 1.0, dtype=dtype)]
    expected = [math.sqrt(101) * 10304.0, math.sqrt(3)] if norm_type == 2.0 else [10304.0, 1.0]
    if dtype is torch.bfloat16:
        expected[0] *= float(parts[0][0]) / 10304.0
    norms = _norms(parts, norm_type)
    assert norms.dtype is torch.float64
    assert norms.tolist() == pytest.approx(expected, rel=1e-6)
