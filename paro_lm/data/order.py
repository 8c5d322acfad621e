"""The order of samples: pure functions of sizes, weights, seed and epoch, and their cache on disk.

The stream of a dataset concatenates epochs, each with its own order of documents. Window k covers the stream tokens
[k seq, k seq + seq + 1). It belongs to the epoch in which it starts; the windows of an epoch are shuffled among themselves.
So nothing depends on how many samples are asked for, nor on ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paro_lm.data.indexed import bin_path, exists, idx_path, mask_prefix, temporary_beside

Int64 = NDArray[np.int64]
BLEND_BLOCK = 1 << 17


def num_samples(num_tokens: int, seq_length: int, epochs: int) -> int:
    """Complete windows of seq_length + 1 tokens, one apart by seq_length, in `epochs` passes over `num_tokens` tokens."""
    return max(epochs * num_tokens - 1, 0) // seq_length


def sample_index(sizes: ArrayLike, order: ArrayLike, seq_length: int) -> Int64:
    """Where each window begins: rows (position in `order`, offset in that document), as in Megatron.

    One row more than there are windows; the last names the token after the last window's input. Empty documents are passed over.
    """
    ordered = np.asarray(sizes, dtype=np.int64)[np.asarray(order)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(ordered)])
    tokens = np.arange(num_samples(int(starts[-1]), seq_length, 1) + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(starts, tokens, side="right") - 1
    return np.stack([positions, tokens - starts[positions]], axis=1)


def permutation(n: int, *key: int) -> NDArray[Any]:
    """A random order of range(n), a function of `key` alone. numpy freezes the stream of RandomState over its versions."""
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key)))
    order = np.arange(n, dtype=np.int32 if n < 2**31 else np.int64)
    generator.shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass: `order` of documents, `starts` int64 [documents + 1] of each in tokens, `windows` the order of its windows."""

    order: NDArray[Any]
    starts: Int64
    windows: NDArray[Any]


def first_window(epoch: int, num_tokens: int, seq_length: int) -> int:
    """The first window that starts in `epoch`."""
    return -(-epoch * num_tokens // seq_length)


def build_epoch(sizes: Int64, epoch: int, *, seq_length: int, key: tuple[int, ...], shuffle: bool) -> dict[str, NDArray[Any]]:
    """The arrays of an Epoch. `key` = (seed, number of the dataset in its blend)."""
    total = int(sizes.sum())
    count = first_window(epoch + 1, total, seq_length) - first_window(epoch, total, seq_length)
    order = permutation(len(sizes), *key, epoch, 0) if shuffle else np.arange(len(sizes))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order], dtype=np.int64)])
    windows = permutation(count, *key, epoch, 1) if shuffle else np.arange(count)
    return {"order": order, "starts": starts, "windows": windows}


