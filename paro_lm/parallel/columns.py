"""Column-parallel linears that read the same residual: they enter the region together.

One gather (or nothing) forward and one sum of the input's gradient backward serve all of them. The sum is launched as soon as the
gradient exists and, with `overlap`, runs while the weight gradients are computed; the numbers are the same without. A split backward
(zero-bubble schedules) computes them apart: there linears stay single ones, which compute only what is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paro_lm.parallel.tensor import ColumnParallelLinear, Pending, TensorParallel, enter_region


def column_linears(x: Tensor, linears: Sequence[ColumnParallelLinear], dropout: Any = None) -> list[Tensor]:
    """What each of `linears` gives for `x` of the residual stream: [b, s, its output slice]. `dropout` is for their adapters."""
    tensor = linears[0].tensor
    if not _is_fused(tensor):
        x = enter_region(x, tensor)
        return [linear(x, dropout) for linear in linears]
    weights, biases = zip(*(linear.used() for linear in linears), strict=True)
    inside, *outputs = _columns(x, tensor, *weights, *biases)
    return [y if linear.lora is None else y + linear.lora(inside, dropout) for y, linear in zip(outputs, linears, strict=True)]


def column_output(x: Tensor, weight: Tensor, tensor: TensorParallel | None) -> Tensor:
    """x W^T for `x` of the residual stream and this rank's rows of W."""
    if not _is_fused(tensor):
        return F.linear(enter_region(x, tensor), weight)
    return _columns(x, tensor, weight, None)[1]


def _is_fused(tensor: TensorParallel | None) -> bool:
    return tensor is not None and not tensor.split_backward


@torch.compiler.disable
def _columns(x: Tensor, tensor: TensorParallel | None, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    return _Columns.apply(x, tensor, *parameters)


class _Columns(torch.autograd.Function):
    """(x, weights and biases) -> (x inside of the region, one output per weight); its backward computes all gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        inside = tensor.all_gather(x, dim=1) if tensor.sequence_parallel else x.view_as(x)
        ctx.tensor = tensor
        ctx.set_materialize_grads(False)
        needs_weights = any(ctx.needs_input_grad[2 : 2 + len(weights)])
        ctx.save_for_backward(inside if needs_weights else None, *(weights if ctx.needs_input_grad[0] else ()))
        return (inside, *(F.linear(inside, weight, bias) for weight, bias in zip(weights, biases, strict=True)))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_inside: Tensor | None, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inside, *weights = ctx.saved_tensors
        grads = [None if grad is None else grad.flatten(0, -2) for grad in output_grads]
        pending: Pending | None = None
        if ctx.needs_input_grad[0]:
            shape = next(grad for grad in output_grads if grad is not None).shape[:-1] if grad_inside is None else grad_inside.shape[:-1]
            total = _input_gradient(grad_inside, grads, weights).view(*shape, -1)
            tensor: TensorParallel = ctx.tensor
            if tensor.sequence_parallel:
                pending = tensor.start_reduce_scatter(total, dim=1, beside=tensor.overlap)
            else:
                pending = tensor.start_all_reduce(total, beside=tensor.overlap)
        needed = ctx.needs_input_grad[2:]
        of_weights: list[Tensor | None] = [None] * len(grads)
        if inside is not None:
            flat = inside.flatten(0, -2)
            of_weights = [g.t() @ flat if g is not None and n else None for g, n in zip(grads, needed, strict=False)]
        of_biases = [g.sum(dim=0) if g is not None and n else None for g, n in zip(grads, needed[len(grads) :], strict=True)]
        return (None if pending is None else pending.wait(), None, *of_weights, *of_biases)


def _input_gradient(inside: Tensor | None, grads: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the region's input [tokens, h]: what came from elsewhere (adapters), and every linear's part."""
    total = None if inside is None else inside.flatten(0, -2).clone()
    for grad, weight in zip(grads, weights, strict=True):
        if grad is not None:
            total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None
    return total
