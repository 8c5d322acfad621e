"""Micro-batches of one data rank; its whole state is the number of samples consumed by all ranks."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paro_lm.data.dataset import IGNORE, Sample, TokenDataset


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward gets: `tokens`, `labels` int64 [b, s] (-100 = no loss); with a document mask `positions`, `documents` [b, s]."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on `device`."""
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return dataclasses.replace(self, **{name: t.to(device, non_blocking=True) for name, t in fields if t is not None})


def collate(samples: list[Sample]) -> MicroBatch:
    """Stack samples of one dataset."""

    def stack(name: str) -> Tensor | None:
        rows = [getattr(sample, name) for sample in samples]
        return None if rows[0] is None else torch.from_numpy(np.stack(rows))

    tokens, labels = stack("tokens"), stack("labels")
    assert tokens is not None
    assert labels is not None
    return MicroBatch(tokens=tokens, labels=labels, positions=stack("positions"), documents=stack("documents"))


class Loader:
    """Hands out the samples of data rank `data_rank` of `data_size`.

    A step of B = num_micro_batches x micro_batch_size x data_size samples takes samples [consumed, consumed + B): micro-batch
    j of rank d takes consumed + j (mbs dp) + d mbs + (0 .. mbs - 1). So the samples of a step are the same for every data
    size that gives the same global batch. Samples from `num_samples` on, if given, keep their shape but carry no loss
    (the last batch of an evaluation). `prefetch` reads the next step in a thread, expecting as many micro-batches as in
    this one; order and state are the same with it.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        data_rank: int,
        data_size: int,
        micro_batch_size: int,
        consumed_samples: int = 0,
        num_samples: int | None = None,
        prefetch: bool = False,
    ) -> None:
        assert 0 <= data_rank < data_size
        assert micro_batch_size > 0
        assert consumed_samples >= 0
        self.dataset, self.data_rank, self.data_size, self.micro_batch_size = dataset, data_rank, data_size, micro_batch_size
        self.consumed_samples, self.num_samples = consumed_samples, num_samples
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paro-data") if prefetch else None
        self._pending: tuple[tuple[int, int], Future[list[MicroBatch]]] | None = None

    def sample_indices(self, consumed: int, num_micro_batches: int) -> list[list[int]]:
        """Samples of this rank's micro-batches in the step that starts at `consumed`."""
        stride, size = self.micro_batch_size * self.data_size, self.micro_batch_size
        firsts = [consumed + j * stride + self.data_rank * size for j in range(num_micro_batches)]
        return [list(range(first, first + size)) for first in firsts]

    def next(self, num_micro_batches: int) -> list[MicroBatch]:
        """The micro-batches of the next step; the number may change from call to call (batch ramp)."""
        assert num_micro_batches > 0
        batches = self._take((self.consumed_samples, num_micro_batches))
        self.consumed_samples += num_micro_batches * self.micro_batch_size * self.data_size
        if self._pool is not None:
            upcoming = (self.consumed_samples, num_micro_batches)
            self._pending = (upcoming, self._pool.submit(self._read, *upcoming))
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples, "dataset": self.dataset.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue after `state`; returns whether it came from the same data (else the samples are others than before)."""
        self.consumed_samples = int(state["consumed_samples"])
        return bool(state.get("dataset") == self.dataset.fingerprint)

    def close(self) -> None:
        """Stop the prefetch thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _take(self, wanted: tuple[int, int]) -> list[MicroBatch]:
        pending, self._pending = self._pending, None
        if pending is None:
            return self._read(*wanted)
        if pending[0] == wanted:
            return pending[1].result()
        # Another step than expected (a ramp, or a restored state): the thread must be done before the files are read here.
        if not pending[1].cancel():
            pending[1].exception()
        return self._read(*wanted)

    def _read(self, consumed: int, num_micro_batches: int) -> list[MicroBatch]:
        return [self._micro_batch(indices) for indices in self.sample_indices(consumed, num_micro_batches)]

    def _micro_batch(self, indices: list[int]) -> MicroBatch:
        if self.num_samples is None:
            return collate([self.dataset[i] for i in indices])
        samples = [self.dataset[min(i, self.num_samples - 1)] for i in indices]
        batch = collate(samples)
        batch.labels[torch.tensor([i >= self.num_samples for i in indices])] = IGNORE
        return batch
