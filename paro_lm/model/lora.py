"""Low-rank adapters (LoRA, arXiv 2106.09685) inside the linears of the blocks, under every layout.

y = x W^T + (alpha / r) (x A^T) B^T, with A [r, in] and B [out, r]. An adapter is a child of its linear, so the names of the model do
not change; its own are `<linear>.lora.a` and `<linear>.lora.b`. The factor on the side that tensor parallelism slices is sliced like
W; the other one is whole on every rank, and its gradient is a partial sum over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paro_lm.model.dropout import DropoutState, dropout
from paro_lm.model.spec import NO_AXES, TP_AXES, ParameterSpec, SpecifiedModule
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.tensor import ColumnParallelLinear, RowParallelLinear

A, B = ".lora.a", ".lora.b"


class Adapter(SpecifiedModule):
    """The adapter of one linear; B starts at zero, A is normal with the variance 1 / (3 in) that peft's has.

    `name` is the global name of the linear: the dropout mask depends on it.
    """

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, *, rank: int, alpha: float, name: str) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        self.name, self.rank, self.scale, self.tensor = name, rank, alpha / rank, linear.tensor
        self.rows = linear.rows if isinstance(linear, ColumnParallelLinear) else None
        self._weight = linear.specs()["weight"]
        like = linear.weight
        self.a = nn.Parameter(torch.empty(rank, columns, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.empty(rows, rank, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor, state: DropoutState | None = None) -> Tensor:
        """x [..., the linear's input slice] -> [..., its output slice]; behind a row-parallel linear a partial sum."""
        if state is not None and state.adapters:
            sliced = self._weight.local_shape[1] != self._weight.shape[1]  # then every rank has features of its own
            region = f"{self.name}.lora.{self.tensor.rank if sliced and self.tensor is not None else 0}"
            x = dropout(x, replace(state, probability=state.adapters), region, None)
        b = self.b if self.rows is None else self.b[self.rows]
        return F.linear(F.linear(x, self.a), b) * self.scale

    def specs(self) -> dict[str, ParameterSpec]:
        shape, offset, local = self._weight.shape, self._weight.offset, self._weight.local_shape

        def axes(dim: int) -> dict[str, Any]:
            whole = self.tensor is not None and local[dim] == shape[dim]
            return {"partial_axes": TP_AXES if whole else NO_AXES, "replicated_axes": TP_AXES if whole else NO_AXES}

        a = ParameterSpec(
            shape=(self.rank, shape[1]),
            offset=(0, offset[1]),
            local_shape=(self.rank, local[1]),
            std=1.0 / math.sqrt(3 * shape[1]),
            **axes(1),
        )
        b = ParameterSpec(shape=(shape[0], self.rank), offset=(offset[0], 0), local_shape=(local[0], self.rank), init="zeros", **axes(0))
        return {"a": a, "b": b}


def add_adapters(model: Transformer, *, rank: int, alpha: float, probability: float, targets: Iterable[str]) -> None:
    """Put an adapter into every linear of the blocks whose last name is in `targets` (q, k, v, o, gate, up, down).

    Raises ValueError for a target that the model does not have.
    """
    wanted, found = set(targets), set()
    for index, block in model.layers.items():
        for name, module in list(block.named_modules()):
            last = name.rpartition(".")[2]
            if last in wanted and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.lora = Adapter(module, rank=rank, alpha=alpha, name=f"layers.{index}.{name}")
                found.add(last)
    if model.layers and wanted - found:
        raise ValueError(f"finetune.lora_targets: the model has no {', '.join(sorted(wanted - found))} in its blocks; leave them out.")
    model.adapter_dropout = probability


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((A, B))


def read_merged(
    read: Callable[[Sequence[str]], Mapping[str, Tensor]], names: Sequence[str], stored: Iterable[str], scale: float
) -> dict[str, Tensor]:
    """Parameters with their adapters merged in, W + scale B A, computed in fp32 at least and kept in the type of W.

    `read` gives whole parameters by name, `stored` are all names that it knows.
    """
    known = set(stored)
    result = dict(read(names))
    for name in names:
        linear = name.removesuffix(".weight")
        if linear + A not in known:
            continue
        factors = read([linear + A, linear + B])
        weight = result[name]
        kind = torch.promote_types(weight.dtype, torch.float32)
        result[name] = torch.addmm(weight.to(kind), factors[linear + B].to(kind), factors[linear + A].to(kind), alpha=scale).to(
            weight.dtype
        )
    return result
