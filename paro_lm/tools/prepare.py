"""`paro-prepare`: make the token files of a config before a run, and say what came out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paro_lm.cli import Tool, hydra_entry
from paro_lm.config import Config
from paro_lm.data.indexed import IndexedReader, exists, mask_prefix
from paro_lm.data.prepare import prepare

TOOL = Tool(
    name="paro-prepare",
    description="turn text into token files, as a training run with the same data options would",
    examples=(
        "paro-prepare data.train='my/*.jsonl.zst' data.tokenizer=path/of/tokenizer data.num_workers=16",
        "paro-prepare data=bytes data.train=book.txt data.valid_fraction=0.05",
    ),
)


def task(cfg: Config) -> int:
    """Prepare and print one line per pair of files."""
    from paro_lm.finetune import resolve

    cfg = resolve(cfg)
    start = time.perf_counter()
    prepared = prepare(cfg.data, seed=cfg.seed)
    for name, prefixes in (("train", prepared.train), ("valid", prepared.valid)):
        for prefix in prefixes:
            reader = IndexedReader(prefix)
            print(
                f"{name}: {prefix}  {reader.num_documents:,} documents, {reader.num_tokens:,} tokens, {reader.dtype.name}{_masked(prefix)}"
            )
    if not prepared.valid:
        print("valid: none")
    print(f"tokenizer: {prepared.tokenizer}  {prepared.vocab_size} ids, end of document {prepared.eod}")
    print(f"ready in {time.perf_counter() - start:.1f} s")
    return 0


def _masked(prefix: Path) -> str:
    """How many tokens carry loss, where not all do."""
    if not exists(mask_prefix(prefix)):
        return ""
    masks = IndexedReader(mask_prefix(prefix))
    trained = sum(int(masks.document(i).sum()) for i in range(masks.num_documents))
    return f", loss on {trained:,}"


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
