"""Samples of seq_length + 1 tokens from token files: windows over the stream of documents, blends, document masks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paro_lm.config import Config
from paro_lm.data.order import ArrayCache, Blend, normalise_weights
from paro_lm.data.streams import PackedStream, Stream, TokenStream

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


def open_dataset(
    cfg: Config, prefixes: Sequence[str | Path], *, eod: int | None, vocab_size: int, weights: Sequence[float] = (), shuffle: bool = True
) -> TokenDataset:
    """The samples that a run with these options draws from prepared files."""
    return TokenDataset(
        prefixes,
        weights or None,
        seq_length=cfg.seq_length,
        seed=cfg.seed,
        eod=eod,
        document_mask=cfg.data.document_mask,
        vocab_size=vocab_size,
        cache_dir=Path(cfg.data.cache_dir) / "index",
        shuffle=shuffle,
        packing=cfg.data.packing,
    )


def check_vocab(cfg: Config, tokenizer_size: int) -> int:
    """Rows of the vocabulary: those that the config asks for, else the tokenizer's. Raises ValueError when they are too few."""
    size = cfg.model.vocab_size
    if size is None:
        return tokenizer_size
    if size < tokenizer_size:
        raise ValueError(
            f"model.vocab_size={size} is smaller than the vocabulary of the data's tokenizer, {tokenizer_size}; use "
            + (f"model.vocab_size=null or at least {tokenizer_size}." if cfg.model.init_from is None else "the model's own tokenizer.")
        )
    return size


class TokenDataset:
    """`dataset[i]` for any i >= 0: a function of (seed, i) and the files only, whatever else is asked for and by which rank.

    Epochs are concatenated without end. `weights` blend several file pairs (None = by their tokens). Every pair needs
    seq_length + 1 tokens. `shuffle=False` keeps files and windows in order: then samples [0, complete_samples) of a single
    pair cover it once. `cache_dir` keeps the indices on disk (None = in memory). With `vocab_size` an id outside the
    vocabulary raises ValueError where it is read. Tokens whose mask (`indexed.mask_prefix`) is 0 carry no loss. `packing`
    documents packs whole documents into samples (`PackedStream`) instead of cutting windows; it needs `document_mask`.
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
        packing: str = "stream",
    ) -> None:
        if not prefixes or seq_length < 1 or seed < 0:
            raise ValueError(f"a dataset needs files, seq_length >= 1 and seed >= 0; got {len(prefixes)} files, {seq_length}, {seed}")
        self.seq_length, self.eod, self.document_mask, self.vocab_size = seq_length, eod, document_mask, vocab_size
        cache = ArrayCache(None if cache_dir is None else Path(cache_dir))
        assert packing == "stream" or document_mask, "packed documents must not see each other"
        self.streams: list[Stream] = [
            PackedStream(p, seq_length=seq_length, key=(seed, d), shuffle=shuffle, cache=cache, padding=eod or 0)
            if packing == "documents"
            else TokenStream(p, seq_length=seq_length, key=(seed, d), shuffle=shuffle, cache=cache)
            for d, p in enumerate(prefixes)
        ]
        by_size = [float(stream.num_tokens) for stream in self.streams]
        self.weights = normalise_weights(weights or by_size, len(prefixes))
        self._blend = Blend(self.weights, cache) if len(prefixes) > 1 else None
        self._key = f"{seq_length}/{seed}/{shuffle}/{self.weights}/{[s.files.content for s in self.streams]}"
        self._key += "" if packing == "stream" else f"/{packing}"

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
        return sum(stream.complete_samples for stream in self.streams)

    def reports(self) -> list[str]:
        """What packing did to the documents, a sentence per file pair; nothing for windows."""
        return [stream.report() for stream in self.streams if isinstance(stream, PackedStream)]

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
        tokens, begins, trained = stream.read(where.epoch, where.window)
        if self.vocab_size is not None and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            bad = int(tokens.max()) if int(tokens.max()) >= self.vocab_size else int(tokens.min())
            raise ValueError(
                f"{stream.files.reader.prefix}: token id {bad} in sample {i} is outside the vocabulary of {self.vocab_size}; "
                "give the tokenizer that the file was made with as data.tokenizer, or a larger model.vocab_size"
            )
        if not self.document_mask:
            labels = tokens[1:] if trained.all() else np.where(trained[1:], tokens[1:], IGNORE)
            return Sample(tokens=tokens[:-1], labels=labels)
        # The end-of-document token may stand inside a document where documents are known to be whole: at the end of a turn.
        is_whole = stream.files.masks is not None or isinstance(stream, PackedStream)
        sample = mask_documents(tokens, None if is_whole else self.eod, begins)
        return sample if trained.all() else replace(sample, labels=np.where(trained[1:], sample.labels, IGNORE))
