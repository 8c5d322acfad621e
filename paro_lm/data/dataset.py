"""Samples of seq_length + 1 tokens from token files: windows over the stream of documents, blends, document masks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paro_lm.data.indexed import IndexedReader
from paro_lm.data.order import (
    ArrayCache,
    Blend,
    Epoch,
    build_epoch,
    content_digest,
    fingerprint,
    first_window,
    normalise_weights,
    num_samples,
)

IGNORE = -100
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence: `tokens` and `labels` int64 [s] (labels are the next tokens, -100 = no loss).

    With a document mask `positions` int64 [s] restart at every document and `documents` int64 [s] number them from 0.
    """

    tokens: Int64
    labels: Int64
    positions: Int64 | None = None
    documents: Int64 | None = None


@dataclass(frozen=True, kw_only=True)
class SampleId:
    """What a sample is, whoever reads it: dataset of the blend, epoch of that dataset, window in its stream."""

    dataset: int
    epoch: int
    window: int


def mask_documents(tokens: Int64, eod: int | None, begins: NDArray[np.bool_] | None = None) -> Sample:
    """Split s + 1 tokens into documents: a new one begins after every `eod`, and wherever `begins` [s + 1] says so.

    The label of a document's last token is -100: what follows belongs to another document.
    """
    new = np.zeros(len(tokens), bool) if begins is None else begins.copy()
    if eod is not None:
        new[1:] |= tokens[:-1] == eod
    new[0] = True
    at = np.arange(len(tokens), dtype=np.int64)
    documents = np.cumsum(new, dtype=np.int64) - 1
    positions = at - np.maximum.accumulate(np.where(new, at, 0))
    labels = np.where(new[1:], IGNORE, tokens[1:])
    return Sample(tokens=tokens[:-1], labels=labels, positions=positions[:-1], documents=documents[:-1])


