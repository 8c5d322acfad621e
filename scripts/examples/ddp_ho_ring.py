#!/usr/bin/env python3
"""DDP whose gradients are averaged by HO-Ring: `torchrun --nproc-per-node 4 scripts/examples/ddp_ho_ring.py --group-size 2`."""

import argparse
import os

import torch
import torch.distributed as dist

from paro_lm.config import RuntimeConfig
from paro_lm.distributed import initialize, shutdown
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.collectives.adapters import HoRingState, grid_of_world, ho_ring_hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group-size", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), help="ranks of one node")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    world = initialize(RuntimeConfig())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)).to(world.device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)

    ledger = ByteLedger()
    state = HoRingState(grid_of_world(group_size=args.group_size, device=world.device, algorithm="auto", ledger=ledger))
    ddp.register_comm_hook(state, ho_ring_hook)

    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    for step in range(args.steps):
        ledger.reset()
        loss = (ddp(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if world.rank == 0:
            print(f"step {step} loss {loss.item() / world.world_size:.4f} bytes sent by rank 0 {ledger.by_axis()}")
    state.close()
    shutdown(world)


if __name__ == "__main__":
    main()
