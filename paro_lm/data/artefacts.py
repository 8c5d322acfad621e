"""Artefacts of the preparation: their names, their manifests, and building each of them once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from paro_lm.data.indexed import temporary_beside

VERSION = 1  # part of every name: a change of what preparation writes makes old artefacts unknown


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What token files must agree on. `digest` identifies the tokenizer, `source` says where it is."""

    source: str | None
    digest: str | None
    vocab_size: int
    eod: int | None


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.json")


def write_manifest(prefix: Path, vocabulary: Vocabulary, **facts: Any) -> None:
    """Say beside a pair what it is made of; written last, so its presence means that the pair is complete."""
    path = manifest_path(prefix)
    values = {
        "source": vocabulary.source,
        "digest": vocabulary.digest,
        "vocab_size": vocabulary.vocab_size,
        "eod": vocabulary.eod,
        **facts,
    }
    write_json(path, values)


def read_manifest(prefix: Path) -> dict[str, Any] | None:
    """What `write_manifest` wrote, or None if there is none or it is not ours."""
    try:
        values = json.loads(manifest_path(prefix).read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and {"source", "digest", "vocab_size", "eod"} <= values.keys() else None


def write_json(path: Path, values: object) -> None:
    temporary = temporary_beside(path)
    try:
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def once(target: Path, cache: Path, done: Callable[[], bool], build: Callable[[], None]) -> None:
    """Build an artefact unless it is there; others that want the same one wait for it."""
    if done():
        return
    with FileLock(cache / f".{target.name}.lock"):
        if not done():
            # What a killed process left; nobody else writes here while the lock is held.
            for left_over in (*target.glob(".*.tmp"), *cache.glob(f".{target.name}.*.tmp")):
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
            build()


def make_key(*parts: object) -> str:
    return hashlib.blake2b(json.dumps([VERSION, *parts]).encode(), digest_size=8).hexdigest()


def content_hash(path: Path, cache: Path) -> str:
    """Hash of a file's (or folder's) content. Large files are read once: their hash is kept under path, size and time."""
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    if len(files) != 1 or path.is_dir():
        return make_key([[f.name, content_hash(f, cache)] for f in files])
    stat = path.stat()
    memo = cache / "hashes" / make_key(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    settled = time.time() - stat.st_mtime > 10  # a file that is still being written may change within one tick of its clock
    if settled and memo.is_file() and (known := memo.read_text().strip()):
        return known
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if settled and stat.st_size > 1 << 24:
        memo.parent.mkdir(exist_ok=True)
        temporary = temporary_beside(memo)
        temporary.write_text(digest.hexdigest())
        os.replace(temporary, memo)
    return digest.hexdigest()
