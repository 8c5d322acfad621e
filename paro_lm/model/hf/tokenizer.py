"""Tokenizer files of an export, and the ids at which a model stops."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paro_lm.model.hf.config import read_json

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Special ids of a tokenizer; `stop` are those that end a generation: end of text, end of a turn."""

    bos: int | None
    pad: int | None
    stop: tuple[int, ...]

    def as_config(self) -> dict[str, Any]:
        """The keys of config.json."""
        return {"bos_token_id": self.bos, "pad_token_id": self.pad, "eos_token_id": self.stop[0] if self.stop else None}


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")) or any(
        folder.glob("*.model")
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Write the files of a tokenizer (a folder, a tokenizer.json or a sentencepiece model) so that transformers loads it from
    `target`, whatever model lies there. Files that say themselves which class they are for are copied as they are.

    Raises ValueError when transformers cannot load the source.
    """
    if source.is_dir():
        files = [path for path in source.iterdir() if path.name in FILES or path.suffix == ".model"]
        if _names_class(source):
            for path in files:
                shutil.copyfile(path, target / path.name)
            return
        if len(files) != 1 or (source / "config.json").exists():  # the class follows from the model that the folder is of
            _load(source).save_pretrained(str(target))
            return
        source = files[0]
    from transformers import LlamaTokenizer, PreTrainedTokenizerFast

    try:
        if source.suffix == ".json":  # its special tokens have no roles yet
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source))
            tokenizer.eos_token = next((name for name in (END_OF_TEXT, "</s>", "<eos>") if name in tokenizer.get_vocab()), None)
        else:
            shutil.copyfile(source, target / "tokenizer.model")
            tokenizer = LlamaTokenizer.from_pretrained(str(target))
    except Exception as error:
        raise ValueError(f"{source}: transformers cannot load this tokenizer ({error}).") from error
    tokenizer.save_pretrained(str(target))


def _names_class(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return path.is_file() and "tokenizer_class" in read_json(path)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(f"{folder}: transformers cannot load its tokenizer ({error}).") from error


def write_bytes_tokenizer(target: Path) -> None:
    """The tokenizer `bytes` as transformers knows it: id b is the byte b, 256 the end of a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=_bytes_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT).save_pretrained(str(target))


def _bytes_vocabulary() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves, the others from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    return vocabulary | {END_OF_TEXT: 256}


def token_ids(folder: Path) -> TokenIds:
    """The special ids of the tokenizer in a folder. Raises ValueError when transformers cannot load it."""
    tokenizer = _load(folder)
    vocabulary = tokenizer.get_vocab()
    stop = [tokenizer.eos_token_id, vocabulary.get(END_OF_TEXT), _end_of_turn(tokenizer)]
    return TokenIds(
        bos=tokenizer.bos_token_id, pad=tokenizer.pad_token_id, stop=tuple(dict.fromkeys(token for token in stop if token is not None))
    )


def _end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template puts behind what the assistant said."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    said = "0123456789"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], tokenize=False)
    _, _, rest = text.rpartition(said)
    ids = tokenizer.encode(rest.strip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None
