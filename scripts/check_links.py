#!/usr/bin/env python3
"""Bytes that the links of an emulated cluster carry, against what the engine's ledger says it sent between groups (root).

    scripts/check_links.py                          # 2 nodes x 2 ranks, NNN III IIG NIG GGG

Per cell and node: bytes that left over the node's link during training steps, bytes that the ledgers of its ranks count on dp_inter,
their ratio. What the link carries beyond the ledger are headers, acknowledgements and the few numbers that a step agrees on.
Exit code 1 when a ratio is off by more than the tolerance.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bench_collectives import sent_bytes
from bench_throughput import VOCAB, ours

from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.tools.emulated_cluster import EmulatedCluster

CELLS = ("NNN", "III", "IIG", "NIG", "GGG")
FIELDS = ("cell", "node", "link_bytes", "ledger_bytes", "ratio")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--collectives", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path("outputs/check_links.csv"))
    parser.add_argument("--worker", action="store_true", help="measure as one rank of a running cluster")
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--worker", "--out", str(args.out.absolute()), "--steps", str(args.steps)]
    command += ["--collectives", args.collectives, "--cells", *args.cells]
    with EmulatedCluster(args.nodes, args.rate) as cluster:
        cluster.run(command, args.ranks, timeout=900)
    with args.out.open() as file:
        rows = list(csv.DictReader(file))
    print("| cell | node | link MiB | ledger MiB | ratio |\n|---|---|---|---|---|")
    for row in rows:
        link, ledger = (int(row[key]) / (1 << 20) for key in ("link_bytes", "ledger_bytes"))
        print(f"| {row['cell']} | {row['node']} | {link:.2f} | {ledger:.2f} | {float(row['ratio']):.4f} |")
    off = [f"{row['cell']} on node {row['node']}" for row in rows if abs(float(row["ratio"]) - 1) > args.tolerance]
    print(f"off by more than {args.tolerance:.0%}: {', '.join(off)}" if off else f"all within {args.tolerance:.0%}")
    return 1 if off else 0


def worker(args: argparse.Namespace) -> int:
    """Train in every cell on this rank; rank 0 writes the CSV."""
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = ParallelMesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), group_size=local)
    shape = argparse.Namespace(hidden=256, layers=4, collectives=args.collectives)
    data = torch.randint(0, VOCAB, (2, 1, 33), generator=torch.Generator().manual_seed(mesh.rank))
    rows = []
    for cell in args.cells:
        ledger = ByteLedger()
        variant = ours(cell, mesh, data, shape, ledger)
        variant.step()
        mesh.sum(1)
        ledger.reset()
        before = sent_bytes()
        mesh.sum(1)
        for _ in range(args.steps):
            variant.step()
        mesh.sum(1)
        sent = mesh.sum(ledger.by_axis().get("dp_inter", 0), ("dp_intra",))
        measured = torch.tensor([float(sent_bytes() - before), float(sent)], dtype=torch.float64)
        everybody = [torch.empty_like(measured) for _ in range(mesh.world_size)]
        dist.all_gather(everybody, measured)
        for node, (link, counted) in enumerate(pair.tolist() for pair in everybody[::local]):
            rows.append(dict(zip(FIELDS, (cell, node, int(link), int(counted), link / max(counted, 1)), strict=True)))
    if mesh.rank == 0:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
