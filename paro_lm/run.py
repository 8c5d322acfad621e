"""The folder of a run, and what a start with the same name means: begin, continue, or say that it is finished."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paro_lm.checkpoint.folder import find_checkpoint, latest_checkpoint, read_meta
from paro_lm.config import Config, difference, read_config, resolved_yaml

FREE_TO_CHANGE = (
    "steps", "epochs", "output_dir", "micro_batch_size", "parallel", "eval", "checkpoint", "logging", "runtime", "cluster",
    "data.cache_dir", "data.num_workers", "model.name", "precision.name",
)  # fmt: skip
"""Options that a resume may change without being asked: they do not alter what the same steps compute."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""Files of a Hugging Face folder that are no part of its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a start does: `checkpoint` is loaded before the first step, `finished` starts none; `changes` are told to the user."""

    folder: Path
    checkpoint: Path | None
    finished: bool
    step: int = 0
    changes: tuple[str, ...] = ()

    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def goes_on(self) -> bool:
        """Whether this start continues the run of this folder, and not an attempt that never saved, or another run."""
        return self.checkpoint is not None and self.checkpoint.resolve().is_relative_to(self.folder.resolve())

    def create(self, cfg: Config, tokenizer: Path | None) -> None:
        """Make the folder with the resolved config and a copy of the tokenizer, so that it is understood by itself.

        Raises ValueError when the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.goes_on and self.config_path.exists()):
                self.write_config(cfg)
            if tokenizer is not None and tokenizer.resolve() != self.tokenizer.resolve():
                self._copy_tokenizer(tokenizer)
        except OSError as error:
            raise ValueError(
                f"output_dir={cfg.output_dir}: cannot write {self.folder} ({error}); choose a folder you can write to."
            ) from error

    def write_config(self, cfg: Config) -> None:
        """Replace `config.yaml`: by `create` for a run that begins, after its checkpoint has loaded for one that goes on."""
        temporary = self.config_path.with_suffix(".yaml.tmp")
        temporary.write_text(resolved_yaml(cfg), encoding="utf-8")
        temporary.replace(self.config_path)

    def _copy_tokenizer(self, source: Path) -> None:
        """Copy it all or not at all. What an attempt without a checkpoint left may be another one: it is replaced."""
        if self.goes_on and self.tokenizer.exists():
            return
        if not source.exists():
            raise ValueError(f"the tokenizer {source} that the data were made with is not there; set data.tokenizer to where it is now.")
        temporary = self.folder / ".tokenizer.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if source.is_dir():  # maybe the folder of a whole model, maybe with this run inside
            for path in source.iterdir():
                if path.is_file() and not any(path.match(pattern) for pattern in WEIGHTS):
                    shutil.copy(path, temporary)
        else:
            shutil.copy(source, temporary / ("tokenizer.json" if source.suffix == ".json" else source.name))
        shutil.rmtree(self.tokenizer, ignore_errors=True)
        temporary.rename(self.tokenizer)


def open_run(cfg: Config) -> Run:
    """Decide what this start does, from what lies in the run folder; nothing is written.

    auto continues the run if it has a checkpoint, and refuses a config that differs in more than FREE_TO_CHANGE; never refuses a
    folder that exists; a path continues from that run or checkpoint whatever the differences. Raises ValueError with the choices.
    """
    folder = Path(cfg.output_dir) / cfg.run_name
    _check_writable(cfg, folder)
    resume = cfg.checkpoint.resume
    if resume == "never":
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"checkpoint.resume=never, but the run folder {folder} exists; "
                "choose another run_name, remove the folder, or continue it with checkpoint.resume=auto."
            )
        return Run(folder=folder, checkpoint=None, finished=False)
    given = None if resume == "auto" else find_checkpoint(resume)
    own = latest_checkpoint(folder / "checkpoints")
    if given is not None and own is None:  # once this run has checkpoints of its own, they are newer than what it started from
        step = int(read_meta(given)["step"])
        if step >= cfg.steps:
            raise ValueError(
                f"steps={cfg.steps} leaves nothing to do after step {step} of checkpoint.resume={given}: "
                f"steps count from the start of that run; give at least steps={step + 1}."
            )
        return Run(folder=folder, checkpoint=given, finished=False, step=step)
    if own is None:
        return Run(folder=folder, checkpoint=None, finished=False)
    if given is not None and given.resolve() != own.resolve() and given.resolve().parent == own.resolve().parent:
        raise ValueError(
            f"checkpoint.resume={given} is a checkpoint of this run, whose newest is {own.name}. To go back to it, move the newer "
            f"ones out of {own.parent}; to branch from it, choose another run_name."
        )
    step = int(read_meta(own)["step"])
    changes = difference(read_config(folder / "config.yaml"), cfg)
    texts = tuple(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
    refused = [text for key, text in zip(changes, texts, strict=True) if not _is_free(key)]
    if refused and resume == "auto":
        raise ValueError(
            f"the run {folder} was started with other options, and is at step {step}:\n  "
            + "\n  ".join(refused)
            + f"\nTo continue it, give the old values; to continue it with the new ones, add checkpoint.resume={folder}; "
            "to start afresh, choose another run_name."
        )
    return Run(folder=folder, checkpoint=own, finished=step >= cfg.steps, step=step, changes=texts)


def check_tokenizer(run: Run, tokenizer: Path | str | None, digest: str | None) -> None:
    """Raises ValueError when the data of a run that goes on were made with another tokenizer: its ids would mean other text."""
    assert run.checkpoint is not None
    meta = read_meta(run.checkpoint)
    known = meta.get("tokenizer_digest")
    kept = run.checkpoint.parent.parent / "tokenizer"
    is_kept = isinstance(tokenizer, Path) and tokenizer.resolve() == kept.resolve()
    if known is None or digest is None or known == digest or is_kept:
        return
    raise ValueError(
        f"{run.checkpoint} was trained with another tokenizer ({meta['tokenizer']}) than the data have now, so its ids mean other "
        f"text (without data.tokenizer one is trained on data.train, which may have changed). To go on with the old one: "
        f"data.tokenizer={kept} checkpoint.resume={run.checkpoint.parent.parent}"
    )


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)


def _check_writable(cfg: Config, folder: Path) -> None:
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"output_dir={cfg.output_dir}: {parent} is not a folder that can be written; choose another output_dir.")
