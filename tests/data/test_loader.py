"""The loader: which rank sees which sample, resume, ramp, prefetch, evaluation fill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paro_lm.data.dataset import IGNORE, TokenDataset
from paro_lm.data.indexed import IndexedWriter
from paro_lm.data.loader import Loader, MicroBatch

SEQ = 4


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """Ten samples per epoch, all tokens different."""
    with IndexedWriter(tmp_path / "a", dtype="u2") as writer:
        for first in range(0, 40, 5):
            writer.add_document(range(first, first + 5))
    dataset = TokenDataset([tmp_path / "a"], seq_length=SEQ, seed=7)
    assert dataset.samples_per_epoch == 10
    return dataset


def rows(batches: list[MicroBatch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.tokens.tolist()]


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_a_step_has_the_same_samples_at_every_data_size(dataset: TokenDataset, data_size: int) -> None:
    accumulate = 8 // (2 * data_size)
    loaders = [Loader(dataset, data_rank=r, data_size=data_size, micro_batch_size=2) for r in range(data_size)]
    for step in range(4):
        parts = [loader.next(accumulate) for loader in loaders]
        for rank, part in enumerate(parts):
            for j, batch in enumerate(part):
                first = step * 8 + j * 2 * data_size + rank * 2
                assert batch.tokens.tolist() == [dataset[first].tokens.tolist(), dataset[first + 1].tokens.tolist()]
                assert batch.tokens.dtype == batch.labels.dtype == torch.int64
                assert batch.num_loss_tokens == 2 * SEQ
        seen = sorted(row for part in parts for row in rows(part))
        assert seen == sorted(dataset[i].tokens.tolist() for i in range(step * 8, step * 8 + 8))
    assert {loader.consumed_samples for loader in loaders} == {32}


@pytest.mark.parametrize("stop", [0, 9, 10, 11, 20])
def test_resume_over_epochs(dataset: TokenDataset, stop: int) -> None:
    def one(loader: Loader) -> list[int]:
        return loader.next(1)[0].tokens[0].tolist()

    whole = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=1)
    expected = [one(whole) for _ in range(40)]
    first = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=1)
    head = [one(first) for _ in range(stop)]
    second = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=1)
    assert second.load_state_dict(first.state_dict())
    assert head + [one(second) for _ in range(40 - stop)] == expected
    windows = [dataset.sample_id(i).window for i in range(40)]
    assert [sorted(windows[e * 10 : e * 10 + 10]) for e in range(4)] == [list(range(e * 10, e * 10 + 10)) for e in range(4)]
    orders = {tuple(w - 10 * e for w in windows[e * 10 : e * 10 + 10]) for e in range(4)}
    assert len(orders) == 4


@pytest.mark.parametrize("ramp", [[1, 1, 2, 2, 3, 1], [4]])
def test_prefetch_and_ramp_change_nothing(dataset: TokenDataset, ramp: list[int]) -> None:
    plain = Loader(dataset, data_rank=1, data_size=2, micro_batch_size=3)
    ahead = Loader(dataset, data_rank=1, data_size=2, micro_batch_size=3, prefetch=True)
    for num in ramp:
        assert rows(plain.next(num)) == rows(ahead.next(num))
        assert plain.state_dict() == ahead.state_dict()
    ahead.load_state_dict({"consumed_samples": 1})
    plain.consumed_samples = 1
    assert rows(plain.next(2)) == rows(ahead.next(2))
    ahead.close()


def test_state_from_other_data_is_noticed(dataset: TokenDataset, tmp_path: Path) -> None:
    other = Loader(TokenDataset([tmp_path / "a"], seq_length=SEQ, seed=8), data_rank=0, data_size=1, micro_batch_size=1)
    loader = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=1)
    loader.next(3)
    assert not other.load_state_dict(loader.state_dict())
    assert other.consumed_samples == 3


def test_samples_beyond_the_end_carry_no_loss(dataset: TokenDataset) -> None:
    loaders = [Loader(dataset, data_rank=r, data_size=2, micro_batch_size=2, num_samples=5) for r in range(2)]
    batches = [batch for loader in loaders for batch in loader.next(2)]
    assert [b.num_loss_tokens for b in batches] == [2 * SEQ, SEQ, 2 * SEQ, 0]
    assert all(batch.tokens.shape == batch.labels.shape == (2, SEQ) for batch in batches)


def test_document_mask_reaches_the_batch(dataset: TokenDataset, tmp_path: Path) -> None:
    masked = TokenDataset([tmp_path / "a"], seq_length=SEQ, seed=7, eod=9, document_mask=True)
    batch = Loader(masked, data_rank=0, data_size=1, micro_batch_size=10).next(1)[0].to("cpu")
    assert batch.positions is not None
    assert batch.documents is not None
    assert batch.positions.shape == batch.documents.shape == (10, SEQ)
    assert batch.positions.dtype == torch.int64
    assert batch.num_loss_tokens == int((batch.labels != IGNORE).sum()) < 40
