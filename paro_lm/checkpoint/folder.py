"""The folder of checkpoints: which of them are complete, which is the newest, how one is published and how old ones go.

    <folder>/
      latest             the name of the newest checkpoint, moved last
      step_<k>/          a published checkpoint; it appears under this name by one rename, when everything in it is on disk
        __<r>_0.distcp   the boxes that rank r wrote, and .metadata, which lists them: a DCP checkpoint
        rank_<r>.pt      what only rank r needs to go on (its random state)
        meta.json        format_version, step, world_size, and what the run wants to remember
        manifest.json    the commit marker, written last: serial number, sizes and checksums of all other files
      .tmp_*             an unfinished save or deletion; the next save removes it
      .old_step_<k>      the former step_<k> while a new one takes its place

"Newest" is the highest serial number (order of publication), not the highest step: a run that went on from an older checkpoint
continues its own line. A folder without a commit marker is no checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paro_lm.checkpoint.files import FileRecord, replace_file, sha256_of, sync_folder, write_file

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
META, MANIFEST, LATEST = "meta.json", "manifest.json", "latest"
_PUBLISHED = re.compile(r"(?:\.old_)?step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The commit marker: place in the order of publication, and what every file of the checkpoint looks like."""

    serial: int
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        files = {name: record.to_json() for name, record in sorted(self.files.items())}
        return json.dumps({"serial": self.serial, "files": files}, indent=1).encode()


def read_manifest(path: Path) -> Manifest:
    """The commit marker of a checkpoint; ValueError names the file when it is missing or damaged."""
    document = _read_json(path, MANIFEST)
    try:
        files = {name: FileRecord(**record) for name, record in document["files"].items()}
        return Manifest(serial=document["serial"], files=files)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path / MANIFEST, f"it is not a manifest ({error!r})") from error


def read_meta(path: Path | str) -> dict[str, Any]:
    """`meta.json` of a checkpoint: format_version, step, world_size, and what was given to `Checkpointer.save` as meta.

    Raises ValueError, naming the file, when it is missing, damaged, or of a newer format than this version can read.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"There is no checkpoint at {path}: no such folder. Give the path of a step_<k> folder.")
    meta = _read_json(path, META)
    version = meta.get("format_version")
    if not isinstance(version, int):
        raise _damaged(path / META, "it has no format_version")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format_version {version}; this version of paro_lm reads up to {FORMAT_VERSION}. "
            "Install a newer paro_lm to read it."
        )
    return meta


def verify_files(path: Path, *, checksums_of: Iterable[str] | None = None) -> None:
    """Compare the files of a checkpoint with its manifest: the size of all, the checksum of the named ones (None: of all).

    Raises ValueError naming every missing, truncated or changed file.
    """
    files = read_manifest(path).files
    problems = []
    for name, record in files.items():
        if not (path / name).exists():
            problems.append(f"{name} is missing")
        elif (size := (path / name).stat().st_size) != record.size:
            problems.append(f"{name} has {size} bytes, {record.size} were written")
    if not problems:
        chosen = files if checksums_of is None else checksums_of
        problems = [f"{name} has changed (checksum)" for name in chosen if sha256_of(path / name) != files[name].sha256]
    if problems:
        raise _damaged(path, "; ".join(problems))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"


def published(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A former version of a step counts only while there is no new one."""
    if not folder.is_dir():
        return []
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        match = _PUBLISHED.fullmatch(path.name)
        if match is None or (path.name.startswith(".old_") and has_marker(step_folder(folder, int(match[1])))):
            continue
        try:
            found.append((read_manifest(path).serial, path))
        except ValueError as error:
            logger.debug("%s is not a complete checkpoint: %s", path, error)
    return [path for _, path in sorted(found)]


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The newest complete checkpoint of a folder, None when there is none.

    When `latest` names a checkpoint whose commit marker is there but unreadable, that one is returned, so that reading it reports
    the damage; a crash cannot leave that, and going on from an older state in silence would lose work.
    """
    folder = Path(folder)
    complete = published(folder)
    try:
        named = folder / (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        named = folder
    if _PUBLISHED.fullmatch(named.name) and has_marker(named) and named not in complete:
        return named
    return complete[-1] if complete else None


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint that a user means by a path: a step_<k> folder, a folder of checkpoints, or a run folder.

    Raises ValueError when there is none.
    """
    path = Path(path)
    if _PUBLISHED.fullmatch(path.name):
        return path
    for folder in (path, path / "checkpoints"):
        newest = latest_checkpoint(folder)
        if newest is not None:
            return newest
    if (path / META).exists() or (path / MANIFEST).exists():
        return path
    raise ValueError(f"There is no complete checkpoint at {path}. Give a run folder, its checkpoints folder, or a step_<k> folder.")


def has_marker(path: Path) -> bool:
    return (path / MANIFEST).exists()


def clear_leftovers(folder: Path) -> None:
    """Remove what a crashed save left, and bring back a former step whose successor was never published."""
    for path in folder.glob(".old_step_*"):
        successor = folder / path.name.removeprefix(".old_")
        if has_marker(path) and not has_marker(successor):
            shutil.rmtree(successor, ignore_errors=True)
            os.rename(path, successor)
        else:
            shutil.rmtree(path)
    for path in folder.glob(".tmp_*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(temporary: Path, folder: Path, step: int, files: dict[str, FileRecord], meta: bytes) -> Path:
    """Commit a written temporary folder as step_<k>, then move `latest`.

    Raises ValueError when a file is not there: then the ranks do not write into one file system.
    """
    for name, record in files.items():
        path = temporary / name
        if not path.exists() or path.stat().st_size != record.size:
            raise ValueError(
                f"{path} was written by another rank but cannot be seen from rank 0: "
                "the checkpoint folder must be on a file system that all nodes share."
            )
    files = files | {META: write_file(temporary / META, meta)}
    sync_folder(temporary)
    complete = published(folder)
    serial = read_manifest(complete[-1]).serial + 1 if complete else 1
    write_file(temporary / MANIFEST, Manifest(serial=serial, files=files).to_bytes())
    sync_folder(temporary)

    final = step_folder(folder, step)
    former = folder / f".old_{final.name}"
    if final.exists():
        os.rename(final, former)
    os.rename(temporary, final)
    sync_folder(folder)
    replace_file(folder / LATEST, final.name.encode() + b"\n")
    return final


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` complete checkpoints (0 = keep all) and former versions of steps.

    A checkpoint is renamed first, so that a crash leaves none that is complete by name only. What cannot be deleted is logged:
    the new checkpoint is published, and a run does not end for an old one.
    """
    complete = published(folder)
    doomed = list(folder.glob(".old_step_*")) + (complete[:-keep_last] if keep_last else [])
    for path in doomed:
        try:
            trash = path.with_name(f".tmp_deleted_{path.name.lstrip('.')}")
            os.rename(path, trash)
            shutil.rmtree(trash)
        except OSError as error:
            logger.warning("Cannot delete the old checkpoint %s: %s", path, error)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads((path / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, f"{name} is missing, so it was never completed or was copied in part") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        size = (path / name).stat().st_size
        raise _damaged(path / name, f"it is not valid JSON ({size} bytes: {error})") from error
    if not isinstance(document, dict):
        raise _damaged(path / name, "it is not a JSON object")
    return document


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"The checkpoint {path} is damaged: {why}. Move it away to continue from the one before, or start another run_name from one "
        "(checkpoint.resume=<path of a step_<k> folder>)."
    )
