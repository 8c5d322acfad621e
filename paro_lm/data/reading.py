"""Input files of the preparation: which there are, and their content cut into chunks that a worker can encode."""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

CHUNK_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst"}
COMPRESSED = {".gz", ".zst"}
NOT_TEXT = "not text; set data.text_key or correct the input"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of one input. `kind` text: `blob` is one document or a piece of it, `ends` whether the document ends with it;
    jsonl: `blob` has complete lines, the first with number `first`; rows: `texts` are documents (of several columns: rows as dicts),
    the first with number `first`.
    `read` = bytes of the input file that this chunk advanced."""

    kind: str
    path: str
    blob: bytes = b""
    texts: tuple[Any, ...] = ()
    first: int = 1
    ends: bool = True
    read: int = 0


def format_of(path: Path) -> str:
    """text | jsonl | parquet | dataset, from the name."""
    if path.is_dir():
        return "dataset"
    suffix = _suffix(path)
    if suffix == ".parquet":
        return "parquet"
    return "jsonl" if suffix in JSON_SUFFIXES else "text"


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def find_files(entry: str, key: str) -> list[Path]:
    """Files that an entry of `data.train` or `data.valid` names, sorted: a file, a glob, a folder of text, jsonl and parquet
    files, or a folder that `datasets.save_to_disk` wrote. Raises ValueError when there is none, or one is empty."""
    path = Path(entry).expanduser()
    if path.is_dir():
        if (path / "state.json").is_file():
            return [path]
        files = [f for f in path.rglob("*") if f.is_file() and _suffix(f) in TEXT_SUFFIXES | JSON_SUFFIXES | {".parquet"}]
    elif path.is_file():
        files = [path]
    else:
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not files:
        raise ValueError(
            f"{key}: {entry!r} is neither a file, nor a pattern or folder with files, "
            f"nor the prefix of a .bin and .idx pair (relative to {Path.cwd()})"
        )
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{key}: {file} is empty (0 bytes); remove it or give another file")
    return sorted(files)


def size_of(path: Path) -> int:
    """Bytes on disk."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size


def read_chunks(path: Path, key: str | tuple[str, ...]) -> Iterator[Chunk]:
    """The chunks of one input, in order; of tables the column `key`, or rows of the columns `key`.

    Raises ValueError, naming the file, for what cannot be read.
    """
    kind = format_of(path)
    if kind in ("parquet", "dataset"):
        yield from _row_chunks(path, kind, key)
        return
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        source = stack.enter_context(_decompress(raw, path))
        try:
            yield from _byte_chunks(source, raw, path, kind)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}; compress or copy it again") from error


def _byte_chunks(source: IO[bytes], raw: IO[bytes], path: Path, kind: str) -> Iterator[Chunk]:
    line, before = 1, 0
    size = CHUNK_BYTES if kind == "jsonl" else PIECE_BYTES
    blob = _read_lines(source, size)
    while blob:
        # Looking one block ahead tells whether a document ends.
        following = _read_lines(source, size)
        if kind == "jsonl":
            chunk = Chunk(kind=kind, path=str(path), blob=blob, first=line, read=raw.tell() - before)
        else:
            chunk = Chunk(kind=kind, path=str(path), blob=blob, first=line, ends=not following, read=raw.tell() - before)
        before = raw.tell()
        yield chunk
        line += blob.count(b"\n")
        blob = following


def _read_lines(source: IO[bytes], size: int) -> bytes:
    """About `size` bytes, to the end of a line: a cut in the middle of a character or a word would change tokens."""
    block = source.read(size)
    return block if not block or block.endswith(b"\n") else block + source.readline()


