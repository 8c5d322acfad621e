#!/usr/bin/env python3
"""HO-Ring against a flat ring, the same hierarchy without overlap, and the backend's own, on an emulated cluster (root).

    scripts/bench_collectives.py --nodes 2 --ranks 2 --rate 500mbit --sizes 16 64
    scripts/bench_collectives.py --nodes 2 --ranks 4 --rate 500mbit --local-rate 2gbit --sizes 16
    scripts/bench_collectives.py --suite            # all of the above and 200 Mbit

The limit is (g-1)/g S over the rate that a plain TCP stream reaches in the same run, twice that for all-reduce. Variants are
interleaved; a ratio is the median over rounds with its bootstrap 95 % interval. Each run writes <out>/<cluster>.csv; table and
PNG cover all CSV files in <out>. Without root: `torchrun ... scripts/bench_collectives.py --worker FILE` on a real cluster.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.tools.emulated_cluster import EmulatedCluster

ALGORITHMS = ("native", "ring", "hierarchical", "ho_ring")
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
FIELDS = ("cluster", "nodes", "ranks", "rate", "operation", "mib", "algorithm", "round", "seconds", "link_bytes", "stream_bits_per_s")
STREAM_BYTES = 16 << 20
SUITE = (  # nodes, ranks, rate, local rate, MiB
    (2, 2, "500mbit", None, (16, 64)),
    (2, 4, "500mbit", None, (16, 64)),
    (2, 4, "500mbit", "2gbit", (16,)),
    (2, 2, "200mbit", None, (16, 64)),
)

Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--local-rate", default=None, help="of the loopback inside a node (default unshaped)")
    parser.add_argument("--sizes", type=float, nargs="+", default=[16, 64], help="MiB of the full tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--chunk-bytes", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_collectives"))
    parser.add_argument("--suite", action="store_true", help="every cluster of the published table")
    parser.add_argument("--summary", action="store_true", help="only table and PNG of what <out> holds")
    parser.add_argument("--worker", type=Path, default=None, metavar="CSV", help="measure as one rank of a running cluster")
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.summary:
        clusters = SUITE if args.suite else ((args.nodes, args.ranks, args.rate, args.local_rate, tuple(args.sizes)),)
        for cluster in clusters:
            launch(args, *cluster)
    rows = [row for file in sorted(args.out.glob("*.csv")) for row in csv.DictReader(file.open())]
    print(table(rows))
    plot(rows, args.out / "bench_collectives.png")
    return 0


def launch(args: argparse.Namespace, nodes: int, ranks: int, rate: str, local_rate: str | None, sizes: Sequence[float]) -> None:
    name = f"{nodes}x{ranks}-{rate}" + (f"-local-{local_rate}" if local_rate else "")
    command = [sys.executable, os.path.abspath(__file__), "--worker", str((args.out / f"{name}.csv").absolute())]
    command += ["--rate", rate, "--sizes", *map(str, sizes), "--rounds", str(args.rounds)]
    command += ["--algorithms", *args.algorithms, "--operations", *args.operations]
    if args.chunk_bytes:
        command += ["--chunk-bytes", str(args.chunk_bytes)]
    print(f"{name}: {args.rounds} rounds", flush=True)
    with EmulatedCluster(nodes, rate, local_rate) as cluster:
        cluster.run(command, ranks, timeout=1800, echo=True)


# One rank


def worker(args: argparse.Namespace) -> int:
    """Measure everything on this rank; rank 0 writes the CSV."""
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = ParallelMesh.build(world_size=dist.get_world_size(), rank=dist.get_rank(), group_size=local, device="cpu")
    grids = {name: GridCollectives(mesh, algorithm=name, chunk_bytes=args.chunk_bytes) for name in args.algorithms}
    rows: list[dict[str, object]] = []
    for mib in args.sizes:
        calls = prepare(mesh, grids, int(mib * (1 << 20)) // 4, args.operations)
        for round_ in range(args.rounds + 1):  # the first one warms up
            stream = plain_stream(mesh)
            order = sorted(calls)
            random.Random(round_).shuffle(order)
            for operation, algorithm in order:
                seconds, link_bytes = measure(calls[operation, algorithm])
                row = (args.worker.stem, mesh.size("dp_inter"), local, args.rate, operation, mib, algorithm, round_)
                if round_:
                    rows.append(dict(zip(FIELDS, (*row, seconds, link_bytes, stream), strict=True)))
    if mesh.rank == 0:
        with args.worker.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def prepare(
    mesh: ParallelMesh, grids: dict[str, GridCollectives], numel: int, operations: Iterable[str]
) -> dict[tuple[str, str], Callable[[], None]]:
    """The calls to measure, on buffers made once; every one is checked against known values first."""
    n = mesh.size(*DATA_AXES)
    numel -= numel % n
    full, shard = torch.zeros(numel), torch.zeros(numel // n)
    calls: dict[tuple[str, str], Callable[[], None]] = {}
    for name, grid in grids.items():
        own = grid.shard_index(DATA_AXES)
        calls["all_gather", name] = partial(grid.all_gather, full, shard, DATA_AXES)
        calls["reduce_scatter", name] = partial(grid.reduce_scatter, shard, full, DATA_AXES)
        calls["all_reduce", name] = partial(grid.all_reduce, full, DATA_AXES)
        for index in range(n):
            full[index * shard.numel() : (index + 1) * shard.numel()] = index + 1
        calls["reduce_scatter", name]()
        assert bool((shard == n * (own + 1)).all()), f"{name}: wrong sum"
        calls["all_gather", name]()
        assert all(bool((full.view(n, -1)[index] == n * (index + 1)).all()) for index in range(n)), f"{name}: wrong order"
        calls["all_reduce", name]()
        assert all(bool((full.view(n, -1)[index] == n * n * (index + 1)).all()) for index in range(n)), f"{name}: wrong sum"
    full.zero_()
    shard.zero_()
    return {key: call for key, call in calls.items() if key[0] in operations}


def measure(call: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the bytes over the busiest link."""
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    call()
    result = torch.tensor([time.perf_counter() - start, 0.0], dtype=torch.float64)
    dist.barrier()
    result[1] = sent_bytes() - before
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return float(result[0]), int(result[1])


