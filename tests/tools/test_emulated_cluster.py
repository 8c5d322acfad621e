"""The emulated cluster brings nodes up, carries bytes over shaped links, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from paro_lm.tools import emulated_cluster
from paro_lm.tools.emulated_cluster import EmulatedCluster, main

TALK = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server, server.accept()[0] as connection:
        start, received = time.perf_counter(), 0
        while data := connection.recv(1 << 20):
            received += len(data)
    print(received, time.perf_counter() - start)
elif os.environ["RANK"] == os.environ["LOCAL_WORLD_SIZE"]:
    for attempt in range(100):
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(4_000_000))
    connection.close()
"""


def can_emulate() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "parolm-probe"], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", "parolm-probe"], capture_output=True).returncode == 0


needs_cluster = pytest.mark.skipif(not can_emulate(), reason="needs root, iproute2 and network namespaces")


@needs_cluster
def test_links_are_shaped_and_counted() -> None:
    with EmulatedCluster(2, "100mbit") as cluster:
        results = cluster.run([sys.executable, "-c", TALK], ranks_per_node=2, timeout=60)
        links = cluster.link_bytes()
        with pytest.raises(RuntimeError, match="another emulated cluster is running"):
            EmulatedCluster(2, "100mbit").__enter__()
    assert [result.returncode for result in results] == [0] * 4
    received, seconds = results[0].output.split()
    assert int(received) == 4_000_000
    assert float(seconds) > 0.25  # 4 MB at 100 Mbit take 0.32 s; unshaped, a few milliseconds
    assert 4_000_000 < links[1].sent < 4_400_000
    assert 4_000_000 < links[0].received < 4_400_000
    assert emulated_cluster._our_namespaces() == []
    assert emulated_cluster._our_links() == []


@needs_cluster
def test_failure_ends_all_ranks_and_tears_down(capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(60)"
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 ended with 1.*no luck"), EmulatedCluster(2, "none") as cluster:
        cluster.run([sys.executable, "-c", script], ranks_per_node=1)
    assert emulated_cluster._our_namespaces() == []
    with pytest.raises(RuntimeError, match="did not end within"), EmulatedCluster(1, "none") as cluster:
        cluster.run(["sleep", "60"], ranks_per_node=1, timeout=0.2)
    EmulatedCluster(2, "none").up()  # what a killed run leaves
    with EmulatedCluster(1, "none"):
        assert len(emulated_cluster._our_namespaces()) == 1
    assert emulated_cluster._our_links() == []
    assert main(["run", "--ranks", "1", "--", "true"]) == 1
    assert "no emulated cluster is up" in capsys.readouterr().err


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="install iproute2"):
        EmulatedCluster(2, "500mbit").__enter__()
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs root"):
        EmulatedCluster(2, "500mbit").__enter__()
    with pytest.raises(ValueError, match="0 nodes"):
        EmulatedCluster(0, "500mbit")
