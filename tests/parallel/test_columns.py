"""Column-parallel linears entered together: values of their gradients, and when the sum of the input's gradient is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paro_lm.config import ModelConfig
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.columns import column_linears
from paro_lm.parallel.tensor import ColumnParallelLinear, Pending, TensorParallel

WIDTHS = (12, 4, 6)


class Adapter(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.b = torch.nn.Parameter(torch.randn(rows, 5, dtype=torch.float64))

    def forward(self, x: Tensor, dropout: Any) -> Tensor:
        return F.linear(x, self.b)


class Watched(TensorParallel):
    """One rank that believes to be one of two: sums are what it has, launches and waits are told to `events`."""

    def start_all_reduce(self, x: Tensor, *args: Any, beside: bool = True) -> Pending:
        return self._launched(x, beside)

    def start_reduce_scatter(self, x: Tensor, dim: int, *, beside: bool = True) -> Pending:
        return self._launched(x.narrow(dim, 0, x.shape[dim] // 2), beside)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x, 3 * x], dim=dim)

    def _launched(self, output: Tensor, beside: bool) -> Pending:
        if not beside:
            return Pending(output, output, None)
        self.events: list[Any]
        self.events.append("launch")
        events = self.events

        class Work:
            def wait(self) -> None:
                events.append("wait")

        return Pending(output, output, Work())


class Products(TorchDispatchMode):
    """Tells `events` the shape of the result of every matrix product."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.events.append(tuple(result.shape))
        return result


def linears(tensor: TensorParallel, *, adapters: bool) -> list[ColumnParallelLinear]:
    torch.manual_seed(3)
    result = [ColumnParallelLinear(5, 2 * width, bias=width != 4, std=1.0, tensor=tensor).double() for width in WIDTHS]
    for linear in result:
        for parameter in linear.parameters():
            torch.nn.init.normal_(parameter)
        if adapters:
            linear.lora = Adapter(len(linear.weight))
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_sum_runs_beside_the_weight_gradients(sequence_parallel: bool) -> None:
    tensor = Watched(group=None, rank=0, size=2, sequence_parallel=sequence_parallel)
    events = tensor.events = []
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    outputs = column_linears(x, linears(tensor, adapters=False))
    assert events == []
    with Products(events):
        torch.cat(outputs, dim=-1).square().sum().backward()
    tokens = 16 if sequence_parallel else 8
    of_input, of_weights = [(tokens, 5)] * len(WIDTHS), [(width, 5) for width in WIDTHS]
    assert events == [*of_input, "launch", *of_weights, "wait"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "weights", "input"])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_are_those_of_single_linears(sequence_parallel: bool, frozen: str, adapters: bool) -> None:
    """Every parameter's and the input's, 1e-12, also where one output is not used; what is frozen has none and costs no sum. Bitwise
    the same whether the sum runs beside or before the weight gradients.
    """
    results = []
    for options in ({}, {"overlap": False}, {"split_backward": True}):
        tensor = Watched(group=None, rank=0, size=2, sequence_parallel=sequence_parallel, **options)
        tensor.events = []
        group = linears(tensor, adapters=adapters)
        for linear in group:
            if frozen == "weights":
                linear.weight.requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator).requires_grad_(frozen != "input")
        outputs = column_linears(x, group)
        (outputs[0].square().sum() + outputs[2].sin().sum()).backward()
        assert tensor.events.count("launch") == (frozen != "input" and not options)
        named = {f"{i}.{name}": parameter.grad for i, linear in enumerate(group) for name, parameter in linear.named_parameters()}
        results.append({"x": x.grad, **named})
        assert (x.grad is None) == (frozen == "input")
        assert all(named[f"{i}.weight"] is None for i in range(3)) == (frozen == "weights")
    for name, want in results[2].items():
        got, waited = results[0][name], results[1][name]
        assert (got is None) == (waited is None) == (want is None), name
        if want is not None:
            assert torch.equal(got, waited), name
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)


def test_one_process_pays_nothing() -> None:
    """Without tensor parallelism the graph is that of plain linears."""
    linear = ColumnParallelLinear(5, 3, bias=True, std=1.0)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 5, requires_grad=True)
    (y,) = column_linears(x, [linear])
    assert torch.equal(y, F.linear(x, linear.weight, linear.bias))
    assert type(y.grad_fn) is type(F.linear(x, linear.weight, linear.bias).grad_fn)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_compiled_blocks_agree(sequence_parallel: bool, split: bool) -> None:
    """Loss and gradients to 1e-12; collectives break the graph and run as they do without compilation."""
    cfg = ModelConfig(hidden_size=12, num_layers=1, num_heads=2, num_kv_heads=2, ffn_size=8, vocab_divisor=2)
    tokens = torch.randint(0, 10, (2, 4), generator=torch.Generator().manual_seed(1))
    results = []
    for compiled in (False, True):
        tensor = Watched(group=None, rank=0, size=2, sequence_parallel=sequence_parallel, split_backward=split)
        tensor.events = []
        model = Transformer(cfg, vocab_size=10, tensor=tensor).double().initialize(3)
        if compiled:
            block = model.layers["0"]
            block.forward = torch.compile(block.forward, backend="eager")
        loss = model(tokens, labels=tokens)
        loss.backward()
        results.append(([loss.detach(), *(parameter.grad for parameter in model.parameters())], tensor.events))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-12)
    assert results[1][1] == results[0][1]
