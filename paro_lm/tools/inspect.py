"""`paro-inspect`: see what a run would be trained on: documents, counts, and the first samples, decoded, with their loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paro_lm.cli import Tool, hydra_entry
from paro_lm.config import Config
from paro_lm.data.dataset import IGNORE, Sample, TokenDataset
from paro_lm.data.indexed import IndexedReader
from paro_lm.data.prepare import Prepared, prepare
from paro_lm.data.tokenizer import Tokenizer, load_tokenizer

NUM_DOCUMENTS = 3
NUM_SAMPLES = 3
NUM_RUNS = 6
WIDTH = 100

TOOL = Tool(
    name="paro-inspect",
    description="show the documents and the first samples that a training run with the same options sees",
    examples=(
        "paro-inspect data.train='my/*.txt' seq_length=64",
        "paro-inspect data=chat data.train='chats/*.jsonl' data.tokenizer=path/of/checkpoint seq_length=512",
        "paro-inspect data=documents data.train=data_cache/tokens-0123456789abcdef/all data.tokenizer=bytes",
    ),
)


def describe_pair(prefix: Path, tokenizer: Tokenizer | None) -> list[str]:
    """Counts of a pair of files and the beginnings of its first documents."""
    reader = IndexedReader(prefix)
    sizes = reader.sizes if reader.num_documents else np.zeros(1, np.int64)
    lines = [
        f"{prefix}",
        f"  {reader.num_documents:,} documents, {reader.num_tokens:,} tokens of type {reader.dtype.name}",
        f"  tokens per document: least {sizes.min():,}, median {np.median(sizes):,.0f}, mean {sizes.mean():,.1f}, most {sizes.max():,}",
    ]
    for i in range(min(NUM_DOCUMENTS, reader.num_documents)):
        ids = reader.document(i, 0, min(WIDTH, int(reader.sizes[i]))).tolist()
        lines.append(f"  document {i} ({reader.sizes[i]:,} tokens): {_shorten(_decode(ids, tokenizer))}")
    return lines


def describe_sample(i: int, dataset: TokenDataset, tokenizer: Tokenizer | None) -> list[str]:
    """One sample: where it comes from, its text, and which tokens carry loss."""
    sample, where = dataset[i], dataset.sample_id(i)
    loss = sample.labels != IGNORE
    num_documents = 1 if sample.documents is None else int(sample.documents[-1]) + 1
    lines = [
        f"sample {i}: dataset {where.dataset}, epoch {where.epoch}, window {where.window}; "
        f"loss on {int(loss.sum())} of {len(loss)} tokens" + (f", {num_documents} documents" if sample.documents is not None else ""),
        f"  text: {_shorten(_decode(sample.tokens.tolist(), tokenizer), 4 * WIDTH)}",
        *_trained_lines(sample, loss, tokenizer),
        f"  tokens: {_row(sample.tokens)}",
        f"  labels: {_row(sample.labels)}",
    ]
    return lines + _mask_lines(sample, loss)


def _trained_lines(sample: Sample, loss: np.ndarray, tokenizer: Tokenizer | None) -> list[str]:
    """The first runs of tokens that carry loss, each as text; nothing when (nearly) all do."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loss, [False]]).astype(np.int8))).reshape(-1, 2)
    ends = 0 if sample.documents is None else int(sample.documents[-1]) + 1
    if int((~loss).sum()) <= ends:
        return []
    lines = [f"  trained on: {_shorten(_decode(sample.labels[start:stop].tolist(), tokenizer))}" for start, stop in edges[:NUM_RUNS]]
    return [*lines, f"  ... and {len(edges) - NUM_RUNS} more runs"] if len(edges) > NUM_RUNS else lines


def _mask_lines(sample: Sample, loss: np.ndarray) -> list[str]:
    lines = [f"  loss mask: {''.join('1' if x else '0' for x in loss[: 2 * WIDTH])}{'...' if len(loss) > 2 * WIDTH else ''}"]
    if sample.positions is not None:
        lines.append(f"  positions: {_row(sample.positions)}")
    return lines


def _row(values: np.ndarray, count: int = 16) -> str:
    return " ".join(map(str, values[:count].tolist())) + (" ..." if len(values) > count else "")


def _decode(ids: list[int], tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def _shorten(text: str, width: int = WIDTH) -> str:
    shown = repr(text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _tokenizer_of(prepared: Prepared) -> Tokenizer | None:
    if prepared.tokenizer is None or not (prepared.tokenizer == "bytes" or Path(prepared.tokenizer).exists()):
        print(f"the tokenizer {prepared.tokenizer} is not there; ids are shown instead of text")
        return None
    return load_tokenizer(prepared.tokenizer)


def task(cfg: Config) -> int:
    """Prepare (or find) the data of `cfg` and print it."""
    from paro_lm.finetune import resolve

    cfg = resolve(cfg)
    prepared = prepare(cfg.data, seed=cfg.seed)
    tokenizer = _tokenizer_of(prepared)
    print(f"tokenizer: {prepared.tokenizer}  {prepared.vocab_size} ids, end of document {prepared.eod}")
    for name, prefixes in (("training", prepared.train), ("validation", prepared.valid)):
        print(f"{name} data: {len(prefixes)} pairs")
        for prefix in prefixes:
            print("\n".join("  " + line for line in describe_pair(prefix, tokenizer)))
    dataset = TokenDataset(
        prepared.train,
        cfg.data.weights or None,
        seq_length=cfg.seq_length,
        seed=cfg.seed,
        eod=prepared.eod,
        document_mask=cfg.data.document_mask,
        vocab_size=prepared.vocab_size,
        packing=cfg.data.packing,
    )
    print("\n".join(dataset.reports()), end="\n" if dataset.reports() else "")
    steps = dataset.samples_per_epoch / cfg.global_batch_size
    print(f"{dataset.samples_per_epoch:,} samples of {cfg.seq_length} tokens per epoch, {steps:,.1f} steps of {cfg.global_batch_size}")
    print(f"blend weights: {', '.join(f'{w:.4f}' for w in dataset.weights)}")
    for i in range(NUM_SAMPLES):
        print("\n".join(describe_sample(i, dataset, tokenizer)))
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
