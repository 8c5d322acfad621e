"""Worker processes of the preparation: chunks in, tokens out, in the order of the chunks.

Workers are plain subprocesses that import neither torch nor the main script, so they start in a fraction of a second, and no
lock of the parent is copied by a fork. Messages are pickles on pipes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paro_lm.data.conversation import RowEncoder, RowFormat
from paro_lm.data.encoding import EncoderSpec, build_encoder, flatten
from paro_lm.data.reading import Chunk, rows_of, texts_of


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How documents become tokens: `eod` is appended to each unless None; `dtype` is the type of the token file; `rows` says what
    rows hold when they are not texts."""

    spec: EncoderSpec
    text_key: str
    eod: int | None
    dtype: str
    rows: RowFormat | None = None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokens of a chunk: `lengths` per document, `ends` False if the last goes on in the next chunk, `skipped` documents that are
    empty or have nothing to train on. `mask` is 1 for tokens that carry loss, None where all do."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    ends: bool
    skipped: int
    read: int
    mask: NDArray[np.uint8] | None = None


class ChunkEncoder:
    """Encodes chunks in this process."""

    def __init__(self, options: EncodeOptions) -> None:
        self._options, self._encode = options, build_encoder(options.spec)
        self._rows = None if options.rows is None else RowEncoder(options.rows, self._encode, eod=options.eod)

    def __call__(self, batch: list[Chunk]) -> list[Encoded]:
        """One result per chunk. A document without a visible character is skipped, and so is one that gives no tokens (or rows none
        that carry loss).
        """
        if self._rows is not None:
            return [self._encode_rows(chunk, self._rows) for chunk in batch]
        texts = [texts_of(chunk, self._options.text_key) for chunk in batch]
        kept = [[t for t in of_chunk if t.strip() or not _is_whole(chunk)] for chunk, of_chunk in zip(batch, texts, strict=True)]
        ids = iter(self._encode([text for of_chunk in kept for text in of_chunk]))
        rows = [[next(ids) for _ in of_chunk] for of_chunk in kept]
        return [self._result(chunk, len(before), after) for chunk, before, after in zip(batch, texts, rows, strict=True)]

    def _encode_rows(self, chunk: Chunk, encoder: RowEncoder) -> Encoded:
        rows = rows_of(chunk, encoder.format.keys)
        pairs = [encoder(where, row) for where, row in rows]
        kept = [(ids, mask) for ids, mask in pairs if any(mask[1:])]
        tokens, lengths = flatten([ids for ids, _ in kept], np.dtype(self._options.dtype))
        mask, _ = flatten([mask for _, mask in kept], np.dtype(np.uint8))
        return Encoded(tokens=tokens, lengths=lengths, ends=True, skipped=len(rows) - len(kept), read=chunk.read, mask=mask)

    def _result(self, chunk: Chunk, num_texts: int, ids: list[list[int]]) -> Encoded:
        documents = [document for document in ids if document or not _is_whole(chunk)]
        eod = self._options.eod
        if eod is not None and chunk.ends:
            for document in documents:
                document.append(eod)
        tokens, lengths = flatten(documents, np.dtype(self._options.dtype))
        return Encoded(tokens=tokens, lengths=lengths, ends=chunk.ends, skipped=num_texts - len(documents), read=chunk.read)


def _is_whole(chunk: Chunk) -> bool:
    """Whether the chunk has complete documents, not a piece of a long one."""
    return chunk.kind != "text" or (chunk.ends and chunk.first == 1)


class EncoderPool:
    """`num_workers` processes that encode; 0 or 1 encode here. A context manager: leaving it ends the processes."""

    def __init__(self, options: EncodeOptions, num_workers: int) -> None:
        self._options, self._num = options, num_workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._local = threading.local()
        self._lock = threading.Lock()

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what a dead worker no longer reads
                        pipe.close()

    def map(self, batches: Iterable[list[Chunk]]) -> Iterator[list[Encoded]]:
        """Results in the order of `batches`; a bounded number is in flight. Errors of workers are raised here."""
        if self._num <= 1:
            yield from map(ChunkEncoder(self._options), batches)
            return
        pending: deque[Future[list[Encoded]]] = deque()
        threads = ThreadPoolExecutor(self._num, thread_name_prefix="paro-prepare")
        try:
            for batch in batches:
                pending.append(threads.submit(self._ask, batch))
                if len(pending) >= 3 * self._num:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            for process in self._processes:  # a thread that still waits for an answer gets an end of file
                process.kill()
            threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self, batch: list[Chunk]) -> list[Encoded]:
        process: subprocess.Popen[bytes] | None = getattr(self._local, "process", None)
        try:
            if process is None:
                process = self._local.process = self._start()
            _send(process.stdin, batch)
            answer = _receive(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = process.wait() if process is not None else None
            hint = "killed for memory? fewer data.num_workers need less"
            raise RuntimeError(f"a preparation worker ended with code {code} ({hint})") from error
        # Raised anew, so that what is reported begins here and not in a pickle.
        if isinstance(answer, ValueError):
            raise ValueError(str(answer)) from answer
        if isinstance(answer, Exception):
            raise RuntimeError(f"a preparation worker failed: {answer}") from answer
        return list(answer)

    def _start(self) -> subprocess.Popen[bytes]:
        # The parent's import path, and with -P nothing before it: a worker must not import what lies in the working directory.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", PYTHONPATH=paths)
        command = [sys.executable, "-P", "-c", "from paro_lm.data.worker import serve; serve()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        with self._lock:
            self._processes.append(process)
        _send(process.stdin, self._options)
        return process


def _send(pipe: IO[bytes] | None, message: object) -> None:
    assert pipe is not None
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None
    return pickle.load(pipe)


def serve() -> None:
    """The loop of a worker: options first, then batches until the pipe closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the messages
    requests = sys.stdin.buffer
    encoder: ChunkEncoder | None = None
    options = _receive(requests)
    while True:
        try:
            batch = _receive(requests)
        except (EOFError, KeyboardInterrupt):
            return
        try:
            encoder = encoder or ChunkEncoder(options)
            answer: object = encoder(batch)
        except KeyboardInterrupt:
            return
        except Exception as error:
            answer = error if isinstance(error, ValueError) and type(error) is ValueError else RuntimeError(repr(error))
        _send(replies, answer)
