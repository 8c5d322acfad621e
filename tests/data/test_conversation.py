"""Rows that are no text: which tokens the model should say, for every kind of chat template; how they are stored and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paro_lm.config import DataConfig
from paro_lm.data.conversation import ChatRenderer
from paro_lm.data.dataset import IGNORE, TokenDataset
from paro_lm.data.indexed import IndexedReader, mask_prefix
from paro_lm.data.prepare import prepare, read_manifest
from paro_lm.data.streams import pack
from paro_lm.tools import inspect
from paro_lm.tools import prepare as prepare_tool
from tests.command import call

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)
# Only the last answer shows that it thought (as Qwen3): the beginning of a conversation renders otherwise than inside of it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if loop.last and m['role'] == 'assistant' %}"
    "{{ '<think></think>' }}{% endif %}{{ m['content'] | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRICT = "{% if messages | length < 3 %}{{ raise_exception('needs three messages') }}{% endif %}" + CHATML
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six, of course."},
]


def make_tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level tokenizer of 260 ids with ChatML's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*special, *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|endoftext|>"]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


def said(tokenizer: Path, messages: list[dict[str, Any]]) -> list[str]:
    """The runs of tokens that carry loss, as text."""
    renderer = ChatRenderer(str(tokenizer))
    ids, mask = renderer("row 1", messages)
    assert len(ids) == len(mask)
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    return [renderer._tokenizer.decode(ids[a:b]) for a, b in edges]


@pytest.mark.parametrize(
    ("template", "last"),
    [(CHATML, "Six, of course."), (MARKED, "Six, of course."), (THINKING, "<think></think>Six, of course."), (STRICT, "Six, of course.")],
    ids=["prefix", "generation", "thinking", "strict"],
)
def test_loss_is_on_what_the_assistant_says(tmp_path: Path, template: str, last: str) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    assert said(tokenizer, CHAT) == ["It is four.<|im_end|>", last + "<|im_end|>"]
    padded = [m | {"content": f" {m['content']}\n"} for m in CHAT]
    runs = said(tokenizer, padded)
    blanks = "" if template == THINKING else "\n"  # that template strips what it is given
    assert [run.lstrip() for run in runs] == [f"It is four.{blanks}<|im_end|>", f"{last}{blanks}<|im_end|>"]
    assert said(tokenizer, CHAT[:2] + CHAT[3:4]) == []


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(tmp_path: Path, train: Path, **options: Any) -> DataConfig:
    return DataConfig(train=[str(train)], cache_dir=str(tmp_path / "cache"), num_workers=1, **{"valid_fraction": 0.0, **options})


def test_chats_through_files_to_labels(tmp_path: Path) -> None:
    """jsonl and parquet give the same tokens and masks; packing keeps conversations whole; T18 for documents that have eods inside."""
    import datasets

    tokenizer = make_tokenizer(tmp_path / "tokenizer", CHATML)
    rows = [{"messages": [CHAT[1], CHAT[2] | {"content": "x" * (5 + 7 * i)}]} for i in range(9)]
    rows.insert(3, {"messages": CHAT[:2]})  # nothing to train on
    chats = write(tmp_path / "a.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    options: dict[str, Any] = {"format": "messages", "tokenizer": str(tokenizer), "packing": "documents", "document_mask": True}
    prepared = prepare(config(tmp_path, chats, **options), seed=0)
    again = prepare(config(tmp_path, tmp_path / "a.parquet", **options), seed=0)
    (prefix,), (other,) = prepared.train, again.train
    assert prefix != other
    assert np.array_equal(IndexedReader(prefix).flat, IndexedReader(other).flat)
    assert np.array_equal(IndexedReader(mask_prefix(prefix)).flat, IndexedReader(mask_prefix(other)).flat)
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert (manifest["num_documents"], manifest["num_skipped"]) == (9, 1)
    assert manifest["num_trained_tokens"] == sum(5 + 7 * i + 1 for i in range(9)) == int(IndexedReader(mask_prefix(prefix)).flat.sum())

    head = IndexedReader(prefix).sizes[0] - 5 - 2  # all conversations begin alike
    seq = int(head) + 40
    dataset = TokenDataset(prepared.train, seq_length=seq, seed=3, eod=prepared.eod, document_mask=True, packing="documents")
    long = [n for n in (5 + 7 * i + 2 + head for i in range(9)) if n > seq + 1]
    assert 0 < len(long) < 9
    stream: Any = dataset.streams[0]
    assert (stream.num_truncated, stream.num_cut_tokens, stream.num_left_out) == (len(long), sum(n - seq - 1 for n in long), 0)
    seen = 0
    for i in range(dataset.complete_samples):
        sample = dataset[i]
        assert sample.positions is not None
        begins = np.flatnonzero(sample.positions == 0)
        for start, stop in zip(begins, [*begins[1:], seq], strict=True):
            labels, inputs = sample.labels[start:stop], sample.tokens[start:stop]
            trained = labels != IGNORE
            if not trained.any():
                assert (inputs == prepared.eod).all()  # the rest is padding
                continue
            assert trained.argmax() == head - 1
            assert np.array_equal(labels[trained], np.append(sample.tokens, -1)[start + 1 : stop + 1][trained]) or stop == seq
            seen += int(trained.sum())
    kept = [min(5 + 7 * i + 1, seq + 1 - head) for i in range(9)]
    assert seen == sum(kept)
    assert "longer than a sample" in dataset.reports()[0]
    epochs = [[dataset.sample_id(e * dataset.samples_per_epoch + i).window for i in range(dataset.samples_per_epoch)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(dataset.samples_per_epoch))
    with pytest.raises(ValueError, match=r"no token of its 9 documents carries loss within the first 9 tokens"):
        TokenDataset(prepared.train, seq_length=8, seed=3, document_mask=True, packing="documents")
    windows = TokenDataset(prepared.train, seq_length=31, seed=3, eod=prepared.eod, document_mask=True, shuffle=False)
    labels = np.concatenate([windows[i].labels for i in range(windows.complete_samples)])
    mask = IndexedReader(mask_prefix(prefix)).flat[1 : len(labels) + 1]
    assert np.array_equal(labels != IGNORE, mask != 0)


def test_pack_is_best_fit_decreasing() -> None:
    documents, starts = pack(np.asarray([3, 7, 5, 2, 8, 5]), 10)
    bins = [documents[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    assert bins == [[4, 3], [1, 0], [2, 5]]
    sizes = np.random.default_rng(0).integers(1, 101, size=2000)
    documents, starts = pack(sizes, 100)
    assert sorted(documents.tolist()) == list(range(2000))
    filled = np.add.reduceat(sizes[documents], starts[:-1])
    assert filled.max() <= 100
    assert len(filled) <= 1.02 * sizes.sum() / 100 + 1


@pytest.mark.parametrize("name", ["bytes", "tokenizer"])
def test_completions_carry_the_loss_and_their_end(tmp_path: Path, name: str) -> None:
    source = "bytes" if name == "bytes" else str(make_tokenizer(tmp_path / "tokenizer", None))
    rows = [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "", "completion": "alone"}, {"prompt": "no answer", "completion": ""}]
    path = write(tmp_path / "a.jsonl", rows)
    prepared = prepare(config(tmp_path, path, format="completion", tokenizer=source), seed=0)
    (prefix,) = prepared.train
    tokens, masks = IndexedReader(prefix), IndexedReader(mask_prefix(prefix))
    assert [masks.document(i).tolist() for i in range(2)] == [[0] * 7 + [1, 1, 1], [1] * 6]
    assert tokens.num_documents == 2
    assert [int(tokens.document(i)[-1]) for i in range(2)] == [prepared.eod] * 2


def test_held_out_rows_keep_their_masks(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * i, "completion": "c" * (12 - i)} for i in range(1, 11)]
    prepared = prepare(
        config(tmp_path, write(tmp_path / "a.jsonl", rows), format="completion", tokenizer="bytes", valid_fraction=0.2), seed=0
    )
    for prefix in (*prepared.train, *prepared.valid):
        reader, masks = IndexedReader(prefix), IndexedReader(mask_prefix(prefix))
        for i in range(reader.num_documents):
            assert np.array_equal(masks.document(i) == 0, reader.document(i) == ord("p"))
    assert sum(IndexedReader(prefix).num_documents for prefix in prepared.valid) == 2


def test_bad_rows_are_named_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, plain = make_tokenizer(tmp_path / "chat", STRICT), make_tokenizer(tmp_path / "plain", None)
    cases = [
        ([{"messages": CHAT}], plain, "has no chat template"),
        ([{"messages": CHAT[:2]}], chat, "a.jsonl:1: the chat template refuses this conversation: needs three messages"),
        ([{"messages": CHAT[:2] + CHAT[3:4]}], chat, "none of 1 rows has what the assistant says"),
        ([{"messages": CHAT}, {"text": "x"}], chat, "a.jsonl:2: no field 'messages', its fields are text"),
        ([{"messages": "hello"}], chat, "a.jsonl:1: 'messages' must be a list of messages, got str"),
        ([{"messages": [{"from": "human", "value": "x"}]}], chat, "must be an object with a string role and content"),
    ]
    for rows, tokenizer, message in cases:
        path = write(tmp_path / "a.jsonl", rows)
        arguments = ["data=chat", f"data.train={path}", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}"]
        assert call(prepare_tool.main, *arguments) == 2, message
        assert message in capsys.readouterr().err
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    assert call(prepare_tool.main, f"data.train={path}", "data.tokenizer=bytes", f"data.cache_dir={tmp_path / 'cache'}") == 2
    assert "no field 'text', its fields are messages; set data.format=messages" in capsys.readouterr().err


def test_inspect_shows_what_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", CHATML)
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    arguments = ["data=chat", f"data.train={path}", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert call(inspect.main, *arguments, "data.valid_fraction=0", "seq_length=200") == 0
    out = capsys.readouterr().out
    assert out.count("trained on: 'It is four.<|im_end|>'") == out.count("trained on: 'Six, of course.<|im_end|>'") == 3
    assert "3 documents in 3 samples" in out
