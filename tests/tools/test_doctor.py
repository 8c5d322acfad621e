"""paro-doctor says what is wrong with a cluster: who, which interface, which variable to set."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paro_lm.cli import load
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.verified import is_verified, remember, verified_path
from paro_lm.testing import run_distributed
from paro_lm.tools import doctor, reach
from paro_lm.tools.doctor import DoctorConfig, compare_collectives
from paro_lm.tools.emulated_cluster import EmulatedCluster
from paro_lm.tools.reach import Endpoint, explain, try_peers
from paro_lm.tools.stages import Stages
from tests.tools.test_emulated_cluster import needs_cluster

ROOT = Path(__file__).resolve().parents[2]


def endpoints() -> list[Endpoint]:
    """Two nodes of two ranks; the second node offers the wrong interface."""
    common = {"variable": "GLOO_SOCKET_IFNAME", "port": 1}
    good = {"interface": "e0", "address": "10.0.0.1", "others": {"lo": "127.0.0.1", "e0": "10.0.0.1"}}
    bad = {"interface": "docker0", "address": "172.17.0.1", "others": {"lo": "127.0.0.1", "docker0": "172.17.0.1", "e0": "10.0.0.2"}}
    return [Endpoint(rank=r, host=f"host{r // 2}", node=r // 2, **common, **(good, bad)[r // 2]) for r in range(4)]  # type: ignore[arg-type]


def test_who_cannot_reach_whom_and_what_to_set() -> None:
    why = "No route to host"
    text = "\n".join(explain(endpoints(), [{2: why, 3: why}, {2: why, 3: why}, {}, {}], "gloo", "10.0.0.1"))
    assert "ranks 0, 1 cannot reach rank 2: host host1, node 1, interface docker0, address 172.17.0.1: No route to host" in text
    assert "ranks 0, 1 cannot reach rank 3" in text
    assert text.count("set GLOO_SOCKET_IFNAME on node 1 (host1)") == 1
    assert "it also has e0 (10.0.0.2)" in text
    assert "NCCL_SOCKET_IFNAME" in "".join(explain(endpoints(), [{2: why}, {}, {}, {}], "nccl", "10.0.0.1"))
    assert explain(endpoints(), [{}, {}, {}, {}], "gloo", "10.0.0.1") == []


def test_a_stage_that_does_not_end_names_the_ranks_that_hold_it_up() -> None:
    store = dist.HashStore()
    stages = Stages(store, endpoints=endpoints(), rank=0, timeout=30, backend="gloo", master="10.0.0.1")
    with stages.run("connect"):
        pass
    store.set("done/connect/1", "1")
    text = "\n".join(stages.diagnosis("connect"))
    assert "rank 2: host host1, node 1, interface docker0, address 172.17.0.1" in text
    assert "rank 3: " in text
    assert "rank 0: " not in text
    assert "set GLOO_SOCKET_IFNAME on node 1 (host1)" in text


def test_a_stage_that_does_not_end_ends_the_process() -> None:
    code = (
        "import time, torch.distributed as dist; from tests.tools.test_doctor import Stages, endpoints\n"
        "stages = Stages(dist.HashStore(), endpoints=endpoints(), rank=0, timeout=0.2, backend='nccl', master='10.0.0.1')\n"
        "with stages.run('links'): time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "stage links did not end within 0.2 s" in done.stderr
    assert "set NCCL_SOCKET_IFNAME on node 1 (host1)" in done.stderr


def test_the_interface_is_the_one_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": "10.1.0.5"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert reach.chosen("gloo", known, ("127.0.0.1", 1)) == ("eth1", "10.1.0.5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=eth7: .* has no such interface.*eth0 \(10.0.0.5\)"):
        reach.chosen("gloo", known, ("127.0.0.1", 1))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    assert reach.chosen("nccl", known, ("127.0.0.1", 1)) == ("eth0", "10.0.0.5")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert reach.chosen("nccl", known, ("127.0.0.1", 1)) == ("lo", "127.0.0.1")


def test_ranks_that_do_not_come_are_named() -> None:
    """Rank 0 alone, with a store as torchrun makes it: the launcher holds it."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, "-m", "paro_lm.tools.doctor", "stage_seconds=1.5", "device=cpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "ranks 1, 2 did not come within 1.5 s" in done.stderr


def test_peers_of_large_worlds_are_few_and_reach_everybody() -> None:
    assert reach.peers_of(1, 3) == [0, 2]
    tried = [reach.peers_of(rank, 200) for rank in range(200)]
    assert {peer for peers in tried for peer in peers} == set(range(200))
    assert max(map(len, tried)) < 9


def test_a_closed_port_is_told() -> None:
    listener = reach.Listener("127.0.0.1")
    own = [
        Endpoint(**vars(item) | {"address": "127.0.0.1", "port": port}) for item, port in zip(endpoints(), (1, listener.port), strict=False)
    ]
    assert list(try_peers(own, 1, timeout=1)) == [0]
    assert try_peers(own, 0, timeout=1) == {}
    listener.close()


def _examined(rank: int, world_size: int, folder: str) -> Any:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29461", XDG_CACHE_HOME=folder, GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = doctor.task(DoctorConfig(folder=f"{folder}/runs", sizes_mib=[0.001, 0.5], repeats=2, stage_seconds=30))
        mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
        known = is_verified(mesh, "gloo"), is_verified(mesh, "nccl")
        other = is_verified(ParallelMesh.build(world_size=world_size, rank=rank, group_size=1), "gloo")
        broken = _Broken.wrong(mesh)
    return code, output.getvalue(), known, other, broken


