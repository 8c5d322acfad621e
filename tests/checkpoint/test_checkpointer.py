"""Saving, loading and refusing in one process."""

import dataclasses
import json

import pytest
import torch

from paro_lm.checkpoint import Checkpointer, find_checkpoint, latest_checkpoint, list_tensors, load_full, read_meta
from paro_lm.checkpoint.folder import FORMAT_VERSION
from paro_lm.parallel.buffer import FlatShard
from tests.checkpoint.state import SHAPES, assert_same, data_of, make_state


def checkpointer(folder, *, keep_last=0, async_save=False):
    return Checkpointer(folder, mesh=None, keep_last=keep_last, async_save=async_save)


def save(folder, step, state=None, *, meta=None, rank_state=None, **options):
    writer = checkpointer(folder, **options)
    path = writer.save(step, state or make_state(step), meta=meta or {}, rank_state=rank_state)
    writer.wait()
    return path


@pytest.mark.parametrize("async_save", [False, True])
def test_round_trip(tmp_path, async_save):
    rank_state = {"cpu": torch.get_rng_state(), "python": (3, (1, 2), None), "raw": b"\x00\xff", "lr": 0.1}
    path = save(tmp_path, 7, meta={"samples": 12, "losses": [0.5]}, rank_state=rank_state, async_save=async_save)
    assert path == tmp_path / "step_7"
    assert (tmp_path / "latest").read_text() == "step_7\n"
    state = make_state(0)
    loaded = checkpointer(tmp_path).load(path, state)
    assert_same(state, make_state(7))
    assert loaded.meta == {"format_version": FORMAT_VERSION, "step": 7, "world_size": 1, "samples": 12, "losses": [0.5]}
    assert loaded.meta == read_meta(path)
    assert torch.equal(loaded.rank_state.pop("cpu"), rank_state.pop("cpu"))
    assert loaded.rank_state == rank_state


def test_async_save_writes_the_values_of_the_call(tmp_path):
    """Training changes the tensors in place while the save runs; two saves in a row do not mix."""
    writer = checkpointer(tmp_path, async_save=True)
    state = make_state(1)
    for step in (1, 2, 3):
        writer.save(step, state, meta={}, rank_state=None)
        for tensor in state.values():
            data_of(tensor).fill_(float("nan"))
        for name, tensor in make_state(step + 1).items():
            data_of(state[name]).copy_(data_of(tensor))
    assert writer.latest().name == "step_3"
    for step in (1, 2, 3):
        loaded = make_state(0)
        writer.load(tmp_path / f"step_{step}", loaded)
        assert_same(loaded, make_state(step))


def test_views_into_one_buffer_are_saved_and_filled(tmp_path):
    """Shards are views into a flat buffer with padding between them, which nobody may touch."""
    buffer = torch.arange(40.0)

    def shards(buffer):
        first = FlatShard(name="a", shape=(3, 5), offset=(0, 0), local_shape=(3, 5), start=0, stop=15, data=buffer[:15])
        second = FlatShard(name="b", shape=(7,), offset=(0,), local_shape=(7,), start=0, stop=7, data=buffer[16:23])
        return {"model/a": first, "model/b": second}

    path = save(tmp_path, 1, shards(buffer))
    target = torch.full((40,), -1.0)
    checkpointer(tmp_path).load(path, shards(target))
    want = torch.full((40,), -1.0)
    want[:15], want[16:23] = buffer[:15], buffer[16:23]
    assert torch.equal(target, want)
    assert (path / "__0_0.distcp").stat().st_size < 8000, "a view is stored without the rest of its buffer"


def test_keep_last(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep_last=2)
        have = sorted(path.name for path in tmp_path.iterdir())
        assert have == ["latest", *(f"step_{k}" for k in range(max(1, step - 1), step + 1))]


def test_newest_is_what_was_published_last(tmp_path):
    """A run that went on from step 5 of a longer run resumes from its own steps, and drops the others first."""
    for step in (5, 10):
        save(tmp_path, step)
    save(tmp_path, 6, keep_last=2)
    assert latest_checkpoint(tmp_path).name == "step_6"
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_10", "step_6"}
    save(tmp_path, 7, keep_last=2)
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_6", "step_7"}


