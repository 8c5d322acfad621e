"""Token files in Megatron's MMIDIDX format: `<prefix>.bin` holds tokens, `<prefix>.idx` says where documents begin.

Layout of an index, little endian: magic `MMIDIDX\\0\\0`; u64 version 1; u8 dtype code; u64 S sequences; u64 D = documents + 1;
int32 lengths [S]; int64 byte offsets [S]; int64 document boundaries in sequences [D].
"""

from __future__ import annotations

import contextlib
import os
import struct
import uuid
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 as Megatron has them (gpt-neox swaps the two); token files use 1 to 5 and 8.
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
Array = NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type a new file gets: uint16 for fewer than 65500 ids, else int32 (Megatron's rule)."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def sequence_pointers(lengths: ArrayLike, itemsize: int) -> NDArray[np.int64]:
    """Byte offset of every sequence when they lie one after the other; int64 whatever the type of `lengths`."""
    sizes = np.asarray(lengths, dtype=np.int64) * itemsize
    return np.cumsum(sizes, dtype=np.int64) - sizes


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def exists(prefix: str | Path) -> bool:
    """Whether both files of `prefix` are there."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def mask_prefix(prefix: str | Path) -> Path:
    """The pair of uint8 files beside `prefix`, with the same documents, that says for every token whether it carries loss. Without
    such a pair all do."""
    return Path(f"{prefix}.mask")


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that no other process uses, so that `os.replace` onto `path` is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def write_index(path: Path, *, dtype: np.dtype[Any], lengths: ArrayLike, pointers: ArrayLike, documents: ArrayLike) -> None:
    """Write an index file atomically.

    `documents` are D boundaries counted in sequences, from 0 to S. Pointers are free: an index may name a part of the
    documents of its `.bin`.
    """
    lengths64, documents64 = np.asarray(lengths, dtype=np.int64), np.asarray(documents, dtype="<i8")
    if len(lengths64) and lengths64.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{path}: a sequence of {lengths64.max()} tokens does not fit the format's int32 length; split the document")
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths64), len(documents64)))
            file.write(lengths64.astype("<i4").tobytes())
            file.write(np.asarray(pointers, dtype="<i8").tobytes())
            file.write(documents64.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_fits(tokens: Array, dtype: np.dtype[Any], where: Path) -> None:
    if dtype.kind == "f" or not len(tokens) or tokens.dtype == dtype:
        return
    info = np.iinfo(dtype)
    low, high = int(tokens.min()), int(tokens.max())
    if low < info.min or high > info.max:
        raise ValueError(
            f"{where}: token id {high if high > info.max else low} does not fit {dtype.name} ({info.min} to {info.max}); "
            "write the file with a wider type (dtype int32) or use the tokenizer that the file was made for"
        )


class IndexedWriter:
    """Streams documents into `<prefix>.bin`; nothing has the final name before `commit`.

    As a context manager it commits on success and removes its temporary files when the block raises.
    Raises ValueError for ids that the type cannot hold.
    """

    def __init__(self, prefix: str | Path, *, dtype: Any) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(f"type {self.dtype} has no code in the index format; use one of {[str(d) for d in CODES]}")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self.num_tokens = 0
        self.num_documents = 0
        self._num_sequences = 0
        self._lengths: list[Array] = []
        self._boundaries: list[Array] = [np.zeros(1, np.int64)]
        self._temporary = temporary_beside(bin_path(prefix))
        self._file: IO[bytes] = open(self._temporary, "wb")  # noqa: SIM115 (closed by commit or abort)

    def add_document(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append one document; `lengths` splits it into sequences (default: one)."""
        array = np.asarray(tokens)
        split = np.asarray([len(array)] if lengths is None else lengths, dtype=np.int64)
        assert split.sum() == len(array), "lengths of the sequences must add up to the document"
        self._write(array, split)
        self._end_documents(np.asarray([self._num_sequences], np.int64))

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Append `len(lengths)` documents of one sequence each, whose tokens lie one after the other."""
        array, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        assert sizes.sum() == len(array), "lengths of the documents must add up to the tokens"
        first = self._num_sequences
        self._write(array, sizes)
        self._end_documents(first + 1 + np.arange(len(sizes), dtype=np.int64))

    def append(self, prefix: str | Path, *, block: int = 1 << 24) -> None:
        """Append all documents of another pair of files (the part a worker wrote), in their order."""
        part = IndexedReader(prefix)
        if part.dtype != self.dtype:
            raise ValueError(f"{prefix} holds {part.dtype}, {self.prefix} holds {self.dtype}; parts of one file need one type")
        if not part.contiguous:
            raise ValueError(f"{prefix} names a part of its .bin only; append the complete files instead")
        for start in range(0, part.num_tokens, block):
            self._file.write(part.flat[start : min(start + block, part.num_tokens)].tobytes())
        self._lengths.append(np.array(part.lengths, np.int64))
        self._end_documents(self._num_sequences + np.asarray(part.documents[1:], np.int64))
        self._num_sequences += len(part.lengths)
        self.num_tokens += part.num_tokens

    def _write(self, tokens: Array, lengths: NDArray[np.int64]) -> None:
        _check_fits(tokens, self.dtype, self.prefix)
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._lengths.append(lengths)
        self._num_sequences += len(lengths)
        self.num_tokens += len(tokens)

    def _end_documents(self, boundaries: NDArray[np.int64]) -> None:
        self._boundaries.append(boundaries)
        self.num_documents += len(boundaries)

    def commit(self) -> None:
        """Give both files their names; the index comes last, and an old index goes first, so no wrong pair is ever seen."""
        sync_and_close(self._file)
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._temporary, bin_path(self.prefix))
        pointers = sequence_pointers(lengths, self.dtype.itemsize)
        write_index(idx_path(self.prefix), dtype=self.dtype, lengths=lengths, pointers=pointers, documents=np.concatenate(self._boundaries))

    def abort(self) -> None:
        """Drop what was written."""
        # Closing flushes, and that fails again on a full disk: the file goes either way.
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


class IndexedReader:
    """Memory-mapped view of a pair of files.

    Attributes: `dtype` (what the index says), `lengths` int32 [S], `pointers` int64 [S] in bytes, `documents` int64 [D]
    boundaries in sequences, `sizes` int64 tokens per document, `offsets` int64 first token of each document in `flat`,
    `flat` all items of the `.bin`, `contiguous` whether the documents fill `flat` from its start in order.
    Raises ValueError for files that are missing, of another format, or incomplete, naming the file and what was found.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        index, binary = idx_path(prefix), bin_path(prefix)
        for path in (index, binary):
            if not path.is_file():
                raise ValueError(f"{path} does not exist; `{prefix}` must be the common prefix of a .bin and an .idx file")
        self.dtype, num_sequences, num_boundaries = _read_header(index)
        expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if index.stat().st_size != expected:
            raise ValueError(
                f"{index} is truncated or damaged: {num_sequences} sequences and {num_boundaries - 1} documents take "
                f"{expected} bytes, the file has {index.stat().st_size}; prepare or copy it again"
            )
        raw = np.memmap(index, mode="r", dtype=np.uint8).view(np.ndarray)
        ends = HEADER.size + np.cumsum([4 * num_sequences, 8 * num_sequences])
        self.lengths = raw[HEADER.size : ends[0]].view("<i4")
        self.pointers = raw[ends[0] : ends[1]].view("<i8")
        self.documents = raw[ends[1] :].view("<i8")
        self._check_boundaries(index)
        num_items = binary.stat().st_size // self.dtype.itemsize
        self.flat: Array = (
            np.memmap(binary, mode="r", dtype=self.dtype, shape=(num_items,)).view(np.ndarray) if num_items else np.zeros(0, self.dtype)
        )
        self._locate_documents(binary)

    def _check_boundaries(self, index: Path) -> None:
        boundaries, lengths = self.documents, self.lengths
        bad = not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != len(lengths) or bool((np.diff(boundaries) < 0).any())
        if bad or (len(lengths) and (lengths.min() < 0 or self.pointers.min() < 0)):
            raise ValueError(
                f"{index} is damaged: its document boundaries or lengths are not those of {len(lengths)} sequences; prepare it again"
            )

    def _locate_documents(self, binary: Path) -> None:
        itemsize = self.dtype.itemsize
        ends = self.pointers + self.lengths.astype(np.int64) * itemsize
        if len(ends) and int(ends.max()) > binary.stat().st_size:
            raise ValueError(
                f"{binary} is truncated: its index needs {int(ends.max())} bytes, "
                f"the file has {binary.stat().st_size}; prepare or copy it again"
            )
        follows = self.pointers[1:] == ends[:-1]
        self.contiguous = bool(follows.all()) and (not len(ends) or self.pointers[0] == 0)
        inside = np.ones(max(len(ends) - 1, 0), bool)
        starts = self.documents[(self.documents > 0) & (self.documents < len(ends))]
        inside[starts - 1] = False
        if not follows[inside].all() or (self.pointers % itemsize).any():
            raise ValueError(f"{binary}: the sequences of a document do not lie one after the other; prepare the file again")
        totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        self.sizes = np.diff(totals[self.documents])
        first = np.minimum(self.documents[:-1], max(len(ends) - 1, 0))
        self.offsets = self.pointers[first] // itemsize if len(ends) else np.zeros(len(first), np.int64)
        self.num_tokens = int(totals[-1])

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def document(self, index: int, start: int = 0, stop: int | None = None) -> Array:
        """Tokens [start, stop) of a document, in the type of the file, without a copy."""
        stop = int(self.sizes[index]) if stop is None else stop
        assert 0 <= start <= stop <= self.sizes[index], f"tokens {start}:{stop} of a document of {self.sizes[index]}"
        offset = int(self.offsets[index])
        return self.flat[offset + start : offset + stop]


def _read_header(index: Path) -> tuple[np.dtype[Any], int, int]:
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if header.startswith(OLD_MAGIC):
        raise ValueError(
            f"{index} has the older format TNTIDX, which is not supported; "
            "convert it to MMIDIDX with Megatron's tools or prepare the text again"
        )
    if not header.startswith(MAGIC):
        raise ValueError(f"{index} is not a token index: it begins with {header[:9]!r} instead of {MAGIC!r} ({len(header)} bytes read)")
    if len(header) < HEADER.size:
        raise ValueError(f"{index} is truncated: {len(header)} bytes, a header alone takes {HEADER.size}; prepare or copy it again")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{index} has version {version} and type code {code}; supported are version 1 and codes {sorted(DTYPES)}")
    return DTYPES[code], num_sequences, num_boundaries


def select_documents(source: IndexedReader, chosen: NDArray[np.bool_], target: str | Path) -> None:
    """Make `target` a file pair of the chosen documents without copying tokens: an own index over a link to the same `.bin`."""
    per_sequence = np.repeat(chosen, np.diff(source.documents))
    counts = np.diff(source.documents)[chosen]
    publish_view(
        source,
        target,
        lengths=source.lengths[per_sequence],
        pointers=source.pointers[per_sequence],
        documents=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]),
    )


def publish_view(source: IndexedReader, target: str | Path, *, lengths: ArrayLike, pointers: ArrayLike, documents: ArrayLike) -> None:
    """Write an index for `target` over a link to the `.bin` of `source`."""
    idx_path(target).unlink(missing_ok=True)
    link_file(bin_path(source.prefix), bin_path(target))
    write_index(idx_path(target), dtype=source.dtype, lengths=lengths, pointers=pointers, documents=documents)


def link_file(source: Path, target: Path) -> None:
    """Hard link, else symbolic link; atomic."""
    temporary = temporary_beside(target)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            os.symlink(source.resolve(), temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
