"""Where a Hugging Face checkpoint lies: a local folder, or a download from the hub."""

from __future__ import annotations

import re
from pathlib import Path

HUB = "hf://"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def is_hf(path: Path | str) -> bool:
    """Whether a path means a Hugging Face checkpoint: a folder with a config.json, or `hf://owner/name`."""
    return str(path).startswith(HUB) or (Path(path) / "config.json").is_file()


def hf_folder(source: Path | str, *, allow_pickle: bool = False) -> Path:
    """The folder of a checkpoint: `source` itself, or for a hub id (owner/name or hf://owner/name) the downloaded copy.

    Raises ValueError, with what to do, when there is no such folder or model, it is gated, or the hub cannot be reached.
    """
    path = Path(source).expanduser()
    if not str(source).startswith(HUB):
        if path.is_dir():
            return path
        if path.exists() or not _HUB_ID.fullmatch(str(source)):
            raise ValueError(f"{source}: there is no such folder; give the folder of a Hugging Face checkpoint, or hf://owner/name.")
    return _download(str(source).removeprefix(HUB), (*_WANTED, *(("*.bin",) if allow_pickle else ())))


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ValueError(
            f"hf://{name} is gated: accept its conditions on its page of the hub, then log in with `hf auth login` (or set HF_TOKEN)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"hf://{name}: the hub has no such model, or it is private and you are not logged in (`hf auth login`); there is no folder "
            "of that name either."
        ) from error
    except HFValidationError as error:
        raise ValueError(f"hf://{name} is no name of a model on the hub; give hf://owner/name. ({error})") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"hf://{name} is not in the local cache and the hub cannot be reached ({type(error).__name__}); check the network "
            "(and HF_HUB_OFFLINE), or give the folder of a copy."
        ) from error
