"""Tensor parallelism: the group, the autograd regions at its borders, and linear and embedding layers that hold a slice.

Activations are [batch, sequence, hidden]; under sequence parallelism dim 1 is split over the tensor-parallel ranks outside of
attention and MLP. Everything takes `tensor: TensorParallel | None`; None is one process and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from paro_lm.model.spec import NO_AXES, TP_AXES, ParameterSpec, SpecifiedModule
from paro_lm.parallel.collectives.native import gather_single, reduce_scatter_single
from paro_lm.parallel.tensor_groups import GroupedCollectives


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending(NamedTuple):
    """A collective under way. Its `output` may be read after `wait`; `source` is what it reads until then."""

    output: Tensor
    source: Tensor
    work: Waitable | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.output


@dataclass(kw_only=True)
class TensorParallel:
    """The ranks that share one model: `group` of `size` ranks, of which this is `rank`.

    `record(operation, num_bytes)` is told of every collective with the bytes that one rank sends in a ring: (size-1)/size of the
    full tensor for all_gather and reduce_scatter, twice that for all_reduce. With `grouped`, gathers and sums go through it, and it
    records them; maxima stay with the backend. With `overlap` the sum of an input's gradient runs beside the weight gradients;
    `split_backward` says that these are computed in passes of their own.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool = False
    record: Callable[[str, int], None] | None = None
    overlap: bool = True
    split_backward: bool = False
    grouped: GroupedCollectives | None = None

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or `op`) over ranks; `x` is consumed."""
        return self.start_all_reduce(x, op, beside=False).wait()

    def start_all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, beside: bool = True) -> Pending:
        """`all_reduce`, launched; with `beside` it runs while the caller computes. Wait before any other collective."""
        with record_function("tp/all_reduce"):
            x = x.contiguous()
            if self.grouped is not None and op == dist.ReduceOp.SUM:
                return Pending(x, x, self.grouped.all_reduce(x, beside=beside))
            self._count("all_reduce", 2 * x.nbytes)
            return Pending(x, x, dist.all_reduce(x, op=op, group=self.group, async_op=beside))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' shards, concatenated along `dim`."""
        with record_function("tp/all_gather"):
            output = x.new_empty(self.size * x.shape[0], *x.shape[1:])
            if self.grouped is not None:
                self.grouped.all_gather(output, x.contiguous())
            else:
                self._count("all_gather", x.nbytes * self.size)
                gather_single()(output, x.contiguous(), group=self.group)
            if dim % x.dim() == 0 and self._in_rank_order:
                return output
            chunks = output.chunk(self.size)
            return torch.cat(chunks if self._in_rank_order else [chunks[chunk] for chunk in self.grouped.order], dim=dim)  # type: ignore[union-attr]

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard along `dim` of the sum over ranks."""
        return self.start_reduce_scatter(x, dim, beside=False).wait()

    def start_reduce_scatter(self, x: Tensor, dim: int, *, beside: bool = True) -> Pending:
        """`reduce_scatter`, launched, as `start_all_reduce`."""
        with record_function("tp/reduce_scatter"):
            if dim % x.dim() != 0 or self.grouped is not None:  # a copy, which the grouped collectives may overwrite
                chunks = x.chunk(self.size, dim=dim)
                x = torch.cat(chunks if self._in_rank_order else [chunks[rank] for rank in self.grouped.ranks])  # type: ignore[union-attr]
            x = x.contiguous()
            output = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
            if self.grouped is not None:
                return Pending(output, x, self.grouped.reduce_scatter(output, x, beside=beside))
            self._count("reduce_scatter", x.nbytes)
            return Pending(output, x, reduce_scatter_single()(output, x, group=self.group, async_op=beside))

    @property
    def _in_rank_order(self) -> bool:
        return self.grouped is None or self.grouped.in_rank_order

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a replicated tensor, a view."""
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * length, length)

    def check_sequence(self, length: int) -> None:
        """Refuse a sequence that cannot be split."""
        if self.sequence_parallel and length % self.size:
            raise ValueError(
                f"parallel.sequence_parallel splits the sequence over tp={self.size} ranks, got {length} tokens; "
                f"use a multiple of {self.size} or parallel.sequence_parallel=false"
            )

    @contextmanager
    def no_sequence_parallel(self) -> Iterator[None]:
        """Run without sequence parallelism, for generation one token at a time; gradients must not be taken inside."""
        previous, self.sequence_parallel = self.sequence_parallel, False
        try:
            yield
        finally:
            self.sequence_parallel = previous

    def _count(self, operation: str, num_bytes: int) -> None:
        if self.record is not None:
            self.record(operation, num_bytes * (self.size - 1) // self.size)


class _Copy(torch.autograd.Function):
    """Replicated -> into sliced weights: identity forward, sum of the partial gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.all_reduce(grad.clone()), None


class _Reduce(torch.autograd.Function):
    """Partial sums -> replicated: sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        return tensor.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    """Sequence shards -> full sequence into sliced weights; backward sums partial gradients and keeps the own shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return tensor.all_gather(x, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.reduce_scatter(grad, dim=1), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Partial sums of the full sequence -> own sequence shard of the sum; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return tensor.reduce_scatter(x, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.all_gather(grad, dim=1), None


class _GatherColumns(torch.autograd.Function):
    """Slices of the last dim -> full, replicated; backward keeps the own slice of a gradient that is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return tensor.all_gather(x, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tensor.shard(grad, -1).contiguous(), None


def enter_region(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    """From the residual stream into column-parallel layers: full sequence, gradients summed over ranks."""
    if tensor is None:
        return x
    return _apply(_GatherSequence if tensor.sequence_parallel else _Copy, x, tensor)


def leave_region(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    """From row-parallel layers back to the residual stream: partial outputs summed, the own sequence shard kept."""
    if tensor is None:
        return x
    return _apply(_ReduceScatterSequence if tensor.sequence_parallel else _Reduce, x, tensor)


@torch.compiler.disable
def _apply(region: type[torch.autograd.Function], x: Tensor, tensor: TensorParallel) -> Tensor:
    """Collectives and what counts them stay out of compiled graphs."""
    return region.apply(x, tensor)


def gather_columns(x: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Column slices (of logits) to the full last dim on every rank."""
    return x if tensor is None else _GatherColumns.apply(x, tensor)


def residual_axes(tensor: TensorParallel | None) -> tuple[frozenset[str], frozenset[str]]:
    """(partial_axes, replicated_axes) of a parameter that acts on the residual stream on every tensor-parallel rank."""
    if tensor is None:
        return NO_AXES, NO_AXES
    return (TP_AXES if tensor.sequence_parallel else NO_AXES), TP_AXES


def _slice_spec(shape: tuple[int, ...], dim: int, tensor: TensorParallel | None, **fields: Any) -> ParameterSpec:
    offset, local = [0] * len(shape), list(shape)
    if tensor is not None:
        local[dim] //= tensor.size
        offset[dim] = tensor.rank * local[dim]
    return ParameterSpec(shape=shape, offset=tuple(offset), local_shape=tuple(local), **fields)


class ColumnParallelLinear(SpecifiedModule):
    """y = x W^T + b with the rows of W (output features) sliced over ranks; input from `enter_region`, output sliced.

    `num_blocks` says how many blocks (kv heads, say) the output consists of. With fewer blocks than ranks, every rank holds all of W
    and computes the one block it needs: gradients are partial over tp.
    """

    lora: nn.Module | None  # an adapter of the same input and output slices, called as lora(x, dropout)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        tensor: TensorParallel | None = None,
        num_blocks: int | None = None,
        valid_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.std, self.tensor, self.valid_rows = (out_features, in_features), std, tensor, valid_rows
        size = 1 if tensor is None else tensor.size
        blocks = out_features if num_blocks is None else num_blocks
        if blocks % size and (num_blocks is None or size % blocks):
            raise ValueError(
                f"{blocks} output blocks can be neither sliced over tp={size} ranks nor shared by them evenly; change parallel.tp"
            )
        self.rows: slice | None = None
        if tensor is not None and blocks < size:
            width, block = out_features // blocks, tensor.rank * blocks // size
            self.rows = slice(block * width, (block + 1) * width)
        local = out_features if self.rows is not None else out_features // size
        self.weight = nn.Parameter(torch.empty(local, in_features))
        self.bias = nn.Parameter(torch.empty(local)) if bias else None
        self.register_module("lora", None)

    def forward(self, x: Tensor, dropout: Any = None) -> Tensor:
        """`dropout` is for the adapter, where there is one."""
        y = F.linear(x, *self.used())
        return y if self.lora is None else y + self.lora(x, dropout)

    def used(self) -> tuple[Tensor, Tensor | None]:
        """The rows of weight and bias that this rank computes with."""
        if self.rows is None:
            return self.weight, self.bias
        return self.weight[self.rows], None if self.bias is None else self.bias[self.rows]

    def specs(self) -> dict[str, ParameterSpec]:
        shared: dict[str, Any] = {"partial_axes": TP_AXES, "replicated_axes": TP_AXES} if self.rows is not None else {}
        tensor = None if self.rows is not None else self.tensor
        specs = {"weight": _slice_spec(self.shape, 0, tensor, std=self.std, valid_rows=self.valid_rows, **shared)}
        if self.bias is not None:
            specs["bias"] = _slice_spec(self.shape[:1], 0, tensor, init="zeros", decay=False, **shared)
        return specs


class RowParallelLinear(SpecifiedModule):
    """y = sum over ranks of x W^T, plus b, with the columns of W (input features) sliced over ranks; leaves the region."""

    lora: nn.Module | None  # its output is a partial sum too

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.shape, self.std, self.tensor = (out_features, in_features), std, tensor
        size = 1 if tensor is None else tensor.size
        if in_features % size:
            raise ValueError(f"{in_features} input features cannot be sliced over tp={size} ranks; change parallel.tp")
        self.weight = nn.Parameter(torch.empty(out_features, in_features // size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_module("lora", None)

    def forward(self, x: Tensor, dropout: Any = None) -> Tensor:
        """`dropout` is for the adapter, where there is one."""
        y = F.linear(x, self.weight, self.bias if self.tensor is None else None)
        if self.lora is not None:
            y = y + self.lora(x, dropout)
        if self.tensor is None:
            return y
        y = leave_region(y, self.tensor)
        return y if self.bias is None else y + self.bias

    def specs(self) -> dict[str, ParameterSpec]:
        specs = {"weight": _slice_spec(self.shape, 1, self.tensor, std=self.std)}
        if self.bias is not None:
            partial, replicated = residual_axes(self.tensor)
            specs["bias"] = _slice_spec(
                self.shape[:1], 0, None, init="zeros", decay=False, partial_axes=partial, replicated_axes=replicated
            )
        return specs


class VocabParallelEmbedding(SpecifiedModule):
    """Rows of the (padded) vocabulary sliced over ranks; the output lies on the residual stream."""

    def __init__(self, vocab_size: int, padded_size: int, hidden_size: int, *, std: float, tensor: TensorParallel | None = None) -> None:
        super().__init__()
        self.shape, self.vocab_size, self.std, self.tensor = (padded_size, hidden_size), vocab_size, std, tensor
        size = 1 if tensor is None else tensor.size
        if padded_size % size:
            raise ValueError(f"a padded vocabulary of {padded_size} rows cannot be sliced over tp={size} ranks; change model.vocab_divisor")
        self.weight = nn.Parameter(torch.empty(padded_size // size, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tensor is None:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.tensor.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_region(found, self.tensor)

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": _slice_spec(self.shape, 0, self.tensor, std=self.std, valid_rows=self.vocab_size)}
