"""The samples of one file pair: windows over its documents one after the other, or whole documents packed into samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paro_lm.data.indexed import IndexedReader, exists, mask_prefix
from paro_lm.data.order import ArrayCache, Epoch, build_epoch, content_digest, fingerprint, first_window, num_samples, permutation

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Window(NamedTuple):
    """[seq_length + 1] each: token ids, where a document begins, which tokens carry loss."""

    tokens: Int64
    begins: Bool
    trained: Bool


class Stream(Protocol):
    """What a dataset reads one file pair through."""

    files: Files
    num_tokens: int

    @property
    def complete_samples(self) -> int:
        """Samples of one epoch that need no token of the next."""

    def first_sample(self, epoch: int) -> int:
        """The first sample of an epoch."""

    def locate(self, sample: int) -> tuple[int, int]:
        """(epoch, window) of a sample."""

    def read(self, epoch: int, window: int) -> Window: ...


class Files:
    """One file pair with its masks, if it has some, and where its indices are cached.

    Raises ValueError for files that hold no tokens, and for masks of other documents.
    """

    def __init__(self, prefix: str | Path, cache: ArrayCache) -> None:
        self.reader = IndexedReader(prefix)
        if self.reader.dtype.kind == "f":
            raise ValueError(f"{prefix} holds {self.reader.dtype} numbers, not token ids (gpt-neox swaps the codes of its two float types)")
        self.masks = IndexedReader(mask_prefix(prefix)) if exists(mask_prefix(prefix)) else None
        if self.masks is not None and not np.array_equal(self.masks.sizes, self.reader.sizes):
            raise ValueError(f"{mask_prefix(prefix)} has not the documents of {prefix}; prepare them again")
        self.content = content_digest(prefix)
        self.cache, self._cache_key = cache, fingerprint(prefix, self.content)

    def copy(self, document: int, start: int, tokens: Int64, trained: Bool) -> None:
        """Fill both arrays from token `start` of a document: its ids, and whether each carries loss."""
        tokens[:] = self.reader.document(document, start, start + len(tokens))
        trained[:] = True if self.masks is None else self.masks.document(document, start, start + len(tokens)) != 0

    def arrays(
        self, kind: str, what: object, names: Sequence[str], build: Callable[[], dict[str, NDArray[Any]]]
    ) -> dict[str, NDArray[Any]]:
        """Cached arrays that depend on the files and on `what`."""
        name = f"{kind}-" + hashlib.blake2b(f"{self._cache_key}/{what}".encode(), digest_size=16).hexdigest()
        return self.cache.get(name, names, build)


class TokenStream:
    """The endless, shuffled stream of one file pair, and its windows.

    `key` = (seed, number of the dataset in its blend). Raises ValueError if one epoch is shorter than a window.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int, key: tuple[int, ...], shuffle: bool, cache: ArrayCache) -> None:
        self.files = Files(prefix, cache)
        self.num_tokens = self.files.reader.num_tokens
        self.seq_length, self._seed_key, self._shuffle = seq_length, key, shuffle
        if self.num_tokens < seq_length + 1:
            raise ValueError(
                f"{prefix} has {self.num_tokens} tokens, one sample of seq_length={seq_length} needs {seq_length + 1}; "
                "use more text, a larger data.valid_fraction if this is the validation set, or a shorter seq_length"
            )
        self._epochs: dict[int, Epoch] = {}

    def first_sample(self, epoch: int) -> int:
        return first_window(epoch, self.num_tokens, self.seq_length)

    @property
    def complete_samples(self) -> int:
        """Windows that lie wholly in the first epoch."""
        return num_samples(self.num_tokens, self.seq_length, 1)

    def locate(self, sample: int) -> tuple[int, int]:
        """(epoch, window) of a sample; the samples of an epoch are a permutation of its windows."""
        epoch = sample * self.seq_length // self.num_tokens
        first = self.first_sample(epoch)
        return epoch, first + int(self._epoch(epoch).windows[sample - first])

    def read(self, epoch: int, window: int) -> Window:
        tokens = np.empty(self.seq_length + 1, np.int64)
        begins, trained = np.zeros(self.seq_length + 1, bool), np.zeros(self.seq_length + 1, bool)
        offset, filled = window * self.seq_length - epoch * self.num_tokens, 0
        while filled < len(tokens):
            filled += self._fill(tokens[filled:], begins[filled:], trained[filled:], self._epoch(epoch), offset)
            epoch, offset = epoch + 1, 0
        return Window(tokens, begins, trained)

    def _fill(self, tokens: Int64, begins: Bool, trained: Bool, epoch: Epoch, offset: int) -> int:
        """Copy from token `offset` of an epoch until `tokens` is full or the epoch ends; returns how many."""
        reader = self.files.reader
        position, filled = int(np.searchsorted(epoch.starts, offset, side="right")) - 1, 0
        while filled < len(tokens) and position < len(epoch.order):
            document = int(epoch.order[position])
            size, start = int(reader.sizes[document]), offset + filled - int(epoch.starts[position])
            take = min(len(tokens) - filled, size - start)
            if take > 0:
                self.files.copy(document, start, tokens[filled : filled + take], trained[filled : filled + take])
                begins[filled] |= start == 0
                filled += take
            position += 1
        return filled

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            what = f"{self.seq_length}/{self._seed_key}/{epoch}/{self._shuffle}"

            def build() -> dict[str, NDArray[Any]]:
                sizes = self.files.reader.sizes
                return build_epoch(sizes, epoch, seq_length=self.seq_length, key=self._seed_key, shuffle=self._shuffle)

            arrays = self.files.arrays("epoch", what, ("order", "starts", "windows"), build)
            while len(self._epochs) > 1:  # a window spans two epochs at most: one epoch holds at least a window
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = Epoch(**arrays)
        return self._epochs[epoch]


