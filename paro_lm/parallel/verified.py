"""What `paro-doctor` has verified on a cluster: `parallel.collectives=auto` on NCCL takes HO-Ring only where it has.

One small JSON file in the user's cache; an entry stands for one set of hosts, backend, mesh, torch and NCCL version.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path

import torch

from paro_lm.distributed import gather_objects, on_rank_zero
from paro_lm.parallel.mesh import ParallelMesh


def verified_path() -> Path:
    """$XDG_CACHE_HOME/paro_lm/verified.json, by default under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paro_lm" / "verified.json"


def nccl_version() -> str:
    """NCCL's version as torch has it; "none" without."""
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def cluster_key(mesh: ParallelMesh, backend: str) -> str:
    """Name of this cluster and layout, the same on all ranks and for any order of hosts. A collective call."""
    hosts = sorted(gather_objects(socket.gethostname()))
    text = json.dumps([hosts, backend, str(mesh.shape), torch.__version__, nccl_version()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_verified(mesh: ParallelMesh, backend: str) -> bool:
    """Whether HO-Ring was verified here; rank 0's file counts for all ranks. A collective call."""
    key = cluster_key(mesh, backend)
    return on_rank_zero(lambda: key in _read(verified_path()))


def remember(mesh: ParallelMesh, backend: str) -> Path:
    """Note that HO-Ring was verified here. A collective call; raises OSError on all ranks when the cache cannot be written."""
    key = cluster_key(mesh, backend)

    def write() -> Path:
        path = verified_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _read(path) | {key: {"hosts": socket.gethostname(), "mesh": str(mesh.shape), "backend": backend, "time": time.time()}}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(path)
        return path

    return on_rank_zero(write)


def _read(path: Path) -> dict[str, dict[str, object]]:
    """The entries; a file that is missing or damaged verifies nothing."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
