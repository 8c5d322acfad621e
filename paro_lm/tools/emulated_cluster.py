"""A cluster on one machine: nodes are network namespaces, joined by links whose rate is shaped.

A node is a namespace with one veth pair into a bridge that nothing else is connected to; `tc` shapes both directions of the
link (and, on request, the loopback of the node, which carries the traffic inside it). Needs Linux, root and iproute2. Latency
cannot be emulated this way, only rates.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PREFIX = "parolm"  # of namespaces, devices and the bridge: what carries it is ours, and only that is ever removed
BRIDGE = f"{PREFIX}br"
INTERFACE = "e0"
BURST, QUEUE = "128kb", "4mb"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended, and what it printed (both streams)."""

    rank: int
    returncode: int
    output: str


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """Bytes that a node put on its link and took from it since the cluster is up, headers included."""

    sent: int
    received: int


class EmulatedCluster:
    """`with EmulatedCluster(2, "500mbit") as cluster: cluster.run([sys.executable, "train.py"], ranks_per_node=2)`.

    Rates are in the words of tc ("500mbit", "2gbit"); "none" = unshaped. `local_rate` shapes the loopback inside each node.
    Whatever happens inside the `with`, the namespaces are gone after it; left-overs of a killed run go at the next start.
    One cluster per machine at a time: a second raises RuntimeError, as do missing rights and tools.
    """

    def __init__(self, nodes: int, rate: str, local_rate: str | None = None) -> None:
        if not 1 <= nodes <= 200:
            raise ValueError(f"an emulated cluster of {nodes} nodes: choose from 1 to 200.")
        self.nodes, self.rate, self.local_rate = nodes, rate, local_rate
        self._lock: IO[str] | None = None

    def __enter__(self) -> EmulatedCluster:
        require_tools()
        self._lock = _lock()
        try:
            self.up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            tear_down()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def up(self) -> None:
        """Make the namespaces; what an earlier run left behind is removed first."""
        tear_down()
        _call("ip", "link", "add", BRIDGE, "type", "bridge")
        _call("ip", "link", "set", BRIDGE, "up")
        for node in range(self.nodes):
            name, outside = _namespace(node), _outside(node)
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _call("ip", "link", "set", outside, "master", BRIDGE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            _call("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        self.set_rate(self.rate, self.local_rate)

    @classmethod
    def attach(cls) -> EmulatedCluster:
        """The cluster that `up` made earlier, for another process to use. Raises RuntimeError when there is none."""
        require_tools()
        nodes = len(_our_namespaces())
        if nodes == 0:
            raise RuntimeError("no emulated cluster is up: start one with `emulated_cluster up --nodes 2 --rate 500mbit`.")
        return cls(nodes, "none")

    def set_rate(self, rate: str, local_rate: str | None = None) -> None:
        """Shape all links anew; counters go on."""
        self.rate, self.local_rate = rate, local_rate
        for node in range(self.nodes):
            name = _namespace(node)
            _shape(("tc",), _outside(node), rate)
            _shape(("ip", "netns", "exec", name, "tc"), INTERFACE, rate)
            _shape(("ip", "netns", "exec", name, "tc"), "lo", local_rate or "none")

    def address(self, node: int) -> str:
        return f"10.77.0.{10 + node}"

    def link_bytes(self) -> list[LinkBytes]:
        """Counters of every node's link."""
        script = f"cd /sys/class/net/{INTERFACE}/statistics && cat tx_bytes rx_bytes"
        counters = [_call("ip", "netns", "exec", _namespace(node), "sh", "-c", script).split() for node in range(self.nodes)]
        return [LinkBytes(sent=int(sent), received=int(received)) for sent, received in counters]

    def environment(self, rank: int, ranks_per_node: int, port: int) -> dict[str, str]:
        """What torchrun would set for this rank, and the interface that Gloo shall use."""
        node, local = divmod(rank, ranks_per_node)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nodes * ranks_per_node),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        }

    def run(
        self,
        argv: Sequence[str],
        ranks_per_node: int,
        env: Mapping[str, str] | None = None,
        *,
        timeout: float = 600.0,
        check: bool = True,
        echo: bool = False,
    ) -> list[RankResult]:
        """Run a command once per rank, node by node, and wait for all; results in rank order.

        The first rank that fails ends all others; with `check` that (or passing `timeout` seconds) raises RuntimeError with
        the end of its output. `echo` shows the output of rank 0 as it comes.
        """
        port = random.randint(20000, 29999)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"rank{rank}") for rank in range(self.nodes * ranks_per_node)]
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, file in enumerate(files):
                    command = ["ip", "netns", "exec", _namespace(rank // ranks_per_node), *argv]
                    environment = {**os.environ, **self.environment(rank, ranks_per_node, port), **(env or {})}
                    with file.open("wb") as output:
                        stdout = None if echo and rank == 0 else output
                        processes.append(subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.STDOUT))
                failed = _wait(processes, timeout)
            finally:
                _end(processes)
            results = [
                RankResult(rank=rank, returncode=process.returncode, output=file.read_text(errors="replace"))
                for rank, (process, file) in enumerate(zip(processes, files, strict=True))
            ]
        if check and failed is not None:
            code = results[failed].returncode
            why = f"did not end within {timeout} s" if code < 0 else f"ended with {code}"
            raise RuntimeError(f"rank {failed} of {len(results)} {why}:\n{results[failed].output[-4000:]}")
        return results


def require_tools() -> None:
    """Raise RuntimeError with the remedy when this machine cannot have namespaces."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"the emulated cluster needs Linux network namespaces; this is {sys.platform}.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"the emulated cluster needs {' and '.join(missing)}: install iproute2 (apt-get install iproute2).")
    if os.geteuid() != 0:
        raise RuntimeError("the emulated cluster needs root to make network namespaces: run it with sudo.")


def tear_down() -> None:
    """Remove every namespace, link and process of an emulated cluster on this machine; nothing else."""
    for name in _our_namespaces():
        for pid in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    # Namespaces are deleted in the background; with its link gone first, the next `up` finds no name taken.
    for device in _our_links():
        subprocess.run(["ip", "link", "del", device], capture_output=True)
    for name in _our_namespaces():
        _call("ip", "netns", "del", name)
    deadline = time.monotonic() + 10
    while _our_links() and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """Wait for all; the rank that failed first, or that was still running at the time limit."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.02)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lock() -> IO[str]:
    """Hold the machine's one emulated cluster; released when the process ends, however it ends."""
    path = Path(tempfile.gettempdir(), f"{PREFIX}-emulated-cluster.lock")
    handle = path.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise RuntimeError(f"another emulated cluster is running on this machine (it holds {path}); wait until it ends.") from None
    return handle


def _namespace(node: int) -> str:
    return f"{PREFIX}-node{node}"


def _outside(node: int) -> str:
    return f"{PREFIX}v{node}"


def _our_namespaces() -> list[str]:
    names = [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{PREFIX}-node")]


def _our_links() -> list[str]:
    lines = _call("ip", "-o", "link", "show").splitlines()
    names = [line.split(": ")[1].split("@")[0] for line in lines]
    return [name for name in names if name.startswith(PREFIX)]


def _shape(tc: Sequence[str], device: str, rate: str) -> None:
    subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], capture_output=True)  # fails where nothing was shaped
    if rate != "none":
        _call(*tc, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "limit", QUEUE)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """up / run / rate / bytes / down, see --help. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="emulated_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("up", "make the nodes, until `down`"), ("rate", "shape the links of the running cluster anew")):
        command = commands.add_parser(name, help=text)
        _add_shape(command, nodes=name == "up")
    run = commands.add_parser("run", help="run a command on every rank, on the cluster that is up or, with --nodes, on one of its own")
    _add_shape(run, nodes=True)
    run.add_argument("--ranks", type=int, default=1, help="ranks per node (default 1)")
    run.add_argument("--timeout", type=float, default=3600.0, help="seconds (default 3600)")
    run.add_argument("argv", nargs=argparse.REMAINDER, help="-- the command")
    commands.add_parser("bytes", help="bytes over each link")
    commands.add_parser("down", help="remove everything")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a terminated run is torn down, too
    try:
        return _run_command(args)
    except (RuntimeError, ValueError) as error:
        print(f"emulated_cluster: {error}", file=sys.stderr)
        return 1


def _add_shape(parser: argparse.ArgumentParser, *, nodes: bool) -> None:
    if nodes:
        parser.add_argument("--nodes", type=int, default=None)
    parser.add_argument("--rate", default="500mbit", help='of each link, both directions; "none" = unshaped (default 500mbit)')
    parser.add_argument("--local-rate", default=None, help="of the loopback inside each node (default unshaped)")


def _run_command(args: argparse.Namespace) -> int:
    require_tools()
    if args.command == "up":
        with _lock():
            EmulatedCluster(args.nodes or 2, args.rate, args.local_rate).up()
    elif args.command == "down":
        with _lock():
            tear_down()
    elif args.command == "rate":
        EmulatedCluster.attach().set_rate(args.rate, args.local_rate)
    elif args.command == "bytes":
        for node, link in enumerate(EmulatedCluster.attach().link_bytes()):
            print(f"node {node}: sent {link.sent} received {link.received}")
    else:
        command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        if not command:
            raise ValueError("run needs a command: emulated_cluster run --nodes 2 --ranks 2 -- python -m paro_lm.train")
        with EmulatedCluster(args.nodes, args.rate, args.local_rate) if args.nodes else contextlib.nullcontext(None) as own:
            (own or EmulatedCluster.attach()).run(command, args.ranks, timeout=args.timeout, echo=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
