"""Rotary position embedding in the half layout: dim j of a head is rotated with dim j + head_dim / 2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paro_lm.config import RopeScalingConfig


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig, device: torch.device | None = None) -> Tensor:
    """The head_dim / 2 angular frequencies per position, in fp32 (as Hugging Face models compute them).

    `linear` divides all by `factor`; `llama3` (Llama 3.1) divides long wavelengths, keeps short ones and interpolates between.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponent
    if scaling.type == "none":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
        kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / scaling.factor
    raise ValueError(f"model.rope_scaling.type must be none, linear or llama3, got {scaling.type!r}")


class Rope:
    """Makes the rotation tables of one forward; the frequencies are a cache that follows the device, never a buffer of the model."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScalingConfig) -> None:
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.frequencies: Tensor | None = None

    def reset(self, device: torch.device) -> None:
        """Recompute the frequencies on `device`."""
        self.frequencies = inverse_frequencies(self.head_dim, self.theta, self.scaling, device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., sequence, 1, head_dim / 2] in `dtype`, of positions [..., sequence]."""
        if self.frequencies is None or self.frequencies.device != positions.device:
            self.reset(positions.device)
        assert self.frequencies is not None
        precise = torch.promote_types(dtype, torch.float32)
        angles = positions.to(precise)[..., None, None] * self.frequencies.to(precise)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [batch, sequence, heads, head_dim] with tables that broadcast against half of it."""
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """A rotation keeps only its tables for backward, which is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x.chunk(2, dim=-1)
    to_first, to_second = output.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    return output