class ArrayCache:
    """Named arrays on disk, memory-mapped when read. Several processes may build the same one: each writes a file of its
    own and renames it, so a reader sees a complete file or none. Without a folder arrays stay in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, key: str, names: Sequence[str], build: Callable[[], dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        if self.folder is None:
            return build()
        paths = {name: self.folder / f"{key}-{name}.npy" for name in names}
        try:
            return {name: np.load(path, mmap_mode="r").view(np.ndarray) for name, path in paths.items()}
        except (OSError, ValueError, EOFError):  # absent, or damaged: build it again
            arrays = build()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, path in paths.items():
                _save(path, arrays[name])
        except OSError as error:
            raise ValueError(f"cannot write the index cache {self.folder}: {error}; choose a writable data.cache_dir") from error
        return arrays


def _save(path: Path, array: NDArray[Any]) -> None:
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            np.save(file, array)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def content_digest(prefix: str | Path) -> str:
    """What a file pair holds, wherever it lies: hash of the whole `.idx`, size of the `.bin` and 64 places in it; the same of its
    masks when it has some."""
    digest = hashlib.blake2b(digest_size=16)
    if exists(mask_prefix(prefix)):
        digest.update(content_digest(mask_prefix(prefix)).encode())
    with open(idx_path(prefix), "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    size = bin_path(prefix).stat().st_size
    digest.update(str(size).encode())
    with open(bin_path(prefix), "rb") as file:
        for place in range(64):
            file.seek(place * size // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()


def fingerprint(prefix: str | Path, content: str | None = None) -> str:
    """Cache key of a file pair: its `content_digest` and the modification time of the `.bin`.

    The order depends on document sizes only, so even a `.bin` that was changed behind its time stamp cannot make a cached
    index wrong: whatever changes the sizes changes the hash of the `.idx`.
    """
    return f"{content or content_digest(prefix)}-{bin_path(prefix).stat().st_mtime_ns}"


def normalise_weights(weights: Sequence[float], num_sets: int) -> list[float]:
    """Weights that sum to one. Raises ValueError unless there is one per set, none is negative and one is positive."""
    if len(weights) != num_sets:
        raise ValueError(f"data.weights has {len(weights)} entries for {num_sets} datasets; give one per entry of data.train, or none")
    array = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(array).all() or (array < 0).any() or array.sum() <= 0:
        raise ValueError(f"data.weights={list(weights)}: weights must be finite, not negative, and not all zero")
    return [float(w) for w in array / array.sum()]


def draw(weights: Sequence[float], counts: list[int], start: int, num: int) -> tuple[NDArray[Any], Int64]:
    """Draws [start, start + num) of a blend: (dataset, how often it was drawn before). Updates `counts`.

    Draw i takes the dataset with the largest w max(i, 1) - count, the first on ties; weight 0 is never drawn.
    """
    sets, samples = np.empty(num, np.int32), np.empty(num, np.int64)
    active = [d for d, w in enumerate(weights) if w > 0]
    if len(active) > 24:
        w, c = np.asarray([weights[d] for d in active]), np.asarray([counts[d] for d in active], np.float64)
        for j in range(num):
            best = int(np.argmax(w * max(start + j, 1) - c))
            sets[j], samples[j] = active[best], c[best]
            c[best] += 1
        for d, count in zip(active, c, strict=True):
            counts[d] = int(count)
        return sets, samples
    pairs = [(d, weights[d]) for d in active]
    for j in range(num):
        i, best, top = max(start + j, 1), -1, -float("inf")
        for d, weight in pairs:
            error = weight * i - counts[d]
            if error > top:
                best, top = d, error
        sets[j], samples[j] = best, counts[best]
        counts[best] += 1
    return sets, samples


class Blend:
    """Which dataset, and which of its samples, every draw takes. Computed in blocks, cached on disk (they depend on weights only)."""

    def __init__(self, weights: Sequence[float], cache: ArrayCache) -> None:
        self.weights = normalise_weights(weights, len(weights))
        self._cache = cache
        self._key = hashlib.blake2b(repr(self.weights).encode(), digest_size=12).hexdigest()
        self._blocks: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()

    def __getitem__(self, i: int) -> tuple[int, int]:
        number, row = divmod(i, BLEND_BLOCK)
        block = self._block(number)
        return int(block["sets"][row]), int(block["samples"][row])

    def _block(self, number: int) -> dict[str, NDArray[Any]]:
        if number not in self._blocks:
            first = number
            while first > 0 and not self._known(first - 1):
                first -= 1
            for k in range(first, number + 1):  # oldest first: each block starts from the counts of the one before
                self._load(k)
        return self._blocks[number]

    def _known(self, number: int) -> bool:
        folder = self._cache.folder
        return number in self._blocks or (folder is not None and (folder / f"blend-{self._key}-{number}-counts.npy").exists())

    def _load(self, number: int) -> None:
        def build() -> dict[str, NDArray[Any]]:
            before = [0] * len(self.weights) if number == 0 else [int(c) for c in self._block(number - 1)["counts"]]
            sets, samples = draw(self.weights, before, number * BLEND_BLOCK, BLEND_BLOCK)
            return {"sets": sets, "samples": samples, "counts": np.asarray(before, np.int64)}

        self._blocks[number] = self._cache.get(f"blend-{self._key}-{number}", ("sets", "samples", "counts"), build)
        while len(self._blocks) > 2:
            self._blocks.popitem(last=False)
