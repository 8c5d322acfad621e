"""Five cells are what PyTorch's own data parallelism does: the same losses and weights as FSDP2, HSDP and DDP, float64, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.mesh import AXES, ParallelMesh
from paro_lm.parallel.sharding import Cell
from paro_lm.testing import run_distributed
from tests.parallel.test_engine import OPTIM, Toy, batches, build, make_grids, train, whole

STEPS, ACCUMULATION = 4, 3


def shard(model: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> nn.Module:
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return model


def peers(world_size: int, group_size: int) -> dict[str, Callable[[Toy], nn.Module]]:
    """What each cell is called elsewhere: FSDP keeps what a cell replicates in whole, at the cost the cell's letters say."""
    flat = DeviceMesh("cpu", torch.arange(world_size), mesh_dim_names=("shard",))
    grid = DeviceMesh("cpu", torch.arange(world_size).view(-1, group_size), mesh_dim_names=("replicate", "shard"))
    return {
        "GGG": lambda model: shard(model, flat, reshard=True),
        "NGG": lambda model: shard(model, flat, reshard=False),
        "III": lambda model: shard(model, grid, reshard=True),
        "NII": lambda model: shard(model, grid, reshard=False),
        "NNN": DistributedDataParallel,
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def peer_steps(model: nn.Module, data: torch.Tensor, rank: int, world_size: int, mesh: ParallelMesh) -> tuple[list[float], dict]:
    """The same loop with a peer: means over ranks instead of sums, so the loss of a rank is multiplied by their number."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    decays = {True: [p for p in named.values() if p.ndim > 1], False: [p for p in named.values() if p.ndim <= 1]}
    adam = torch.optim.AdamW(
        [{"params": decays[True], "weight_decay": OPTIM.weight_decay}, {"params": decays[False], "weight_decay": 0.0}],
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
        foreach=False,
    )
    losses = []
    for samples in data:
        total = 0.0
        for sample in samples[rank::world_size]:
            loss = model(sample) * world_size / (samples.shape[0] * 5)
            loss.backward()
            total += loss.item() / world_size
        norm = torch.stack([full(p.grad).norm() for p in named.values()]).norm().item()
        for p in named.values():
            p.grad.mul_(min(1.0, OPTIM.max_norm / norm))
        adam.step()
        adam.zero_grad()
        losses.append(mesh.sum(total, AXES))
    return losses, {name: full(p).detach().clone() for name, p in named.items()}


def _compare(rank: int, world_size: int, data: torch.Tensor) -> int:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    grids = make_grids(mesh)
    compared = 0
    for letters, wrap in peers(world_size, 2).items():
        theirs = peer_steps(wrap(Toy()), data, rank, world_size, mesh)
        engine = build(Toy(), mesh, grids, Cell.parse(letters))
        losses = train(engine, AdamW(engine, OPTIM, decays=lambda name: name.endswith("weight")), data, ACCUMULATION)
        torch.testing.assert_close(losses, theirs[0], rtol=0, atol=1e-12, msg=lambda m, c=letters: f"{c}: {m}")
        ours = whole(engine)
        assert ours.keys() == theirs[1].keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[1][name], rtol=0, atol=1e-12, msg=lambda m, c=letters, n=name: f"{c} {n}: {m}")
            compared += 1
        engine.close()
    return compared


def test_cells_equal_fsdp_hsdp_and_ddp() -> None:
    assert run_distributed(_compare, 4, batches(steps=STEPS, samples=4 * ACCUMULATION)) == [5 * 17] * 4
