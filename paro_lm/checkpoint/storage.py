"""Planners, writer and reader of DCP that know boxed shards, record checksums, and read each stored box once."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.futures import Future

from paro_lm.checkpoint.boxes import BoxedShard, common_cuts, extents
from paro_lm.checkpoint.files import FileRecord, RecordingFileSystem
from paro_lm.checkpoint.team import CheckpointError, Team
from paro_lm.parallel.buffer import FlatShard

Storable = FlatShard | torch.Tensor
"""What is saved and loaded under a name: a shard of a tensor, or a plain tensor that is the same on all ranks that have it."""


class BoxSavePlanner(DefaultSavePlanner):
    """Plans shards as boxes; refuses to write a tensor of which a part is on no rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if held != math.prod(tensor.size):
                raise ValueError(
                    f"The shards of {name} hold {held} of its {math.prod(tensor.size)} elements: every element must be on a rank."
                )
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        return find_tensor_shard(self.state_dict[index.fqn], index)


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the boxes that the shards of this rank need. Names and shapes are checked by the caller."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The default one replaces values of unknown types by None while it looks for tensors on the meta device.
        self.state_dict = state_dict
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return find_tensor_shard(self.state_dict[index.fqn], index)


class BoxWriter(FileSystemWriter):
    """Writes one file per rank that has something to write, with checksums."""

    def __init__(self, path: Path, *, copy_ahead: bool) -> None:
        super().__init__(path, overwrite=False, per_thread_copy_ahead=10_000_000 if copy_ahead else 0)
        self.records: dict[str, FileRecord] = {}
        self.fs = RecordingFileSystem(self.records)

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            return super().write_data(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing


class BoxReader(FileSystemReader):
    """Reads each stored box once, in the order of the file, whatever number of pieces of it are wanted."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            per_file[self.storage_data[item.storage_index].relative_path][item.storage_index].append(item)
        for name, boxes in per_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for index in sorted(boxes, key=lambda index: self.storage_data[index].offset):
                    box = torch.load(self._slice_file(stream, self.storage_data[index]), map_location="cpu", weights_only=True)
                    for item in boxes[index]:
                        _copy_piece(box, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _copy_piece(box: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    assert target.shape == box.shape, (item, target.shape, box.shape)
    target.copy_(box)
    planner.commit_tensor(item, target)


def write_tensors(path: Path, tensors: Mapping[str, Storable], team: Team, *, copy_ahead: bool) -> dict[str, FileRecord]:
    """Write the tensors of all ranks into a folder; returns the records of the files this rank wrote. A collective call.

    Raises CheckpointError on every rank when any rank fails.
    """
    writer = BoxWriter(path, copy_ahead=copy_ahead)
    mine = extents(tensors)
    boxed = _boxed(tensors, common_cuts(mine, team.all_gather(mine)))
    with _errors_of_dcp("write", team):
        dcp.save(boxed, storage_writer=writer, planner=BoxSavePlanner(), process_group=team.group, no_dist=team.size == 1)
    return writer.records


def read_tensors(path: Path, tensors: Mapping[str, Storable], team: Team) -> None:
    """Fill the tensors, whatever sharding they were saved in. A collective call.

    Raises CheckpointError on every rank when any rank fails.
    """
    with _errors_of_dcp("read", team):
        dcp.load(
            _boxed(tensors, {}),
            storage_reader=BoxReader(path),
            planner=BoxLoadPlanner(),
            process_group=team.group,
            no_dist=team.size == 1,
        )


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Names of the tensors in a folder, with their shapes and types."""
    return FileSystemReader(path).read_metadata().state_dict_metadata  # type: ignore[return-value]


def _boxed(tensors: Mapping[str, Storable], cuts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    return {name: BoxedShard(value, cuts.get(name, ())) if isinstance(value, FlatShard) else value for name, value in tensors.items()}


@contextmanager
def _errors_of_dcp(what: str, team: Team) -> Iterator[None]:
    """Turn DCP's report of the failures of all ranks, which no `except Exception` catches, into one line per rank."""
    try:
        if team.size > 1:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointException as failed:
        reports = [f"rank {rank}: {_one_line(error)}" for rank, (error, _) in sorted(failed.failures.items())]
        raise CheckpointError(f"failed to {what} tensors: " + "; ".join(reports)) from failed


def _one_line(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