class TokenStream:
    """The endless, shuffled stream of one file pair, and its windows.

    `key` = (seed, number of the dataset in its blend). Raises ValueError if one epoch is shorter than a window.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int, key: tuple[int, ...], shuffle: bool, cache: ArrayCache) -> None:
        self.reader = IndexedReader(prefix)
        self.num_tokens = self.reader.num_tokens
        self.seq_length, self._seed_key, self._shuffle, self._cache = seq_length, key, shuffle, cache
        if self.reader.dtype.kind == "f":
            raise ValueError(f"{prefix} holds {self.reader.dtype} numbers, not token ids (gpt-neox swaps the codes of its two float types)")
        if self.num_tokens < seq_length + 1:
            raise ValueError(
                f"{prefix} has {self.num_tokens} tokens, one sample of seq_length={seq_length} needs {seq_length + 1}; "
                "use more text, a larger data.valid_fraction if this is the validation set, or a shorter seq_length"
            )
        self.content = content_digest(prefix)
        self._cache_key = fingerprint(prefix, self.content)
        self._epochs: dict[int, Epoch] = {}

    def first_sample(self, epoch: int) -> int:
        return first_window(epoch, self.num_tokens, self.seq_length)

    def locate(self, sample: int) -> tuple[int, int]:
        """(epoch, window) of a sample; the samples of an epoch are a permutation of its windows."""
        epoch = sample * self.seq_length // self.num_tokens
        first = self.first_sample(epoch)
        return epoch, first + int(self._epoch(epoch).windows[sample - first])

    def read(self, epoch: int, window: int) -> tuple[Int64, NDArray[np.bool_]]:
        """Tokens [seq_length + 1] of a window, and where a document begins among them."""
        tokens = np.empty(self.seq_length + 1, np.int64)
        begins = np.zeros(self.seq_length + 1, bool)
        offset, filled = window * self.seq_length - epoch * self.num_tokens, 0
        while filled < len(tokens):
            filled += self._fill(tokens[filled:], begins[filled:], self._epoch(epoch), offset)
            epoch, offset = epoch + 1, 0
        return tokens, begins

    def _fill(self, tokens: Int64, begins: NDArray[np.bool_], epoch: Epoch, offset: int) -> int:
        """Copy from token `offset` of an epoch until `tokens` is full or the epoch ends; returns how many."""
        position, filled = int(np.searchsorted(epoch.starts, offset, side="right")) - 1, 0
        while filled < len(tokens) and position < len(epoch.order):
            document = int(epoch.order[position])
            size, start = int(self.reader.sizes[document]), offset + filled - int(epoch.starts[position])
            take = min(len(tokens) - filled, size - start)
            if take > 0:
                tokens[filled : filled + take] = self.reader.document(document, start, start + take)
                begins[filled] |= start == 0
                filled += take
            position += 1
        return filled

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            names = ("order", "starts", "windows")
            what = f"{self._cache_key}/{self.seq_length}/{self._seed_key}/{epoch}/{self._shuffle}"
            name = "epoch-" + hashlib.blake2b(what.encode(), digest_size=16).hexdigest()

            def build() -> dict[str, NDArray[Any]]:
                return build_epoch(self.reader.sizes, epoch, seq_length=self.seq_length, key=self._seed_key, shuffle=self._shuffle)

            arrays = self._cache.get(name, names, build)
            while len(self._epochs) > 1:  # a window spans two epochs at most: one epoch holds at least a window
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = Epoch(**arrays)
        return self._epochs[epoch]


class TokenDataset:
    """`dataset[i]` for any i >= 0: a function of (seed, i) and the files only, whatever else is asked for and by which rank.

    Epochs are concatenated without end. `weights` blend several file pairs (None = by their tokens). Every pair needs
    seq_length + 1 tokens. `shuffle=False` keeps files and windows in order: then samples [0, complete_samples) of a single
    pair cover it once. `cache_dir` keeps the indices on disk (None = in memory). With `vocab_size` an id outside the
    vocabulary raises ValueError where it is read.
    """

    def __init__(
        self,
        prefixes: Sequence[str | Path],
        weights: Sequence[float] | None = None,
        *,
        seq_length: int,
        seed: int,
        eod: int | None = None,
        document_mask: bool = False,
        vocab_size: int | None = None,
        cache_dir: str | Path | None = None,
        shuffle: bool = True,
    ) -> None:
        if not prefixes or seq_length < 1 or seed < 0:
            raise ValueError(f"a dataset needs files, seq_length >= 1 and seed >= 0; got {len(prefixes)} files, {seq_length}, {seed}")
        self.seq_length, self.eod, self.document_mask, self.vocab_size = seq_length, eod, document_mask, vocab_size
        cache = ArrayCache(None if cache_dir is None else Path(cache_dir))
        self.streams = [TokenStream(p, seq_length=seq_length, key=(seed, d), shuffle=shuffle, cache=cache) for d, p in enumerate(prefixes)]
        by_size = [float(stream.num_tokens) for stream in self.streams]
        self.weights = normalise_weights(weights or by_size, len(prefixes))
        self._blend = Blend(self.weights, cache) if len(prefixes) > 1 else None
        self._key = f"{seq_length}/{seed}/{shuffle}/{self.weights}/{[s.content for s in self.streams]}"

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch of every file pair."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def samples_per_epoch(self) -> int:
        """Windows that start in the first epoch, over all file pairs (the last of a pair may reach into its next epoch)."""
        return sum(stream.first_sample(1) for stream in self.streams)

    @property
    def complete_samples(self) -> int:
        """Windows that lie wholly in the first epoch, over all file pairs."""
        return sum(num_samples(stream.num_tokens, self.seq_length, 1) for stream in self.streams)

    @property
    def fingerprint(self) -> str:
        """Equal for datasets that give the same samples, also from a copy of the files; a resumed run compares it."""
        return hashlib.blake2b(self._key.encode(), digest_size=12).hexdigest()

    def sample_id(self, i: int) -> SampleId:
        dataset, sample = (0, i) if self._blend is None else self._blend[i]
        epoch, window = self.streams[dataset].locate(sample)
        return SampleId(dataset=dataset, epoch=epoch, window=window)

    def __getitem__(self, i: int) -> Sample:
        assert i >= 0, "samples are counted from 0"
        where = self.sample_id(i)
        stream = self.streams[where.dataset]
        tokens, begins = stream.read(where.epoch, where.window)
        if self.vocab_size is not None and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            bad = int(tokens.max()) if int(tokens.max()) >= self.vocab_size else int(tokens.min())
            raise ValueError(
                f"{stream.reader.prefix}: token id {bad} in sample {i} is outside the vocabulary of {self.vocab_size}; "
                "give the tokenizer that the file was made with as data.tokenizer, or a larger model.vocab_size"
            )
        if self.document_mask:
            return mask_documents(tokens, self.eod, begins)
        return Sample(tokens=tokens[:-1], labels=tokens[1:])