def test_unknown_and_missing_names(tmp_path):
    saved = make_state(3)
    path = save(tmp_path, 3, saved)
    state = make_state(0)
    state["model/new.bias"] = state.pop("model/norm.weight")
    with pytest.raises(ValueError, match=r"1 missing from the checkpoint: model/new.bias; 1 in .* unknown to this run: model/norm.weight"):
        checkpointer(tmp_path).load(path, state)
    assert torch.equal(data_of(state["model/scale"]), data_of(make_state(0)["model/scale"])), "nothing is loaded"
    loaded = checkpointer(tmp_path).load(path, state, strict=False)
    assert loaded.missing == ("model/new.bias",)
    assert loaded.unexpected == ("model/norm.weight",)
    assert torch.equal(data_of(state["model/new.bias"]), data_of(make_state(0)["model/norm.weight"]))
    assert torch.equal(data_of(state["model/scale"]), data_of(saved["model/scale"]))


def test_select_takes_the_weights_alone(tmp_path):
    path = save(tmp_path, 3)
    state = {name: tensor for name, tensor in make_state(0).items() if name.startswith("model/")}
    checkpointer(tmp_path).load(path, state, select=("model/",))
    assert_same(state, {name: tensor for name, tensor in make_state(3).items() if name in state})
    with pytest.raises(ValueError, match="unknown to this run: exp_avg/embedding.weight"):
        checkpointer(tmp_path).load(path, state)


def test_shape_mismatch_names_tensor_and_both_shapes(tmp_path):
    path = save(tmp_path, 3)
    state = make_state(0)
    state["model/norm.weight"] = dataclasses.replace(state["model/norm.weight"], shape=(6,), local_shape=(6,), stop=6, data=torch.zeros(6))
    state["step/scale"] = torch.zeros(2)
    with pytest.raises(ValueError, match="Shapes differ") as error:
        checkpointer(tmp_path).load(path, state)
    assert "model/norm.weight is (5,) in the checkpoint and (6,) here" in str(error.value)
    assert "step/scale is () in the checkpoint and (2,) here" in str(error.value)


def test_other_types_are_converted_and_said(tmp_path, caplog):
    path = save(tmp_path, 3)
    state = {name: dataclasses.replace(t, data=t.data.double()) if isinstance(t, FlatShard) else t for name, t in make_state(0).items()}
    checkpointer(tmp_path).load(path, state)
    assert torch.equal(state["model/norm.weight"].data, make_state(3)["model/norm.weight"].data.double())
    assert "converted from torch.float32 to torch.float64" in caplog.text


def test_newer_format_is_refused(tmp_path):
    path = save(tmp_path, 3)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"format_version": FORMAT_VERSION + 1}))
    for read in (lambda: read_meta(path), lambda: load_full(path), lambda: checkpointer(tmp_path).load(path, make_state(0))):
        with pytest.raises(ValueError, match=f"format_version {FORMAT_VERSION + 1}.*reads up to {FORMAT_VERSION}.*newer paro_lm"):
            read()


def test_state_that_could_not_be_read_back_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="must be JSON"):
        save(tmp_path, 1, meta={"folder": tmp_path})
    with pytest.raises(ValueError, match="not read back"):
        save(tmp_path, 1, rank_state={"cell": FlatShard})
    half = dataclasses.replace(make_state(1)["model/norm.weight"], stop=3, data=torch.zeros(3))
    with pytest.raises((ValueError, RuntimeError), match="model/norm.weight hold 3 of its 5 elements"):
        save(tmp_path, 1, {"model/norm.weight": half})
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_1"}


def test_tools_read_whole_tensors(tmp_path):
    path = save(tmp_path, 3)
    state = make_state(3)
    assert list_tensors(path)["model/embedding.weight"] == ((13, 3), torch.float32)
    full = load_full(path)
    assert full.keys() == state.keys()
    for name, shape in SHAPES.items():
        assert torch.equal(full[f"exp_avg/{name}"], state[f"exp_avg/{name}"].data.view(shape))
        assert torch.equal(full[f"step/{name}"], state[f"step/{name}"])
    assert load_full(path, ["model/scale"]).keys() == {"model/scale"}
    with pytest.raises(ValueError, match="1 missing from the checkpoint: model/other"):
        load_full(path, ["model/scale", "model/other"])
    with pytest.raises(ValueError, match=r"no checkpoint at .*step_4"):
        load_full(tmp_path / "step_4")


def test_find_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (3, 4):
        save(folder, step)
    assert find_checkpoint(tmp_path) == find_checkpoint(folder) == find_checkpoint(folder / "step_4") == folder / "step_4"
    assert find_checkpoint(folder / "step_3") == folder / "step_3"
    copied = (folder / "step_3").rename(tmp_path / "best")
    assert find_checkpoint(copied) == copied
    assert load_full(copied, ["step/scale"])["step/scale"] == 3
    with pytest.raises(ValueError, match="no complete checkpoint at .*nothing"):
        find_checkpoint(tmp_path / "nothing")