def pack(sizes: Int64, capacity: int) -> tuple[NDArray[Any], Int64]:
    """Whole documents into bins of `capacity` tokens, the fullest bin that has room first, the longest document first (best fit
    decreasing): documents in the order of their bins, and int64 [bins + 1] where each bin begins among them.

    A function of the sizes alone. No size may exceed the capacity.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> bins
    rooms = 0  # bit r is set where with_room[r] is not empty
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(document)
        with_room.setdefault(room - size, []).append(chosen)
        rooms |= 1 << (room - size)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(b) for b in bins], dtype=np.int64)])
    return np.asarray([document for b in bins for document in b], np.int64), starts


class PackedStream:
    """Whole documents of one file pair, packed into samples; the same samples in every epoch, each time in another order.

    Documents longer than seq_length + 1 tokens are truncated; what then has no token that carries loss is left out. Samples are
    filled up with `padding`, which carries none. Raises ValueError when nothing is left.
    """

    def __init__(
        self, prefix: str | Path, *, seq_length: int, key: tuple[int, ...], shuffle: bool, cache: ArrayCache, padding: int
    ) -> None:
        self.files = Files(prefix, cache)
        self.seq_length, self._key, self._shuffle, self._padding = seq_length, key, shuffle, padding
        arrays = self.files.arrays("packed", seq_length, ("documents", "starts", "facts"), self._build)
        self._documents, self._starts = arrays["documents"], arrays["starts"]
        self.num_tokens, self.num_truncated, self.num_cut_tokens, self.num_left_out = (int(fact) for fact in arrays["facts"])
        if not len(self._documents):
            raise ValueError(
                f"{prefix}: no token of its {self.files.reader.num_documents} documents carries loss within the first "
                f"{seq_length + 1} tokens; use a longer seq_length, or check the data"
            )
        self._order: dict[int, NDArray[Any]] = {}

    def _build(self) -> dict[str, NDArray[Any]]:
        sizes, capacity = self.files.reader.sizes, self.seq_length + 1
        masks = self.files.masks
        is_long = sizes > capacity
        keep = sizes > 1
        if masks is not None:
            for document in np.flatnonzero(is_long):
                keep[document] = bool(masks.document(int(document), 1, capacity).any())
        documents, starts = pack(np.minimum(sizes, capacity)[keep], capacity)
        facts = [np.minimum(sizes, capacity)[keep].sum(), is_long.sum(), (sizes[is_long] - capacity).sum(), (~keep).sum()]
        return {"documents": np.flatnonzero(keep)[documents], "starts": starts, "facts": np.asarray(facts, np.int64)}

    @property
    def complete_samples(self) -> int:
        return len(self._starts) - 1

    def first_sample(self, epoch: int) -> int:
        return epoch * self.complete_samples

    def locate(self, sample: int) -> tuple[int, int]:
        """(epoch, bin) of a sample."""
        epoch, index = divmod(sample, self.complete_samples)
        if not self._shuffle:
            return epoch, index
        if epoch not in self._order:
            self._order = {epoch: permutation(self.complete_samples, *self._key, epoch, 1)}
        return epoch, int(self._order[epoch][index])

    def read(self, epoch: int, window: int) -> Window:
        capacity = self.seq_length + 1
        tokens = np.full(capacity, self._padding, np.int64)
        begins, trained = np.zeros(capacity, bool), np.zeros(capacity, bool)
        filled = 0
        for document in self._documents[self._starts[window] : self._starts[window + 1]].tolist():
            stop = filled + min(int(self.files.reader.sizes[document]), capacity)
            self.files.copy(document, 0, tokens[filled:stop], trained[filled:stop])
            begins[filled], filled = True, stop
        begins[filled : filled + 1] = True
        return Window(tokens, begins, trained)

    def report(self) -> str:
        """What became of the documents, in a sentence."""
        full = self.num_tokens / (self.complete_samples * (self.seq_length + 1))
        text = f"{self.files.reader.prefix}: {len(self._documents):,} documents in {self.complete_samples:,} samples, {full:.1%} filled"
        if self.num_truncated:
            text += f"; {self.num_truncated:,} longer than a sample, {self.num_cut_tokens:,} tokens cut off"
        return text + (f"; {self.num_left_out:,} left out, nothing to train on" if self.num_left_out else "")
