"""Experiment trackers beside metrics.jsonl: tensorboard and Weights & Biases. Neither is imported unless the config asks for it."""

from __future__ import annotations

import importlib.util
import math
import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from paro_lm.config import LoggingConfig


def tracker_problems(cfg: LoggingConfig) -> list[str]:
    """What keeps the trackers of this config from starting: packages that are missing, no key for an online run. Starts nothing."""
    problems = []
    if cfg.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append("logging.tensorboard=true needs the package tensorboard: pip install tensorboard, or logging.tensorboard=false.")
    if cfg.wandb not in ("off", "offline", "online"):
        problems.append(f"logging.wandb={cfg.wandb} is unknown; choose off, offline or online.")
    elif cfg.wandb != "off" and importlib.util.find_spec("wandb") is None:
        problems.append(f"logging.wandb={cfg.wandb} needs the package wandb: pip install wandb, or logging.wandb=off.")
    elif cfg.wandb == "online" and not _has_wandb_key():
        problems.append(
            "logging.wandb=online finds no API key: run `wandb login` or set WANDB_API_KEY, or use logging.wandb=offline "
            "(files in the run folder that `wandb sync` sends later)."
        )
    return problems


def _has_wandb_key() -> bool:
    """Whether wandb would find a key where it looks itself: its environment variables, else the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


class TensorboardTracker:
    """Scalars in a tensorboard folder; a resume hides what earlier files hold after its step."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per value; what is not finite is left out of the curves."""
        for key, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(key, value, step)

    def close(self, *, failed: bool) -> None:
        """Write out the rest."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run whose id lives in the run folder, so that a resume continues it. offline writes files and sends nothing.

    `step` is logged as the axis of all other values, so steps that are repeated after a resume are taken too.
    """

    def __init__(self, folder: Path, *, mode: str, project: str, run_name: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # crash reports go to a third party, even from offline runs
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow" if mode == "online" else None,  # offline knows no server to resume from; the id joins the parts on sync
            mode=cast(Literal["offline", "online"], mode),
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """End this part of the run."""
        self._run.finish(exit_code=int(failed))
