"""Saving and loading the state of a run, on any layout."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paro_lm.checkpoint.files import write_file
from paro_lm.checkpoint.folder import (
    FORMAT_VERSION,
    clear_leftovers,
    latest_checkpoint,
    prune,
    publish,
    read_manifest,
    read_meta,
    step_folder,
    verify_files,
)
from paro_lm.checkpoint.names import check_names, check_shapes
from paro_lm.checkpoint.staging import Stager
from paro_lm.checkpoint.storage import Storable, read_tensors, stored_tensors, write_tensors
from paro_lm.checkpoint.team import CheckpointError, Team
from paro_lm.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `Checkpointer.load` returns besides the filled tensors.

    `meta` is as `read_meta` gives it. `rank_state` is what this rank saved, None when the number of ranks is another one.
    `missing` and `unexpected` are the names that were skipped with strict=False.
    """

    meta: dict[str, Any]
    rank_state: Any | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """Everything that one save writes."""

    step: int
    tensors: Mapping[str, Storable]
    meta: bytes
    rank_state: bytes


class Checkpointer:
    """Writes checkpoints of a run into `folder` (`<run>/checkpoints`, see `folder.py`) and reads them, whatever the layout.

    mesh: all its ranks save and load together, on a Gloo group that is made here (a collective call); None = this process alone,
    without a process group. The folder is on a file system that all ranks share.
    keep_last: number of complete checkpoints that stay, 0 = all. async_save: `save` returns when a copy in host memory is made,
    a thread writes it; an error of it is raised by the next call of any method. Call `wait()` before the process groups end.

    Every method but `latest` is collective. Any error is raised on every rank. A failed or killed save leaves all earlier
    checkpoints, and `latest`, as they were.
    """

    def __init__(self, folder: Path | str, *, mesh: ParallelMesh | None, keep_last: int, async_save: bool) -> None:
        assert keep_last >= 0, keep_last
        self.folder = Path(folder)
        self._team = Team(mesh)
        self._keep_last = keep_last
        self._stager = Stager() if async_save else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if async_save else None
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, Storable], *, meta: dict[str, Any], rank_state: Any) -> Path:
        """Save `tensors` (by global name), `meta` (JSON, the same on all ranks) and `rank_state` as `step_<step>`.

        rank_state is of this rank: bytes, numbers, strings, tensors, and lists, tuples and dicts of them.
        A plain tensor is the same on all ranks that pass it, and is written once, as are shards that several ranks hold.
        An existing checkpoint of the same step is replaced. Returns the path under which the checkpoint is published.
        Raises ValueError when the state cannot be saved at all, CheckpointError when writing failed.
        """
        self.wait()
        snapshot: _Snapshot | Exception
        try:
            snapshot = self._snapshot(step, tensors, meta, rank_state)
        except Exception as error:  # raised by _write, on all ranks
            snapshot = error
        if self._executor is None:
            self._write(step, snapshot)
        else:
            self._pending = self._executor.submit(self._write, step, snapshot)
        return step_folder(self.folder, step)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, None when there is none; waits for a save in the background first."""
        self.wait()
        return latest_checkpoint(self.folder)

    def load(self, path: Path | str, tensors: Mapping[str, Storable], *, select: tuple[str, ...] = ("",), strict: bool = True) -> Loaded:
        """Fill `tensors` in place from the checkpoint at `path`, whatever layout it was saved under.

        select: prefixes; stored tensors that start with none of them are passed over, e.g. ("model/",) for weights alone.
        strict: a name that only the checkpoint or only the run has is an error; otherwise it is skipped and reported.
        A stored type that differs is converted.
        Raises ValueError naming the file when one is missing, truncated or changed, naming unknown and missing tensors, naming
        the tensor and both shapes where these differ, and when the format is newer than this version.
        """
        self.wait()
        path, team = Path(path), self._team
        paths = team.all_gather(str(path))
        assert len(set(paths)) == 1, f"ranks load from different paths: {paths}"
        meta = team.run(lambda: self._check_files(path))
        stored = team.run(lambda: stored_tensors(path))
        names = [name for name in stored if name.startswith(select)]
        missing, unexpected = check_names(path, names, team.all_gather(list(tensors)), strict=strict)
        wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
        team.run(lambda: check_shapes(path, stored, wanted))
        read_tensors(path, wanted, team)
        rank_state = team.run(lambda: self._read_rank_state(path, meta))
        return Loaded(meta=meta, rank_state=rank_state, missing=missing, unexpected=unexpected)

    def _check_files(self, path: Path) -> dict[str, Any]:
        """Sizes are compared by all ranks, checksums of the files by one rank each."""
        meta = read_meta(path)
        verify_files(path, checksums_of=sorted(read_manifest(path).files)[self._team.rank :: self._team.size])
        return meta

    def _read_rank_state(self, path: Path, meta: dict[str, Any]) -> Any | None:
        if meta["world_size"] != self._team.size:
            return None
        return torch.load(path / f"rank_{self._team.rank}.pt", map_location="cpu", weights_only=True)

    def _snapshot(self, step: int, tensors: Mapping[str, Storable], meta: dict[str, Any], rank_state: Any) -> _Snapshot:
        own = {"format_version": FORMAT_VERSION, "step": step, "world_size": self._team.size}
        assert all(meta.get(key, value) == value for key, value in own.items()), (meta, own)
        try:
            encoded = json.dumps(own | meta, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"The meta data of a checkpoint must be JSON: {error}") from error
        stream = io.BytesIO()
        torch.save(rank_state, stream)
        stream.seek(0)
        try:
            torch.load(stream, weights_only=True)
        except Exception as error:
            raise ValueError(f"The rank state can be saved but not read back; use tensors and plain Python values: {error}") from error
        staged = tensors if self._stager is None else self._stager.stage(tensors)
        return _Snapshot(step=step, tensors=staged, meta=encoded, rank_state=stream.getvalue())

    def _write(self, step: int, snapshot: _Snapshot | Exception) -> None:
        temporary = self.folder / f".tmp_step_{step}"
        try:
            self._write_and_publish(temporary, snapshot)
        except (CheckpointError, ValueError) as error:
            if self._team.rank == 0:
                self._clean_up()
            message = f"Saving step {step} into {self.folder} failed; earlier checkpoints are as they were. {error}"
            raise type(error)(message) from error

    def _clean_up(self) -> None:
        """Give the space of a failed save back; where that fails too, the next save does it."""
        try:
            clear_leftovers(self.folder)
        except OSError as error:
            logger.warning("Cannot remove what a failed save left in %s: %s", self.folder, error)

    def _write_and_publish(self, temporary: Path, snapshot: _Snapshot | Exception) -> None:
        team = self._team

        def prepare() -> None:
            if isinstance(snapshot, Exception):
                raise snapshot
            if team.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                clear_leftovers(self.folder)
                temporary.mkdir()

        team.run(prepare)
        assert isinstance(snapshot, _Snapshot)
        name = f"rank_{team.rank}.pt"
        record = team.run(lambda: write_file(temporary / name, snapshot.rank_state))
        records = write_tensors(temporary, snapshot.tensors, team, copy_ahead=self._stager is None)
        files = {name: record for written in team.all_gather(records | {name: record}) for name, record in written.items()}

        def finish() -> None:
            publish(temporary, self.folder, snapshot.step, files, snapshot.meta)
            prune(self.folder, self._keep_last)

        team.run_on_first(finish)
        logger.info("Saved %s", step_folder(self.folder, snapshot.step))
