"""Rotary position embedding in the half layout: dim j of a head is rotated with dim j + head_dim / 2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paro_lm.config import RopeScalingConfig


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig, device: torch.device | None = None) -> Tensor:
    """The head_dim / 2 angular frequencies per position, in fp32 (as Hugging Face models compute them).

    `linear` divides all by `factor`; `llama3` (Llama 3.1) divides long wavelengths, keeps short ones and interpolates between, over
    the wavelengths; `yarn` (arXiv 2309.00071) does so over the dimensions. Raises ValueError for another type.
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
    if scaling.type == "yarn":
        first, last = _yarn_range(head_dim, theta, scaling)
        divided = ((torch.arange(head_dim // 2, dtype=torch.float32, device=device) - first) / (last - first)).clamp(0.0, 1.0)
        return frequencies / scaling.factor * divided + frequencies * (1 - divided)
    raise ValueError(f"model.rope_scaling.type must be none, linear, llama3 or yarn, got {scaling.type!r}")


def _yarn_range(head_dim: int, theta: float, scaling: RopeScalingConfig) -> tuple[float, float]:
    """Dimensions between which YaRN goes over from kept to divided frequencies."""

    def dimension(turns: float) -> float:
        """The one that turns this often over the original context length."""
        return head_dim / 2 * math.log(scaling.original_max_position / (turns * 2 * math.pi), theta)

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else first + 0.001  # a step, without a division by zero


def rotation_factor(scaling: RopeScalingConfig) -> float:
    """What queries and keys are multiplied by while they are rotated: 1 but for `yarn`, which sharpens attention (its section 3.4)."""
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


class Rope:
    """Makes the rotation tables of one forward; the frequencies are a cache that follows the device, never a buffer of the model."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScalingConfig) -> None:
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.factor = rotation_factor(scaling)
        self.frequencies: Tensor | None = None

    def reset(self, device: torch.device) -> None:
        """Recompute the frequencies on `device`."""
        self.frequencies = inverse_frequencies(self.head_dim, self.theta, self.scaling, device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, times `rotation_factor`, [..., sequence, 1, head_dim / 2] in `dtype`, of positions [..., sequence]."""
        if self.frequencies is None or self.frequencies.device != positions.device:
            self.reset(positions.device)
        assert self.frequencies is not None
        precise = torch.promote_types(dtype, torch.float32)
        angles = positions.to(precise)[..., None, None] * self.frequencies.to(precise)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [batch, sequence, heads, head_dim] with tables that broadcast against half of it."""
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """A rotation keeps only its tables for backward, which is the rotation back, with the same factor."""

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
