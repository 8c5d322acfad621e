"""Dropout whose masks are a function of an explicit seed: they repeat in recomputation and do not depend on what ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paro_lm.model.spec import derive_seed
from paro_lm.parallel.tensor import TensorParallel


def dropout_seed(seed: int, *, step: int, micro_batch: int, data_rank: int) -> int:
    """The seed of one micro-batch of one data rank, for `Transformer.set_dropout_seed`."""
    return derive_seed("dropout", seed, step, micro_batch, data_rank)


@dataclass(frozen=True, kw_only=True)
class DropoutState:
    """The dropout of one forward: probability (`adapters`: in front of LoRA's) and seed. None instead of it means no dropout."""

    probability: float
    seed: int
    adapters: float = 0.0


@torch.compiler.disable
def dropout(x: Tensor, state: DropoutState | None, region: str, tensor: TensorParallel | None) -> Tensor:
    """Dropout on the residual stream; over tp the masks are equal where `x` is replicated and differ over sequence shards."""
    if state is None or state.probability == 0.0:
        return x
    shard = tensor.rank if tensor is not None and tensor.sequence_parallel else 0
    generator = torch.Generator(x.device).manual_seed(derive_seed(state.seed, region, shard))
    keep = 1.0 - state.probability
    mask = torch.empty_like(x, requires_grad=False).bernoulli_(keep, generator=generator)
    return x * mask.div_(keep)


@contextmanager
def seeded(state: DropoutState, region: str, tensor: TensorParallel | None, device: torch.device) -> Iterator[None]:
    """A fork of the default generator of `device` for kernels that take no generator; differs over tp ranks (sliced heads)."""
    seed = derive_seed(state.seed, region, 0 if tensor is None else tensor.rank)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield
