"""Tokenizers behind one small interface: Hugging Face, sentencepiece, bytes, and one trained here."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from paro_lm.data.encoding import BYTES_EOD, BYTES_VOCAB, EncoderSpec, build_encoder
from paro_lm.data.indexed import temporary_beside

END_OF_TEXT = "<|endoftext|>"
# Files that may lie in a tokenizer's directory and say nothing about its ids.
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".md", ".gitattributes"}


class Tokenizer(Protocol):
    """Texts to ids and back. `vocab_size` is the largest id + 1; special ids are None where the vocabulary has none."""

    path: Path | None
    vocab_size: int
    eod: int | None
    bos: int | None
    eos: int | None
    spec: EncoderSpec

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        ...


class BytesTokenizer:
    """Every UTF-8 byte is a token; 256 ends a document."""

    path: Path | None = None
    vocab_size: int = BYTES_VOCAB
    eod: int | None = BYTES_EOD
    bos: int | None = None
    eos: int | None = BYTES_EOD
    spec = EncoderSpec(kind="bytes")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return build_encoder(self.spec)(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; the end of a document is shown as `<|endoftext|>`."""
        parts: list[bytes] = [END_OF_TEXT.encode() if i == BYTES_EOD else bytes([i]) for i in map(int, ids)]
        return b"".join(parts).decode("utf-8", "replace")


class SentencePieceTokenizer:
    """A sentencepiece `.model` file."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"data.tokenizer: {path} is not a sentencepiece model ({error})") from error
        self.path: Path | None = path
        self.vocab_size = int(self._model.vocab_size())
        self.bos, self.eos = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))
        self.eod = self.eos
        self.spec = EncoderSpec(kind="sentencepiece", source=str(path))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self._model.encode(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


class HFTokenizer:
    """A Hugging Face tokenizer: a directory, or a bare tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if path.is_dir():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            else:
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:
            raise ValueError(f"data.tokenizer: {path} does not load as a Hugging Face tokenizer: {error}") from error
        self.path: Path | None = path
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(len(self._tokenizer), max(vocabulary.values(), default=-1) + 1)
        self.bos, self.eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        named = (vocabulary.get(name) for name in (END_OF_TEXT, "</s>", "<eos>"))
        self.eod: int | None = self.eos if self.eos is not None else next((i for i in named if i is not None), None)
        if self._tokenizer.is_fast:
            self.spec = EncoderSpec(kind="tokenizers", source=self._tokenizer.backend_tokenizer.to_str())
        else:
            self.spec = EncoderSpec(kind="transformers", source=str(path))
        self._encode = build_encoder(self.spec)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(source: str | Path) -> Tokenizer:
    """`bytes`, a directory with Hugging Face files, a tokenizer.json, or a sentencepiece .model.

    A directory without Hugging Face files but with one .model loads that. Raises ValueError for anything else.
    """
    if str(source) == "bytes":
        return BytesTokenizer()
    path = Path(source).expanduser().resolve()
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if names & {"tokenizer.json", "tokenizer_config.json", "vocab.json"}:
            return HFTokenizer(path)
        models = sorted(path.glob("*.model"))
        if len(models) == 1:
            return SentencePieceTokenizer(models[0])
        raise ValueError(
            f"data.tokenizer={source}: the directory has no tokenizer.json, tokenizer_config.json, vocab.json or single .model file"
        )
    if not path.is_file():
        raise ValueError(
            f"data.tokenizer={source}: no such file or directory; give a Hugging Face directory, tokenizer.json, .model, or `bytes`"
        )
    return HFTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def tokenizer_digest(source: str | Path) -> str:
    """Hash of what decides the ids: the tokenizer's files, not model weights beside them, nor where they lie."""
    digest = hashlib.blake2b(digest_size=12)
    if str(source) == "bytes":
        return "bytes"
    path = Path(source).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and file.suffix not in _WEIGHTS and file.name != ".gitattributes":
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def train_tokenizer(texts: Iterator[str], folder: Path, *, vocab_size: int) -> None:
    """Train a byte-level BPE of at most `vocab_size` ids (little text gives fewer) and save it as a Hugging Face directory.

    Id 0 is `<|endoftext|>`, every text can be encoded, decoding gives it back exactly. `folder` appears complete or not at all.
    """
    if vocab_size < BYTES_VOCAB:
        raise ValueError(
            f"data.vocab_size={vocab_size}: a byte-level vocabulary needs at least {BYTES_VOCAB} (256 bytes and the end of text)"
        )
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    temporary = temporary_beside(folder)
    try:
        tokenizer.save_pretrained(str(temporary))
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