class _Broken:
    """HO-Ring with a wrong element on one rank, for messages that are not tiny."""

    @staticmethod
    def wrong(mesh: ParallelMesh) -> list[str]:
        right = GridCollectives.all_reduce

        def all_reduce(self: GridCollectives, tensor: torch.Tensor, axes: Any) -> None:
            right(self, tensor, axes)
            if self.algorithm == "ho_ring" and mesh.rank == 1 and tensor.numel() > 100:
                tensor[-1] += 1

        GridCollectives.all_reduce = all_reduce  # type: ignore[method-assign]
        try:
            return compare_collectives(mesh)
        finally:
            GridCollectives.all_reduce = right  # type: ignore[method-assign]


def test_a_sound_cluster_passes_and_is_remembered(tmp_path: Path) -> None:
    answers = run_distributed(_examined, 4, str(tmp_path))
    output = answers[0][1]
    for code, text, known, other, broken in answers:
        assert code == 0, output
        assert known == (True, False)
        assert not other
        assert len(broken) == 8
        assert all(line.startswith("all_reduce of ") for line in broken)
        assert text == "" or text == output
    for part in (
        "4 ranks, backend gloo",
        "rank 3: host",
        "reach: plain TCP",
        "2 nodes of 2 ranks, 2 groups of 2",
        "is shared by all nodes",
    ):
        assert part in output
    assert "links inside groups" in output
    assert "Gbit/s per group" in output
    assert "HO-Ring gives the values" in output
    assert "all is well" in output


def _remembered(rank: int, world_size: int, folder: str) -> Any:
    os.environ["XDG_CACHE_HOME"] = folder
    mesh = ParallelMesh.build(world_size=world_size, rank=rank)
    verified_path().parent.mkdir(parents=True, exist_ok=True)
    verified_path().write_text("{ damaged")
    before = is_verified(mesh, "nccl")
    remember(mesh, "nccl")
    remember(mesh, "gloo")
    return before, is_verified(mesh, "nccl"), is_verified(mesh, "gloo")


def test_options_compose_and_one_process_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load([], tool=doctor.TOOL) == DoctorConfig()
    assert doctor.task(DoctorConfig(folder=str(tmp_path / "new"))) == 0
    (tmp_path / "file").write_text("")
    assert doctor.task(DoctorConfig(folder=str(tmp_path / "file" / "below"))) == 1
    output = capsys.readouterr().out
    assert f"torch {torch.__version__}" in output
    assert "lo 127.0.0.1" in output
    assert "PROBLEM: folder=" in output


def test_a_damaged_file_verifies_nothing_and_is_replaced(tmp_path: Path) -> None:
    assert run_distributed(_remembered, 1, str(tmp_path)) == [(False, True, True)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.slow
@needs_cluster
def test_an_unreachable_interface_is_named(tmp_path: Path) -> None:
    """Node 1 offers e1, an interface that leads nowhere; packets to it are lost, so that who tries waits."""
    command = [sys.executable, "-m", "paro_lm.tools.doctor", f"folder={tmp_path}", "stage_seconds=20", "sizes_mib=[1]", "repeats=2"]
    script = f"[ $GROUP_RANK = 1 ] && export GLOO_SOCKET_IFNAME=$WRONG; cd {ROOT}; exec {' '.join(command)}"
    with EmulatedCluster(2, "500mbit") as cluster:
        ip("-n", "parolm-node1", "link", "add", "e1", "type", "veth", "peer", "name", "e2")
        ip("-n", "parolm-node1", "addr", "add", "10.99.0.5/24", "dev", "e1")
        for end in ("e1", "e2"):
            ip("-n", "parolm-node1", "link", "set", end, "up")
        ip("-n", "parolm-node0", "route", "add", "10.99.0.0/24", "via", "10.77.0.99", "dev", "e0", "onlink")
        env = {"XDG_CACHE_HOME": str(tmp_path)}
        failed = cluster.run(["sh", "-c", script], 2, env={**env, "WRONG": "e1"}, check=False, timeout=120)
        absent = cluster.run(["sh", "-c", script], 2, env={**env, "WRONG": "e9"}, check=False, timeout=120)
        sound = cluster.run(["sh", "-c", script], 2, env={**env, "WRONG": "e0"}, timeout=120)
    text = failed[0].output
    assert failed[0].returncode == 1
    assert "ranks 0, 1 cannot reach rank 2: host" in text
    assert "ranks 0, 1 cannot reach rank 3: host" in text
    assert "node 1, interface e1, address 10.99.0.5" in text
    assert "set GLOO_SOCKET_IFNAME on node 1" in text
    assert "it also has e0 (10.77.0.11)" in text
    assert any("GLOO_SOCKET_IFNAME=e9" in result.output and "e0 (10.77.0.11)" in result.output for result in absent)
    assert "all is well" in sound[0].output
    rate = next(line for line in sound[0].output.splitlines() if "per group" in line)
    assert 0.3 < float(rate.split(", ")[-1].split()[0]) < 0.52, rate  # 500 Mbit, shared by the ranks of a node
