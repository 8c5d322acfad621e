#!/usr/bin/env python3
"""FSDP2 that gathers and reduces by HO-Ring: `torchrun --nproc-per-node 4 scripts/examples/fsdp2_ho_ring.py --group-size 2`."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paro_lm.config import RuntimeConfig
from paro_lm.distributed import initialize, shutdown
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.collectives.adapters import use_ho_ring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group-size", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), help="ranks of one node")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    world = initialize(RuntimeConfig())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)).to(world.device)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)

    ledger = ByteLedger()
    use_ho_ring(model, group_size=args.group_size, device=world.device, algorithm="auto", ledger=ledger)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    for step in range(args.steps):
        ledger.reset()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if world.rank == 0:
            print(f"step {step} loss {loss.item() / world.world_size:.4f} bytes sent by rank 0 {ledger.by_axis()}")
    shutdown(world)


if __name__ == "__main__":
    main()