def _decompress(raw: IO[bytes], path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return io.BufferedReader(reader, CHUNK_BYTES)
    return contextlib.nullcontext(raw)


def _row_chunks(path: Path, kind: str, key: str | tuple[str, ...]) -> Iterator[Chunk]:
    total, row, done = size_of(path), 0, 0
    columns = (key,) if isinstance(key, str) else key
    num_rows, batches = _open_parquet(path, columns) if kind == "parquet" else _open_dataset(path, columns)
    for rows in batches:
        texts = rows if not isinstance(key, str) else [row[key] for row in rows]
        advanced = total * (row + len(texts)) // max(num_rows, 1)
        yield Chunk(kind="rows", path=str(path), texts=tuple(texts), first=row + 1, read=advanced - done)
        row, done = row + len(texts), advanced


def _open_parquet(path: Path, columns: tuple[str, ...]) -> tuple[int, Iterator[list[dict[str, Any]]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    _check_columns(path, columns, file.schema_arrow.names)
    return file.metadata.num_rows, (batch.to_pylist() for batch in file.iter_batches(512, columns=list(columns)))


def _open_dataset(path: Path, columns: tuple[str, ...]) -> tuple[int, Iterator[list[dict[str, Any]]]]:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    _check_columns(path, columns, loaded.column_names)
    batches = loaded.select_columns(list(columns)).iter(512)
    return len(loaded), ([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)] for batch in batches)


def _check_columns(path: Path, columns: Sequence[str], names: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(names)}: {_hint(names)}")


def _hint(names: Sequence[str]) -> str:
    """What to set when a field is not there but `names` are."""
    if "messages" in names:
        return "set data.format=messages (data=chat)"
    if {"prompt", "completion"} <= set(names):
        return "set data.format=completion (data=instructions)"
    return "set data.text_key, data.messages_key, or data.prompt_key and data.completion_key"


def texts_of(chunk: Chunk, text_key: str) -> list[str]:
    """The documents of a chunk; null counts as empty. Raises ValueError with file and line, row or byte for what is no text."""
    if chunk.kind == "rows":
        for number, text in enumerate(chunk.texts, chunk.first):
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{chunk.path}: row {number}: column {text_key!r} holds {type(text).__name__}, {NOT_TEXT}")
        return [text or "" for text in chunk.texts]
    if chunk.kind == "text":
        return [_decode(chunk.blob, chunk.path, chunk.first)]
    texts = []
    for number, line in enumerate(chunk.blob.split(b"\n"), chunk.first):
        if line.strip():
            texts.append(_json_text(line, chunk.path, number, text_key))
    return texts


def rows_of(chunk: Chunk, keys: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a chunk, each with where it stands (file and line or row) and its values of `keys`.

    Raises ValueError for a file that has no rows, and for a row without one of the keys.
    """
    if chunk.kind == "rows":
        return [(f"{chunk.path}: row {number}", row) for number, row in enumerate(chunk.texts, chunk.first)]
    if chunk.kind == "text":
        raise ValueError(f"{chunk.path}: data.format other than text needs rows: give jsonl or parquet files")
    result = []
    for number, line in enumerate(chunk.blob.split(b"\n"), chunk.first):
        if line.strip():
            row = _json_row(line, chunk.path, number, keys)
            result.append((f"{chunk.path}:{number}", {key: row[key] for key in keys}))
    return result


def _decode(blob: bytes, path: str, first_line: int) -> str:
    try:
        return blob.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + blob.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: not UTF-8 (byte {blob[error.start]:#04x}); convert the file, for instance with iconv") from error


def _json_row(line: bytes, path: str, number: int, keys: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(_decode(line, path, number))
    except json.JSONDecodeError as error:
        hint = "one object a line is expected"
        if line.lstrip()[:1] == b"[":
            hint = "a file that is one JSON array must be rewritten with one object a line"
        raise ValueError(f"{path}:{number}: not valid JSON ({error}): {hint}; it begins {line[:60]!r}") from error
    for key in keys:
        if not isinstance(row, dict) or key not in row:
            found = f"its fields are {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
            hint = _hint(list(row) if isinstance(row, dict) else [])
            raise ValueError(f"{path}:{number}: no field {key!r}, {found}; {hint} or correct the line")
    return row


def _json_text(line: bytes, path: str, number: int, text_key: str) -> str:
    text = _json_row(line, path, number, (text_key,))[text_key]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{path}:{number}: field {text_key!r} holds {type(text).__name__}, {NOT_TEXT}")
    return text or ""
