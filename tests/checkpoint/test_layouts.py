"""Any layout loads under any other, bitwise, and a failure of one rank is a failure of all (conformance: 4 ranks -> 1, 2, 4)."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from paro_lm.checkpoint import Checkpointer, CheckpointError, load_full
from paro_lm.parallel.buffer import FlatLayout, FlatShard, flat_shard
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.testing import run_distributed
from tests.checkpoint.faults import Faults

UNITS = {
    "embedding": {"embedding.weight": (13, 6)},
    "layers.0": {"layers.0.q": (7, 10), "layers.0.norm": (5,), "layers.0.experts": (3, 4, 5)},
    "layers.1": {"layers.1.q": (1, 35), "layers.1.scale": (), "layers.1.odd": (37,)},
}
"""Shapes of parameters by unit; the first dimension of those that are not 1-D or 0-d is cut by tensor parallelism."""

NONE, INTRA, ALL = frozenset(), frozenset({"dp_intra"}), frozenset({"dp_inter", "dp_intra"})
LAYOUTS = {
    "tp2-I": ({"tp": 2, "group_size": 2}, INTRA),
    "pp2-G": ({"pp": 2, "group_size": 1}, ALL),
    "G": ({"group_size": 2}, ALL),
    "I": ({"group_size": 2}, INTRA),
    "N": ({"group_size": 2}, NONE),
    "tp2-pp2-N": ({"tp": 2, "pp": 2}, NONE),
    "tp4-N": ({"tp": 4}, NONE),
}
TWO_RANKS = {"tp2-N": ({"tp": 2}, NONE), "pp2-N": ({"pp": 2}, NONE), "G": ({"group_size": 1}, ALL)}
KINDS = {"model": 1.0, "exp_avg": 1e-3, "exp_avg_sq": 1e-6}


def whole(kind, name, step):
    """The tensor as one process has it."""
    shape = next(shapes[name] for shapes in UNITS.values() if name in shapes)
    position = [name for shapes in UNITS.values() for name in shapes].index(name)
    return (torch.rand(shape, generator=torch.Generator().manual_seed(position)) + step) * KINDS[kind]


def box_of(shape, mesh):
    """Offset and local shape under tensor parallelism, unevenly where it does not divide."""
    if len(shape) < 2:
        return tuple(0 for _ in shape), shape
    rows = math.ceil(shape[0] / mesh.size("tp"))
    start, stop = (min(shape[0], rows * (mesh.coordinate("tp") + k)) for k in (0, 1))
    return (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])


def stage_units(mesh):
    """Each stage has its layers; the embedding is tied, so the first and the last stage have it."""
    layers = ["layers.0", "layers.1"]
    return ["embedding", *(layers if mesh.size("pp") == 1 else [layers[mesh.coordinate("pp")]])]


def build(mesh, placement, step):
    """The state of one rank: shards with the values of `step`, or zeros (None)."""
    state = {}
    for unit in stage_units(mesh):
        layout = FlatLayout.build([(name, shape, *box_of(shape, mesh)) for name, shape in UNITS[unit].items()], mesh.shape)
        coordinates = mesh.coordinates(mesh.rank)
        for kind in KINDS:
            full = torch.zeros(layout.numel)
            for slot in layout.slots:
                if step is not None:
                    block = whole(kind, slot.name, step)[tuple(slice(a, a + n) for a, n in zip(slot.offset, slot.local_shape, strict=True))]
                    full[slot.start : slot.stop] = block.reshape(-1)
            first = layout.shard_start(placement, coordinates)
            shard = full[first : first + layout.shard_numel(placement)].clone()
            for segment in layout.segments(placement, coordinates):
                state[f"{kind}/{segment.slot.name}"] = flat_shard(segment, shard)
        state |= {f"step/{name}": torch.tensor(-1.0 if step is None else float(step)) for name in UNITS[unit]}
    return state


def compare(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        got, want = (value.data if isinstance(value, FlatShard) else value for value in (tensor, right[name]))
        assert torch.equal(got, want), name


def make_mesh(rank, world_size, options):
    return ParallelMesh.build(world_size=world_size, rank=rank, device=torch.device("cpu"), **options)


def load_everywhere(rank, world_size, folder, layouts, saved):
    """Load every saved checkpoint under every layout and compare every element with that of one process."""
    for name, (options, placement) in layouts.items():
        mesh = make_mesh(rank, world_size, options)
        reader = Checkpointer(folder, mesh=mesh, keep_last=0, async_save=False)
        for step, writers in saved:
            state = build(mesh, placement, None)
            loaded = reader.load(folder / f"step_{step}", state)
            compare(state, build(mesh, placement, step))
            assert loaded.meta["layout"]
            assert loaded.meta["world_size"] == writers
            assert loaded.rank_state == ({"rank": rank} if writers == world_size else None), name


def four_ranks(rank, world_size, folder):
    for step, (name, (options, placement)) in enumerate(LAYOUTS.items(), start=1):
        mesh = make_mesh(rank, world_size, options)
        writer = Checkpointer(folder, mesh=mesh, keep_last=0, async_save=step % 2 == 0)
        writer.save(step, build(mesh, placement, step), meta={"layout": name}, rank_state={"rank": rank})
        assert writer.latest() == folder / f"step_{step}"
    saved = [(0, 1)] + [(step, 4) for step in range(1, len(LAYOUTS) + 1)]
    load_everywhere(rank, world_size, folder, LAYOUTS, saved)
    check_failures(rank, world_size, folder)


def save_now(writer, step, state, rank_state):
    writer.save(step, state, meta={}, rank_state=rank_state)
    writer.wait()


def check_failures(rank, world_size, folder):
    """Every rank raises what happened on one, and the next save works."""
    options, placement = LAYOUTS["G"]
    mesh = make_mesh(rank, world_size, options)
    state = build(mesh, placement, 20)
    for async_save, failing, at in itertools.product((False, True), (0, 2), (2, 5, 20)):
        writer = Checkpointer(folder / "failures", mesh=mesh, keep_last=2, async_save=async_save)
        save_now(writer, 19, state, {"rank": rank})
        with Faults(at=at if rank == failing else 0).installed(), pytest.raises(CheckpointError, match=rf"rank {failing}.*No space left"):
            save_now(writer, 20, state, {"rank": rank})
        assert writer.latest().name == "step_19"
    save_now(writer, 20, state, None)
    assert writer.latest().name == "step_20"
    with pytest.raises(ValueError, match="rank 3: The rank state"):
        save_now(writer, 21, state, FlatShard if rank == 3 else None)
    if rank == 1:
        state["model/other"] = torch.zeros(3)
        state["step/layers.1.odd"] = torch.zeros(4)
    with pytest.raises(ValueError, match="model/other"):
        writer.load(folder / "failures" / "step_20", state)
    with pytest.raises(ValueError, match=r"rank 1: .*step/layers.1.odd is \(\) in the checkpoint and \(4,\) here"):
        writer.load(folder / "failures" / "step_20", state, strict=False)
    with pytest.raises(ValueError, match="no such folder"):
        writer.load(folder / "nothing", state)


def two_ranks(rank, world_size, folder):
    load_everywhere(rank, world_size, folder, TWO_RANKS, [(0, 1)] + [(step, 4) for step in range(1, len(LAYOUTS) + 1)])


def one_process_mesh():
    return ParallelMesh.build(world_size=1, rank=0)


def test_any_layout_loads_under_any_other(tmp_path):
    alone = Checkpointer(tmp_path, mesh=None, keep_last=0, async_save=False)
    alone.save(0, build(one_process_mesh(), NONE, 0), meta={"layout": "one process"}, rank_state={"rank": 0})
    run_distributed(four_ranks, 4, tmp_path)
    run_distributed(two_ranks, 2, tmp_path)
    for step in range(len(LAYOUTS) + 1):
        state = build(one_process_mesh(), NONE, None)
        alone.load(tmp_path / f"step_{step}", state)
        compare(state, build(one_process_mesh(), NONE, step))
        full = load_full(tmp_path / f"step_{step}")
        assert len(full) == 4 * sum(map(len, UNITS.values()))
        for kind, unit in itertools.product(KINDS, UNITS):
            for name in UNITS[unit]:
                assert torch.equal(full[f"{kind}/{name}"], whole(kind, name, step))
        check_written_once(tmp_path / f"step_{step}")


def check_written_once(path: Path):
    """Every element is in one box and every box in one file, also where all ranks hold it; the ranks share the work."""
    metadata = FileSystemReader(path).read_metadata()
    for name, tensor in metadata.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size), name
    boxes = sum(len(tensor.chunks) for tensor in metadata.state_dict_metadata.values())
    assert len(metadata.storage_data) == boxes
    stored = sum(info.length for info in metadata.storage_data.values())
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) == stored
    assert len(list(path.glob("*.distcp"))) == (1 if path.name == "step_0" else 4)
