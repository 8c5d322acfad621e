"""Crashes, full disks and damaged files: what is published is complete, and what was published stays."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paro_lm.checkpoint import Checkpointer, CheckpointError, latest_checkpoint
from paro_lm.checkpoint.folder import verify_files
from tests.checkpoint.faults import Faults
from tests.checkpoint.state import assert_same
from tests.checkpoint.state import make_state as make_full_state

KEEP = 2


def make_state(value):
    """Few tensors: the tests below save hundreds of times."""
    state = make_full_state(value)
    return {name: state[name] for name in ("model/embedding.weight", "step/scale")}


def checkpointer(folder, async_save=False):
    return Checkpointer(folder, mesh=None, keep_last=KEEP, async_save=async_save)


def save(folder, step, async_save=False):
    writer = checkpointer(folder, async_save)
    writer.save(step, make_state(step), meta={"value": step}, rank_state={"seed": step})
    writer.wait()


def check_newest(folder, steps):
    """The newest checkpoint is complete and of one of the steps; `latest` names a complete one; returns the step."""
    path = latest_checkpoint(folder)
    state = make_state(0)
    loaded = checkpointer(folder).load(path, state)
    assert loaded.meta["value"] == loaded.meta["step"] == loaded.rank_state["seed"]
    assert loaded.meta["step"] in steps, (loaded.meta, steps)
    assert_same(state, make_state(loaded.meta["step"]))
    named = folder / (folder / "latest").read_text().strip()
    if not named.exists():  # only while step_<k> is replaced: its former version has another name, which was found above
        assert path == named.with_name(f".old_{named.name}")
    else:
        checkpointer(folder).load(named, make_state(0))
    return loaded.meta["step"]


def check_next_save_works(folder):
    save(folder, 9)
    assert check_newest(folder, {9}) == 9
    names = {path.name for path in folder.iterdir()}
    assert len(names & {"step_2", "step_3", "step_9", "latest"}) == len(names) == KEEP + 1, names


def failure(function, *args):
    try:
        function(*args)
    except CheckpointError as error:
        return str(error)
    return None


def operations(folder, step):
    """Number of file operations of a save into a folder like this."""
    with Faults().installed() as faults:
        save(folder, step)
    return faults.count


@pytest.mark.parametrize("second", [3, 2], ids=["new step", "same step again"])
def test_disk_full_at_every_operation(tmp_path, second):
    """Checkpoints 1 and 2 exist; the next save meets a full disk at its n-th operation, for every n."""

    for step in (1, 2):
        save(tmp_path / "before", step)
    folder = shutil.copytree(tmp_path / "before", tmp_path / "count")
    total = operations(folder, second)
    assert total > 30
    failed = 0
    for n in range(1, total + 1):
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"at_{n}")
        with Faults(at=n).installed():
            message = failure(save, folder, second)
        if message is not None:
            failed += 1
            assert message.startswith(f"Saving step {second} into {folder} failed")
            assert "No space left on device" in message
        check_newest(folder, {2, second})
        check_next_save_works(folder)
    assert failed > 0.7 * total


def test_disk_full_in_the_background_is_raised_by_the_next_call(tmp_path):
    save(tmp_path, 1)
    writer = checkpointer(tmp_path, async_save=True)
    with Faults(at=20).installed():
        writer.save(2, make_state(2), meta={}, rank_state=None)
        while not writer._pending.done():
            pass
    with pytest.raises(CheckpointError, match="step 2.*No space left"):
        writer.save(3, make_state(3), meta={}, rank_state=None)
    writer.wait()
    assert latest_checkpoint(tmp_path).name == "step_1"
    writer.save(3, make_state(3), meta={"value": 3}, rank_state={"seed": 3})
    assert writer.latest().name == "step_3"


def kill_at_every_operation(folder):
    """Fork a process for every n, which is killed at the n-th operation of saving step 3; prints how many were killed."""
    for step in (1, 2):
        save(folder / "before", step)
    n, killed = 0, True
    while killed:
        n += 1
        here = shutil.copytree(folder / "before", folder / str(n))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            with Faults(at=n, action=lambda: os.kill(os.getpid(), signal.SIGKILL)).installed():
                save(here, 3)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        check_newest(here, {2, 3})
        check_next_save_works(here)
    print("killed", n - 1)


def test_kill_9_at_every_operation(tmp_path):
    root = Path(__file__).parents[2]
    code = f"import pathlib; from tests.checkpoint.test_crash import *; kill_at_every_operation(pathlib.Path({str(tmp_path)!r}))"
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 30


FILES = [".metadata", "__0_0.distcp", "manifest.json", "meta.json", "rank_0.pt"]


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_named(tmp_path, name):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step_2"
    assert sorted(file.name for file in path.iterdir()) == FILES
    content = (path / name).read_bytes()
    changed = content[:40] + bytes([content[40] ^ 255]) + content[41:]
    for damage in (b"", content[:-1], changed):
        (path / name).write_bytes(damage)
        if name not in ("manifest.json", "meta.json"):
            how = f"{name} has {len(damage)} bytes, {len(content)} were written" if damage != changed else f"{name} has changed"
            with pytest.raises(ValueError, match=how):
                verify_files(path)
        assert latest_checkpoint(tmp_path) == path, "damage is reported, not passed over in silence"
        state = make_state(0)
        with pytest.raises(ValueError, match=f"step_2.*{name}.*checkpoint.resume"):
            checkpointer(tmp_path).load(path, state)
        assert_same(state, make_state(0))
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"step_2.*{name} is missing"):
        checkpointer(tmp_path).load(path, make_state(0))
    (path / name).write_bytes(content)
    assert check_newest(tmp_path, {2}) == 2


def test_folder_without_marker_is_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step_2" / "manifest.json").unlink()
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_8").write_text("not a folder")
    assert latest_checkpoint(tmp_path).name == "step_1"
    save(tmp_path, 2)
    assert check_newest(tmp_path, {2}) == 2
    (tmp_path / "latest").write_bytes(b"")
    assert latest_checkpoint(tmp_path).name == "step_2"
    assert latest_checkpoint(tmp_path / "nothing") is None
