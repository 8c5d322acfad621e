"""The order of samples: conformance values, brute force against concatenate-and-cut, caches, blends, document masks."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from paro_lm.data import order
from paro_lm.data.dataset import IGNORE, SampleId, TokenDataset, mask_documents
from paro_lm.data.indexed import IndexedWriter
from paro_lm.data.order import ArrayCache, Blend, build_epoch, draw, fingerprint, first_window, num_samples, permutation, sample_index
from paro_lm.data.streams import TokenStream


def write(prefix: Path, documents: list[list[int]]) -> Path:
    with IndexedWriter(prefix, dtype="u2") as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def random_documents(seed: int, num: int, longest: int = 9) -> list[list[int]]:
    """Documents whose tokens are all different; some are empty."""
    sizes = np.random.RandomState(seed).randint(0, longest, num)
    ids = iter(range(1, 60_000))
    return [list(itertools.islice(ids, int(size))) for size in sizes]


def test_sample_index_conformance() -> None:
    assert sample_index([3, 2, 4], [0, 1, 2], 4).tolist() == [[0, 0], [1, 1], [2, 3]]
    assert sample_index([3, 2, 4], [2, 0, 1, 1, 2, 0], 4).tolist() == [[0, 0], [1, 0], [2, 1], [4, 1], [5, 1]]


def test_sample_index_against_a_walk() -> None:
    for seed in range(30):
        sizes = np.random.RandomState(seed).randint(0, 5, 12)
        walk = [[d, offset] for d, size in enumerate(sizes) for offset in range(size)]
        for seq in range(1, 6):
            assert sample_index(sizes, np.arange(12), seq).tolist() == walk[: max(len(walk), 1) : seq][: (len(walk) - 1) // seq + 1]


def test_number_of_samples_against_concatenate_and_cut() -> None:
    assert [num_samples(4, 2, e) for e in (1, 2)] == [1, 3]
    for tokens, seq, wanted in itertools.product(range(1, 13), range(1, 5), range(1, 13)):
        epochs = next(e for e in itertools.count(1) if num_samples(tokens, seq, e) >= wanted)
        stream = list(range(tokens)) * epochs
        windows = [stream[k : k + seq + 1] for k in range(0, len(stream), seq)]
        complete = [w for w in windows if len(w) == seq + 1]
        assert num_samples(tokens, seq, epochs) == len(complete) >= wanted
        assert epochs == 1 or (tokens * (epochs - 1) - 1) // seq < wanted
        starts = [sum(1 for k in range(0, 99 * seq, seq) if k < e * tokens) for e in range(epochs + 1)]
        assert [first_window(e, tokens, seq) for e in range(epochs + 1)] == starts


@pytest.mark.parametrize("seq", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num", [1, 2, 7])
def test_samples_are_the_windows_of_the_concatenated_epochs(tmp_path: Path, seq: int, num: int) -> None:
    documents = [list(range(1, 12))] if num == 1 else random_documents(num, num)
    total = sum(map(len, documents))
    prefix = write(tmp_path / "a", documents)
    sizes = np.array([len(d) for d in documents])
    if total < seq + 1:
        with pytest.raises(ValueError, match=f"has {total} tokens, one sample of seq_length={seq} needs {seq + 1}"):
            TokenDataset([prefix], seq_length=seq, seed=3)
        return
    dataset = TokenDataset([prefix], seq_length=seq, seed=3)
    stream: list[int] = []
    expected: list[list[int]] = []
    for epoch in range(5):
        arrays = build_epoch(sizes, epoch, seq_length=seq, key=(3, 0), shuffle=True)
        assert sorted(arrays["order"]) == list(range(len(documents)))
        stream += [t for d in arrays["order"] for t in documents[d]]
        first, last = (first_window(e, total, seq) for e in (epoch, epoch + 1))
        assert all(total * epoch <= k * seq < total * (epoch + 1) for k in range(first, last))
        expected += [[first + int(w), epoch] for w in arrays["windows"]]
        assert sorted(w for w, e in expected if e == epoch) == list(range(first, last))
    for i, (window, epoch) in enumerate(expected[: first_window(4, total, seq)]):
        sample = dataset[i]
        assert dataset.sample_id(i) == SampleId(dataset=0, epoch=epoch, window=window)
        assert [*sample.tokens.tolist(), int(sample.labels[-1])] == stream[window * seq : window * seq + seq + 1]
        assert sample.labels.tolist() == stream[window * seq + 1 : window * seq + seq + 1]
        assert sample.tokens.dtype == sample.labels.dtype == np.int64
    assert dataset.samples_per_epoch == first_window(1, total, seq)
    assert dataset.complete_samples == (total - 1) // seq
    assert dataset.num_tokens == total


def test_order_differs_between_epochs_and_seeds_and_not_between_runs(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", random_documents(0, 60))
    datasets = [TokenDataset([prefix], seq_length=4, seed=seed) for seed in (1, 1, 2)]
    epoch = datasets[0].samples_per_epoch
    first, again, other = ([tuple(d[i].tokens) for i in range(2 * epoch)] for d in datasets)
    assert first == again
    assert first != other
    assert first[:epoch] != first[epoch:]
    sizes = np.ones(60, np.int64)
    epochs = [build_epoch(sizes, e, seq_length=4, key=(1, d), shuffle=True) for e, d in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(arrays["order"]) for arrays in epochs}) == len({tuple(arrays["windows"]) for arrays in epochs}) == 3
    # Frozen: these orders may never change, or resumed runs would see other data.
    assert permutation(8, 1234, 0, 0, 0).tolist() == FROZEN
    reached_backwards = [tuple(datasets[1][i].tokens) for i in reversed(range(2 * epoch))]
    assert reached_backwards[::-1] == first


FROZEN = [1, 6, 4, 0, 3, 5, 2, 7]


def test_unshuffled_is_concatenate_and_cut(tmp_path: Path) -> None:
    documents = random_documents(5, 9)
    flat = [t for d in documents for t in d]
    dataset = TokenDataset([write(tmp_path / "a", documents)], seq_length=3, seed=0, shuffle=False)
    got = [dataset[i].tokens.tolist() for i in range(dataset.complete_samples)]
    assert got == [flat[k : k + 3] for k in range(0, len(flat) - 3, 3)]


def test_cache_gives_the_same_samples_and_follows_the_content(tmp_path: Path) -> None:
    prefix, cache = write(tmp_path / "a", random_documents(1, 40)), tmp_path / "cache"

    def samples() -> list[list[int]]:
        dataset = TokenDataset([prefix, prefix], [0.25, 0.75], seq_length=4, seed=1, cache_dir=cache)
        return [dataset[i].tokens.tolist() for i in range(80)]

    fresh = TokenDataset([prefix, prefix], [0.25, 0.75], seq_length=4, seed=1)
    expected = [fresh[i].tokens.tolist() for i in range(80)]
    assert samples() == expected
    files = sorted(cache.iterdir())
    assert files
    assert not list(cache.glob(".*"))
    stamps = [f.stat().st_mtime_ns for f in files]
    assert samples() == expected
    assert [f.stat().st_mtime_ns for f in sorted(cache.iterdir())] == stamps
    files[0].write_bytes(files[0].read_bytes()[:-3])  # damaged: built again
    assert samples() == expected
    before = fingerprint(prefix)
    write(prefix, random_documents(2, 41))
    assert fingerprint(prefix) != before
    fresh = TokenDataset([prefix, prefix], [0.25, 0.75], seq_length=4, seed=1)
    assert samples() == [fresh[i].tokens.tolist() for i in range(80)] != expected


def test_fingerprint_sees_a_bin_that_changed_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    before, index = fingerprint(prefix), (tmp_path / "a.idx").read_bytes()
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    assert fingerprint(prefix) != before
    write(prefix, [[4, 5, 6]])
    assert (tmp_path / "a.idx").read_bytes() == index
    assert fingerprint(prefix) != before


def test_a_copy_of_the_files_is_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    for suffix in ("bin", "idx"):
        (tmp_path / f"b.{suffix}").write_bytes((tmp_path / f"a.{suffix}").read_bytes())
    os.utime(tmp_path / "b.bin", ns=(1, 1))
    write(tmp_path / "c", [[1, 2, 9], [4, 5]])
    a, b, c = (TokenDataset([tmp_path / name], seq_length=2, seed=0).fingerprint for name in "abc")
    assert a == b != c
    assert TokenDataset([tmp_path / "a"], seq_length=2, seed=1).fingerprint != a


def test_several_builders_of_one_cache(tmp_path: Path) -> None:
    prefix, results = write(tmp_path / "a", random_documents(1, 40)), []

    def build() -> None:
        dataset = TokenDataset([prefix], seq_length=4, seed=1, cache_dir=tmp_path / "cache")
        results.append([dataset[i].tokens.tolist() for i in range(60)])

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(r == results[0] for r in results)


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", random_documents(1, 40))
    (tmp_path / "file").write_text("")
    dataset = TokenDataset([prefix], seq_length=4, seed=1, cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"cannot write the index cache .*data\.cache_dir"):
        dataset[0]


def test_blend_conformance() -> None:
    def drawn(weights: list[float], num: int) -> list[int]:
        blend = Blend(weights, ArrayCache(None))
        return [blend[i][0] for i in range(num)]

    assert drawn([0.3, 0.7], 10) == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert drawn([0.5, 0.25, 0.25], 8) == [0, 1, 2, 0, 0, 1, 2, 0]
    assert np.bincount(drawn([0.999, 0.001], 10)).tolist() == [9, 1]
    assert set(drawn([0.0, 1.0], 50)) == {1}


@pytest.mark.parametrize("num_sets", [1, 3, 24, 25, 300])
def test_blend_against_the_rule(num_sets: int) -> None:
    weights = np.random.RandomState(num_sets).random_sample(num_sets)
    weights[1::7] = 0
    weights /= weights.sum()
    counts, expected = np.zeros(num_sets), []
    for i in range(700):
        error = np.where(weights > 0, weights * max(i, 1) - counts, -np.inf)
        best = int(np.argmax(error))
        expected.append((best, int(counts[best])))
        counts[best] += 1
    state = [0] * num_sets
    parts = [draw(weights.tolist(), state, start, 100) for start in range(0, 700, 100)]
    assert [(int(s), int(k)) for sets, samples in parts for s, k in zip(sets, samples, strict=True)] == expected
    assert state == counts.astype(int).tolist()


def test_blend_blocks_are_the_same_in_any_order_of_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "BLEND_BLOCK", 16)
    sets, samples = draw([0.2, 0.5, 0.3], [0, 0, 0], 0, 200)
    expected = list(zip(sets.tolist(), samples.tolist(), strict=True))
    for folder in (None, tmp_path / "c", tmp_path / "c"):
        blend = Blend([0.2, 0.5, 0.3], ArrayCache(folder))
        where = [199, 0, 100, 17, 16, 15, *range(200)]
        assert [blend[i] for i in where] == [expected[i] for i in where]
    next((tmp_path / "c").glob("blend-*-5-sets.npy")).unlink()
    assert Blend([0.2, 0.5, 0.3], ArrayCache(tmp_path / "c"))[95] == expected[95]


def test_bad_weights_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [list(range(1, 30))])
    for weights, message in [
        ([1.0], "1 entries for 2"),
        ([0.0, 0.0], "not all zero"),
        ([-1.0, 2.0], "not negative"),
        ([float("nan"), 1.0], "finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenDataset([prefix, prefix], weights, seq_length=4, seed=0)


def test_blended_dataset_takes_each_sets_own_order(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", random_documents(1, 30)), write(tmp_path / "b", random_documents(2, 20))
    dataset = TokenDataset([a, b], [3, 1], seq_length=5, seed=9)
    streams = [TokenStream(p, seq_length=5, key=(9, d), shuffle=True, cache=ArrayCache(None)) for d, p in enumerate((a, b))]
    seen = [0, 0]
    for i in range(60):
        where = dataset.sample_id(i)
        assert (where.epoch, where.window) == streams[where.dataset].locate(seen[where.dataset])
        assert dataset[i].tokens.tolist() == streams[where.dataset].read(where.epoch, where.window)[0][:-1].tolist()
        seen[where.dataset] += 1
    assert seen == [45, 15]
    by_size = TokenDataset([a, b], seq_length=5, seed=9)
    assert by_size.weights[0] == pytest.approx(by_size.streams[0].num_tokens / by_size.num_tokens)


def test_document_mask_conformance() -> None:
    sample = mask_documents(np.array([5, 9, 6, 7, 9, 8, 1]), eod=9)
    assert (sample.labels != IGNORE).astype(int).tolist() == [1, 0, 1, 1, 0, 1]
    assert sample.positions is not None
    assert sample.positions.tolist() == [0, 1, 0, 1, 2, 0]
    assert sample.documents is not None
    assert sample.documents.tolist() == [0, 0, 1, 1, 1, 2]
    assert sample.labels.tolist() == [9, IGNORE, 7, 9, IGNORE, 1]


def test_document_mask_without_eod_follows_the_index(tmp_path: Path) -> None:
    documents = random_documents(4, 25)
    owner = {t: d for d, document in enumerate(documents) for t in document}
    at = {t: p for document in documents for p, t in enumerate(document)}
    dataset = TokenDataset([write(tmp_path / "a", documents)], seq_length=7, seed=2, document_mask=True)
    plain = TokenDataset([tmp_path / "a"], seq_length=7, seed=2)
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        owners = [owner[t] for t in sample.tokens.tolist()]
        follower = plain[i].labels.tolist()
        assert sample.labels.tolist() == [t if at[t] > 0 else IGNORE for t in follower]
        assert sample.documents is not None
        assert sample.positions is not None
        changes = np.flatnonzero(np.diff(owners, prepend=-1))
        assert np.array_equal(np.flatnonzero(np.diff(sample.documents, prepend=-1)), changes)
        starts = {owners[c]: c for c in changes}
        assert sample.positions.tolist() == [j - starts[o] for j, o in enumerate(owners)]
    assert plain[0].positions is None
    assert plain[0].documents is None


def test_ids_outside_the_vocabulary_raise(tmp_path: Path) -> None:
    dataset = TokenDataset([write(tmp_path / "a", [list(range(1, 30))])], seq_length=4, seed=0, vocab_size=29)
    with pytest.raises(ValueError, match=r"token id 29 in sample \d+ is outside the vocabulary of 29"):
        _ = [dataset[i] for i in range(dataset.samples_per_epoch)]
    assert TokenDataset([tmp_path / "a"], seq_length=4, seed=0, vocab_size=30)[0].tokens.shape == (4,)


def test_float_files_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "f", dtype="f4") as writer:
        writer.add_document([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="not token ids"):
        TokenDataset([tmp_path / "f"], seq_length=1, seed=0)