def sent_bytes() -> int:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def plain_stream(mesh: ParallelMesh) -> float:
    """Payload bits per second of one TCP stream from the first node to the second."""
    first, second = 0, mesh.size("dp_intra")
    rate = torch.zeros(1, dtype=torch.float64)
    port = torch.zeros(1, dtype=torch.int64)
    server = None
    if mesh.rank == second:
        server = socket.create_server(("", 0))
        port[0] = server.getsockname()[1]
    dist.broadcast(port, src=second)
    address = [node_address() if mesh.rank == second else None]
    dist.broadcast_object_list(address, src=second)
    if mesh.rank == first:
        data = bytearray(STREAM_BYTES)
        with socket.create_connection((str(address[0]), int(port))) as connection:
            start = time.perf_counter()
            connection.sendall(data)
            connection.recv(1)
            rate[0] = STREAM_BYTES * 8 / (time.perf_counter() - start)
    elif server is not None:
        with server, server.accept()[0] as connection:
            buffer, received = bytearray(1 << 20), 0
            while received < STREAM_BYTES:
                received += connection.recv_into(buffer)
            connection.sendall(b"1")
    dist.broadcast(rate, src=first)
    return float(rate)


def node_address() -> str:
    """This node's address as its peers see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


# The summary


def interval(values: Sequence[float], draws: int = 1000) -> tuple[float, float, float]:
    """Median with its bootstrap 95 % interval."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def pairs(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, dict[str, Row]]]:
    """(cluster, operation, MiB) -> algorithm -> round -> row."""
    result: dict[tuple[str, str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        result.setdefault((row["cluster"], row["operation"], row["mib"]), {}).setdefault(row["algorithm"], {})[row["round"]] = row
    return result


def limit_bytes(row: Row) -> float:
    """The least that each link must carry."""
    nodes, total = int(row["nodes"]), float(row["mib"]) * (1 << 20)
    return (2 if row["operation"] == "all_reduce" else 1) * (nodes - 1) / nodes * total


def limit_fraction(row: Row) -> float:
    """Share of the speed that the link alone would allow."""
    return limit_bytes(row) * 8 / float(row["stream_bits_per_s"]) / float(row["seconds"])


def table(rows: Iterable[Row]) -> str:
    """One line per cluster, operation, size and algorithm, in Markdown."""
    lines = [
        "| cluster | operation | MiB | algorithm | ms | of the limit | link bytes / minimum | x of HO-Ring's time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (cluster, operation, mib), algorithms in pairs(rows).items():
        for name, rounds in algorithms.items():
            milliseconds = statistics.median(float(row["seconds"]) for row in rounds.values()) * 1e3
            share, low, high = interval([limit_fraction(row) for row in rounds.values()])
            carried = statistics.median(float(row["link_bytes"]) / limit_bytes(row) for row in rounds.values())
            ratio = ""
            if name != "ho_ring" and "ho_ring" in algorithms:
                times = [float(row["seconds"]) / float(algorithms["ho_ring"][at]["seconds"]) for at, row in rounds.items()]
                ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*interval(times))
            cells = (cluster, operation, f"{float(mib):g}", name, f"{milliseconds:.1f}", f"{share:.3f} [{low:.3f}, {high:.3f}]")
            lines.append(f"| {' | '.join(cells)} | {carried:.3f} | {ratio} |")
    return "\n".join(lines)


def plot(rows: Iterable[Row], path: Path) -> None:
    """Share of the limit, one panel per operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = pairs(rows)
    figure, panels = pyplot.subplots(len(OPERATIONS), 1, figsize=(10, 9), sharex=True, squeeze=False)
    for panel, operation in zip(panels[:, 0], OPERATIONS, strict=True):
        shown = [(key, value) for key, value in groups.items() if key[1] == operation]
        for at, name in enumerate(ALGORITHMS):
            heights = [
                statistics.median(limit_fraction(row) for row in value[name].values()) if name in value else 0.0 for _, value in shown
            ]
            panel.bar([index + 0.2 * at for index in range(len(shown))], heights, 0.2, label=name)
        panel.set_xticks([index + 0.3 for index in range(len(shown))], [f"{key[0]}\n{float(key[2]):g} MiB" for key, _ in shown], fontsize=7)
        panel.axhline(1.0, color="black", linewidth=0.5)
        panel.set_ylabel(f"{operation}\nshare of the limit")
    panels[0, 0].legend(ncol=len(ALGORITHMS), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
