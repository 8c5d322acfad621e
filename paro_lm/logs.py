"""Messages of a run: a log file per rank, rank 0 on the console, and the first failure as the last words of every rank."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from rich.console import Console

from paro_lm.console import say

LOGGER = "paro_lm"


class ReportedError(RuntimeError):
    """A failure that `report_failure` has told of; nothing more is to be printed."""


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class ConsoleHandler(logging.Handler):
    """Prints messages through the console that also draws the progress bar, so that they land above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message; its level only where it is worth a look."""
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        style = "yellow" if record.levelno == logging.WARNING else "red" if record.levelno > logging.WARNING else None
        say(self.console, prefix + self.format(record), style=style)


def log_path(folder: Path, rank: int) -> Path:
    """Log file of a rank in the run folder."""
    return folder / "logs" / f"rank_{rank}.log"


def setup_logging(folder: Path, rank: int, *, console: Console | None = None) -> logging.Logger:
    """Send everything that is logged to logs/rank_<rank>.log, and on rank 0 what this package logs and python's warnings to the console.

    Called by every rank before the process group starts; rank 0 also forgets a failure of an earlier start. Calling it again
    replaces what the earlier call set up.
    """
    path = log_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _failure_path(folder).unlink(missing_ok=True)
    root, logger, warnings = logging.getLogger(), logging.getLogger(LOGGER), logging.getLogger("py.warnings")
    for owner in (root, logger, warnings):
        for handler in [handler for handler in owner.handlers if getattr(handler, "name", None) == LOGGER]:
            owner.removeHandler(handler)
            handler.close()
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(FORMAT))
    to_file.set_name(LOGGER)
    root.addHandler(to_file)
    if rank == 0:
        to_console = ConsoleHandler(console or Console())
        to_console.set_name(LOGGER)
        logger.addHandler(to_console)
        warnings.addHandler(to_console)
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    return logger


def report_failure(folder: Path, rank: int, error: BaseException, *, stream: TextIO | None = None) -> str:
    """Make the first failure of the run the last thing a person reads, whichever rank dies last; returns the line that was printed.

    One rank fails, then the others because it is gone. The first to fail leaves its message in the run folder (which all nodes share)
    and prints its traceback; every rank writes its own traceback to its log file and ends with the message of the first. Under
    torchrun the error is also handed to the launcher, whose summary names the first failing rank.
    """
    stream = stream or sys.stderr
    text = "".join(traceback.format_exception(error))
    logging.getLogger(LOGGER).handlers.clear()  # the console is for the first failure only; the file handler sits on the root
    logging.getLogger(LOGGER).error("rank %d failed:\n%s", rank, text)
    message = f"{type(error).__name__}: {error}"
    first = _claim_failure(folder, rank, message)
    if first["rank"] == rank:
        print(text, file=stream)
    line = f"rank {first['rank']} failed first: {first['message']} (logs: {log_path(folder, int(first['rank'])).parent})"
    print(line, file=stream, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return line


def _failure_path(folder: Path) -> Path:
    return folder / "logs" / "first_failure.json"


def _claim_failure(folder: Path, rank: int, message: str) -> dict[str, str | int | float]:
    """The first failure of this run: this one, unless another rank was here before."""
    mine: dict[str, str | int | float] = {"rank": rank, "message": message, "time": time.time()}
    path = _failure_path(folder)
    temporary = path.with_name(f"{path.name}.{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(mine), encoding="utf-8")
        try:
            os.link(temporary, path)  # fails if it exists: of several ranks one wins, and nobody reads half a file
        except FileExistsError:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        finally:
            temporary.unlink()
    except (OSError, ValueError):
        pass  # a folder that cannot be written must not hide the failure itself
    return mine
