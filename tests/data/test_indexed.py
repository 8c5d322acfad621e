"""Token files: byte-exact against Megatron's format, 64-bit pointers, refusals, and nothing half-written."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from paro_lm.data import indexed
from paro_lm.data.indexed import HEADER, IndexedReader, IndexedWriter, select_documents, sequence_pointers, token_dtype

GOLDEN_BIN = "010002000300040005000600070008000900"
GOLDEN_IDX = (
    "4d4d4944494458000001000000000000000803000000000000000400000000000000"
    "030000000200000004000000"
    "000000000000000006000000000000000a00000000000000"
    "0000000000000000010000000000000002000000000000000300000000000000"
)
DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def write(prefix: Path, documents: list[list[int]], dtype: object = np.uint16) -> None:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add_document(document)


def read(prefix: Path) -> list[list[int]]:
    reader = IndexedReader(prefix)
    return [reader.document(i).tolist() for i in range(reader.num_documents)]


def test_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    assert (tmp_path / "a.bin").read_bytes().hex() == GOLDEN_BIN
    assert (tmp_path / "a.idx").read_bytes().hex() == GOLDEN_IDX
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert read(tmp_path / "a") == DOCUMENTS


def test_batches_and_merged_parts_give_the_same_bytes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "batch", dtype="u2") as writer:
        writer.add_documents(np.arange(1, 6), [3, 2])
        writer.add_documents(np.arange(6, 10), [4])
    write(tmp_path / "p0", DOCUMENTS[:1])
    write(tmp_path / "p1", [])
    write(tmp_path / "p2", DOCUMENTS[1:])
    with IndexedWriter(tmp_path / "merged", dtype="u2") as writer:
        for part in ("p0", "p1", "p2"):
            writer.append(tmp_path / part, block=3)
        assert (writer.num_documents, writer.num_tokens) == (3, 9)
    for name in ("batch", "merged"):
        assert (tmp_path / f"{name}.bin").read_bytes().hex() == GOLDEN_BIN
        assert (tmp_path / f"{name}.idx").read_bytes().hex() == GOLDEN_IDX
    write(tmp_path / "wide", DOCUMENTS, np.int32)
    with pytest.raises(ValueError, match="one type"), IndexedWriter(tmp_path / "x", dtype="u2") as writer:
        writer.append(tmp_path / "wide")


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", dtype="i4") as writer:
        writer.add_document([])
        writer.add_document([1, 2, 3, 4, 5], lengths=[2, 0, 3])
        writer.add_document([], lengths=[])
        writer.add_document([6])
    reader = IndexedReader(tmp_path / "a")
    assert read(tmp_path / "a") == [[], [1, 2, 3, 4, 5], [], [6]]
    assert reader.lengths.tolist() == [0, 2, 0, 3, 1]
    assert reader.documents.tolist() == [0, 1, 4, 4, 5]
    assert reader.sizes.tolist() == [0, 5, 0, 1]
    assert reader.contiguous
    assert reader.document(1, 1, 4).tolist() == [2, 3, 4]


def test_selected_documents_share_the_tokens(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    select_documents(IndexedReader(tmp_path / "a"), np.array([True, False, True]), tmp_path / "b")
    select_documents(IndexedReader(tmp_path / "a"), np.array([False, False, False]), tmp_path / "none")
    assert read(tmp_path / "b") == [[1, 2, 3], [6, 7, 8, 9]]
    assert read(tmp_path / "none") == []
    assert not IndexedReader(tmp_path / "b").contiguous
    with pytest.raises(ValueError, match="a part of its .bin"), IndexedWriter(tmp_path / "x", dtype="u2") as writer:
        writer.append(tmp_path / "b")


def test_pointers_have_64_bits(tmp_path: Path) -> None:
    lengths = np.full(4, 600_000_000, np.int32)
    assert sequence_pointers(lengths, 4).tolist() == [0, 2_400_000_000, 4_800_000_000, 7_200_000_000]
    lengths = np.full(2, 640_000_000, np.int32)
    indexed.write_index(
        tmp_path / "big.idx", dtype=np.dtype("<i4"), lengths=lengths, pointers=sequence_pointers(lengths, 4), documents=[0, 1, 2]
    )
    with open(tmp_path / "big.bin", "wb") as file:  # sparse: 5.12 GB that take no space
        file.seek(2 * 640_000_000 * 4 - 4)
        file.write(struct.pack("<i", 123_456))
    reader = IndexedReader(tmp_path / "big")
    assert reader.num_tokens == 1_280_000_000
    assert reader.offsets.tolist() == [0, 640_000_000]
    assert reader.document(1, 639_999_998).tolist() == [0, 123_456]


def test_ids_that_do_not_fit_raise(tmp_path: Path) -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32
    with pytest.raises(ValueError, match="70000 does not fit uint16"):
        write(tmp_path / "a", [[1, 70_000]])
    with pytest.raises(ValueError, match="-1 does not fit uint16"):
        write(tmp_path / "a", [[1, -1]])
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "b", [[65_535, 0]])  # a vocabulary of 65536 fits 16 bits when the file says so
    assert read(tmp_path / "b") == [[65_535, 0]]
    assert IndexedReader(tmp_path / "b").dtype == np.uint16


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_the_reader_believes_the_files_type(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a", DOCUMENTS, dtype)
    assert IndexedReader(tmp_path / "a").dtype == np.dtype(dtype)
    assert read(tmp_path / "a") == DOCUMENTS


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    binary, index = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    for cut in range(len(index)):
        (tmp_path / "a.idx").write_bytes(index[:cut])
        with pytest.raises(ValueError, match=r"a\.idx"):
            IndexedReader(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index)
    for cut in range(len(binary)):
        (tmp_path / "a.bin").write_bytes(binary[:cut])
        with pytest.raises(ValueError, match=rf"a\.bin is truncated: .* 18 bytes, the file has {cut}"):
            IndexedReader(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin does not exist"):
        IndexedReader(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(binary)
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00" + index[8:])
    with pytest.raises(ValueError, match="older format TNTIDX"):
        IndexedReader(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index[:17] + b"\x09" + index[18:])
    with pytest.raises(ValueError, match="type code 9"):
        IndexedReader(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index[:-8] + struct.pack("<q", 7))
    with pytest.raises(ValueError, match="boundaries"):
        IndexedReader(tmp_path / "a")
    assert HEADER.size == 34


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_failed_write_leaves_no_wrong_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
    write(tmp_path / "a", DOCUMENTS)
    calls, replace = [], os.replace

    def failing(source: object, target: object) -> None:
        calls.append(target)
        if len(calls) == fail_at + 1:
            raise OSError(28, "No space left on device")
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", [[7] * 20])
    monkeypatch.undo()
    assert not indexed.exists(tmp_path / "a")
    assert not list(tmp_path.glob(".*"))
    write(tmp_path / "a", DOCUMENTS)
    assert read(tmp_path / "a") == DOCUMENTS


def test_an_exception_while_writing_keeps_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(ValueError, match="does not fit"):
        write(tmp_path / "a", [[1], [-1]])
    assert read(tmp_path / "a") == DOCUMENTS
    assert len(list(tmp_path.iterdir())) == 2
