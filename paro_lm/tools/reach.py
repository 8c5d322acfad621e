"""Which address a rank offers to others, and who can connect to whom: plain TCP, before any backend hides the reason of a failure."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

SIOCGIFADDR = 0x8915
MOST = 64
"""Ranks up to which every rank tries every other; beyond, those at distances that are powers of two."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where one rank can be reached: its host and node, the interface its backend uses, that interface's address, an open port."""

    rank: int
    host: str
    node: int
    variable: str
    interface: str
    address: str
    port: int
    others: dict[str, str]
    """All interfaces of the host that have an address."""

    def __str__(self) -> str:
        return f"rank {self.rank}: host {self.host}, node {self.node}, interface {self.interface}, address {self.address}"


def interfaces() -> dict[str, str]:
    """IPv4 address of every interface that has one."""
    result = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            result[name] = socket.inet_ntoa(answer[20:24])
    return result


def address_towards(host: str, port: int) -> str:
    """This host's address as `host` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])


def chosen(backend: str, known: dict[str, str], master: tuple[str, int]) -> tuple[str, str]:
    """(interface, address) that the backend offers to other ranks: the one in its variable, else what the backend picks by itself.

    Gloo takes the address of the host's name; NCCL an interface that is not the loopback, usually the one that leads to the master.
    Raises ValueError when the variable names an interface that is not there.
    """
    variable = variable_of(backend)
    wanted = os.environ.get(variable, "").split(",")[0].lstrip("=^")
    if wanted and not os.environ[variable].startswith("^"):
        match = next((name for name in known if name == wanted), None)
        if match is None and backend == "nccl":  # NCCL takes prefixes
            match = next((name for name in known if name.startswith(wanted)), None)
        if match is None:
            have = ", ".join(f"{name} ({address})" for name, address in known.items())
            raise ValueError(f"{variable}={wanted}: {socket.gethostname()} has no such interface with an address; it has {have}.")
        return match, known[match]
    try:
        address = socket.gethostbyname(socket.gethostname()) if backend == "gloo" else address_towards(*master)
    except OSError:
        address = "127.0.0.1"
    return next((name for name, at in known.items() if at == address), "lo" if address.startswith("127.") else "unknown"), address


def variable_of(backend: str) -> str:
    """The environment variable that names the interface for a backend."""
    return "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"


class Listener:
    """Accepts connections at an address and forgets them, until closed."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=256)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._server.close()


def exchange(store: dist.Store, key: str, rank: int, world_size: int, value: object) -> list[object]:
    """Everybody's value, in rank order, through the store alone (json)."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(text) for text in store.multi_get([f"{key}/{other}" for other in range(world_size)])]


def publish(store: dist.Store, world_size: int, own: Endpoint) -> list[Endpoint]:
    """All ranks' endpoints."""
    return [Endpoint(**value) for value in exchange(store, "endpoint", own.rank, world_size, asdict(own))]  # type: ignore[arg-type]


def try_peers(
    endpoints: Sequence[Endpoint], rank: int, timeout: float, connect: Callable[..., socket.socket] | None = None
) -> dict[int, str]:
    """{peer: why} of the peers that this rank cannot connect to."""
    connect = connect or socket.create_connection
    failed = {}
    for peer in peers_of(rank, len(endpoints)):
        try:
            connect((endpoints[peer].address, endpoints[peer].port), timeout=timeout).close()
        except OSError as error:
            failed[peer] = error.strerror or str(error)
    return failed


def peers_of(rank: int, world_size: int) -> list[int]:
    """Whom this rank tries; together all hosts are tried from several others."""
    if world_size <= MOST:
        return [peer for peer in range(world_size) if peer != rank]
    return [(rank + (1 << k)) % world_size for k in range(world_size.bit_length() - 1)]


def explain(endpoints: Sequence[Endpoint], failures: Sequence[dict[int, str]], backend: str, master: str) -> list[str]:
    """Sentences about who cannot reach whom, and which variable to set to what. Empty when all is well."""
    by_target: dict[int, list[int]] = {}
    for rank, failed in enumerate(failures):
        for peer in failed:
            by_target.setdefault(peer, []).append(rank)
    lines = []
    for peer, sources in sorted(by_target.items()):
        why = ", ".join(sorted({failures[source][peer] for source in sources}))
        lines.append(f"ranks {', '.join(map(str, sources))} cannot reach {endpoints[peer]}: {why}")
    return lines + remedies([endpoints[peer] for peer in sorted(by_target)], backend, master) if lines else []


def remedies(unreachable: Sequence[Endpoint], backend: str, master: str) -> list[str]:
    """What to set on the hosts that others wait for."""
    variable = variable_of(backend)
    lines = []
    for node in sorted({endpoint.node for endpoint in unreachable}):
        endpoint = next(item for item in unreachable if item.node == node)
        usable = [f"{name} ({at})" for name, at in endpoint.others.items() if not at.startswith("127.") and name != endpoint.interface]
        instead = f": it also has {', '.join(usable)}" if usable else ""
        lines.append(
            f"set {variable} on node {node} ({endpoint.host}) to the interface that leads to {master}, "
            f"now {endpoint.interface} ({endpoint.address}){instead}; or open the firewall between the nodes"
        )
    return lines
