"""Text to token ids, in a module that imports neither torch nor transformers: preparation workers start with it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BYTES_VOCAB = 257
BYTES_EOD = 256


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What a worker needs to encode as the tokenizer does.

    `kind`: bytes | tokenizers (`source` = its JSON) | sentencepiece (`source` = path of the .model) | transformers (`source` =
    directory of a tokenizer that has no fast form).
    """

    kind: str
    source: str = ""


class Encoder(Protocol):
    """Encodes whole texts without special tokens."""

    def __call__(self, texts: list[str]) -> list[list[int]]: ...


def build_encoder(spec: EncoderSpec) -> Encoder:
    """The function behind a spec."""
    if spec.kind == "bytes":
        return lambda texts: [list(text.encode("utf-8", "replace")) for text in texts]
    if spec.kind == "tokenizers":
        return _tokenizers_encoder(spec.source)
    if spec.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=spec.source)
        return lambda texts: list(model.encode(texts))
    assert spec.kind == "transformers", spec.kind
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(spec.source)
    return lambda texts: slow(texts, add_special_tokens=False)["input_ids"]


def _tokenizers_encoder(source: str) -> Encoder:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # lone surrogates, which JSON can spell and UTF-8 cannot
            clean = [text.encode("utf-8", "replace").decode() for text in texts]
            batch = tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    return encode


def flatten(lists: list[list[int]], dtype: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All ids in one array, and the length of each list. Raises OverflowError for an id that `dtype` cannot hold."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, int(lengths.sum())), lengths
