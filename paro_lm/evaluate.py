"""Validation loss of a model over prepared data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from paro_lm.data.dataset import TokenDataset
from paro_lm.data.indexed import IndexedReader
from paro_lm.data.loader import Loader, MicroBatch
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh


def evaluate(
    loss_of: Callable[[MicroBatch], torch.Tensor],
    datasets: Sequence[TokenDataset],
    mesh: ParallelMesh,
    *,
    micro_batch_size: int,
    max_samples: int = 0,
) -> float:
    """Mean loss per token over `max_samples` samples (0 = all), the first of every dataset in proportion to its size, in nats; the
    same number on every rank and for every layout. All data ranks run equally many forwards: those without samples left run on samples
    without labels.

    `loss_of` gives the summed loss of a micro-batch without gradients, zero on ranks without the last pipeline stage.
    """
    rank, size = mesh.index(*DATA_AXES), mesh.size(*DATA_AXES)
    loss, tokens = 0.0, 0
    for dataset, num_samples in zip(datasets, shares([dataset.complete_samples for dataset in datasets], max_samples), strict=True):
        loader = Loader(dataset, data_rank=rank, data_size=size, micro_batch_size=micro_batch_size, num_samples=num_samples)
        while loader.consumed_samples < num_samples:
            (batch,) = loader.next(1)
            batch = batch.to(mesh.device)
            loss += loss_of(batch).item()
            tokens += batch.num_loss_tokens
    return mesh.sum(loss, ("pp", *DATA_AXES)) / max(1, mesh.sum(tokens, DATA_AXES))


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` parts (0 = all, never more than there are) in proportion to `sizes`, in whole numbers that add up to it."""
    available = sum(sizes)
    total = min(total, available) if total else available
    ends = [0, *(total * end // max(1, available) for end in itertools.accumulate(sizes))]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def unigram_loss(train: Sequence[Path], datasets: Sequence[TokenDataset], *, vocab_size: int, max_samples: int = 0) -> float:
    """Mean loss per token of the add-one unigram model of the training tokens over the same samples as `evaluate`, in nats."""
    counts = np.ones(vocab_size, dtype=np.int64)
    for prefix in train:
        reader = IndexedReader(prefix)
        for index in range(reader.num_documents):
            counts += np.bincount(reader.document(index), minlength=vocab_size)
    losses = np.log(counts.sum()) - np.log(counts)
    total, tokens = 0.0, 0
    for dataset, num_samples in zip(datasets, shares([dataset.complete_samples for dataset in datasets], max_samples), strict=True):
        for index in range(num_samples):
            labels = dataset[index].labels
            labels = labels[labels >= 0]
            total += float(losses[labels].sum())
            tokens += len(labels)
    return total / max(1, tokens)
