"""RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paro_lm.model.spec import ParameterSpec, SpecifiedModule


class RMSNorm(SpecifiedModule):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; 16-bit inputs are normalised in fp32."""

    def __init__(self, size: int, eps: float, *, axes: tuple[frozenset[str], frozenset[str]]) -> None:
        super().__init__()
        self.size, self.eps, self.axes = size, eps, axes
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, (self.size,), self.weight, self.eps)

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": _vector(self.size, "ones", self.axes)}


class LayerNorm(SpecifiedModule):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""

    def __init__(self, size: int, eps: float, *, axes: tuple[frozenset[str], frozenset[str]]) -> None:
        super().__init__()
        self.size, self.eps, self.axes = size, eps, axes
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": _vector(self.size, "ones", self.axes), "bias": _vector(self.size, "zeros", self.axes)}


NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def _vector(size: int, init: str, axes: tuple[frozenset[str], frozenset[str]]) -> ParameterSpec:
    partial, replicated = axes
    return ParameterSpec(
        shape=(size,), offset=(0,), local_shape=(size,), init=init, decay=False, partial_axes=partial, replicated_axes=replicated
    )


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in few passes: on a CPU, torch's own is built from single operations and takes four times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        mean = (product @ weight).unsqueeze(-1) / x.shape[-1]
        grad_weight = product.reshape(-1, x.shape[-1]).sum(dim=0)
        return normed.mul_(-mean).addcmul_(grad, weight).mul_(scale), grad_weight, None
