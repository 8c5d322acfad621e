"""Files that are synced to disk and known by size and checksum."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

READ_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a complete file looks like: its bytes, and the sha256 of them in hex."""

    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class HashingStream(io.RawIOBase):
    """A writable stream that records what passes through it, and keeps the error that ended it.

    `torch.save` reports a full disk as an "unexpected pos" of its own; `error` is what really happened.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._hash, self._size = stream, hashlib.sha256(), 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if self.error is None and not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())


class RecordingFileSystem(FileSystem):
    """DCP's file system, which notes in `records` what every file that it writes looks like, by file name."""

    def __init__(self, records: dict[str, FileRecord]) -> None:
        self.records = records

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with open(path, mode) as stream:
            if mode == "rb":
                yield cast(io.IOBase, stream)
                return
            hashing = HashingStream(stream)
            try:
                yield hashing
            except Exception:
                if hashing.error is not None:
                    raise hashing.error from None
                raise
            stream.flush()
            self.records[Path(path).name] = hashing.record

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        os.replace(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write and sync one file."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".tmp_{path.name}")
    write_file(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(READ_BLOCK):
            digest.update(block)
    return digest.hexdigest()
