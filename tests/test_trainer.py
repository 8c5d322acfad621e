"""The training loop as a whole: equal over layouts, resumes exactly, stops together, skips together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paro_lm.checkpoint.reading import load_full
from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.data.indexed import IndexedWriter
from paro_lm.data.loader import MicroBatch
from paro_lm.logs import ReportedError
from paro_lm.model.spec import Unit
from paro_lm.model.transformer import Transformer
from paro_lm.optim.scaler import LossScaler
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.pipeline import PlainRunner
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.unit_buffer import Dtypes
from paro_lm.testing import run_distributed
from paro_lm.trainer import EXIT_STOPPED, Trainer

MODEL = [
    "model.hidden_size=20",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_size=24",
    "model.vocab_divisor=2",
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared token files: train and valid, 30 documents of odd lengths over a vocabulary of 257."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    for name in ("train", "valid"):
        with IndexedWriter(folder / name, dtype=np.uint16) as writer:
            for length in random.integers(3, 90, size=30):
                document = random.integers(97, 123, size=length)
                writer.add_document(np.append(np.cumsum(document) % 26 + 97, 256).astype(np.uint16))
    return folder


def overrides(tokens: Path, *more: str, tied: bool = True) -> list[str]:
    """The command line of a small run on these tokens."""
    return [
        f"data.train=[{tokens / 'train'}]",
        f"data.valid=[{tokens / 'valid'}]",
        "data.tokenizer=bytes",
        f"data.cache_dir={tokens / 'cache'}",
        f"output_dir={tokens / 'outputs'}",
        f"model.tie_embeddings={str(tied).lower()}",
        *MODEL,
        "seq_length=17",
        "global_batch_size=12",
        "micro_batch_size=1",
        "precision=fp64",
        "optim.lr=0.01",
        "eval.every=0",
        "eval.batches=2",
        *more,
    ]


def make_config(tokens: Path, *more: str, tied: bool = True) -> Config:
    return load(overrides(tokens, *more, tied=tied))


def records(cfg: Config) -> list[dict[str, Any]]:
    lines = (Path(cfg.output_dir) / cfg.run_name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(cfg: Config) -> list[float]:
    steps = [record for record in records(cfg) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))  # one record per step, in order
    return [record["loss"] for record in steps]


def weights(cfg: Config, step: int) -> dict[str, torch.Tensor]:
    return load_full(Path(cfg.output_dir) / cfg.run_name / "checkpoints" / f"step_{step}")


def _fit(rank: int, world_size: int, *configs: Config) -> list[int]:
    return [Trainer(cfg).fit() for cfg in configs]


def test_loss_curves_do_not_depend_on_the_number_of_ranks(tokens: Path) -> None:
    configs = {n: make_config(tokens, f"run_name=ranks{n}", "steps=20", "eval.every=10", "data.document_mask=true") for n in (1, 2, 4)}
    for n, cfg in configs.items():
        assert run_distributed(_fit, n, cfg) == [[0]] * n
    for n in (2, 4):
        torch.testing.assert_close(losses(configs[n]), losses(configs[1]), rtol=0, atol=1e-10)
        val = [[r["val_loss"] for r in records(configs[k]) if "val_loss" in r] for k in (1, n)]
        assert len(val[0]) == 3  # steps 0, 10, 20
        torch.testing.assert_close(val[1], val[0], rtol=0, atol=1e-10)
    assert losses(configs[1])[-1] < losses(configs[1])[0] - 1


def test_resume_is_bitwise(tokens: Path) -> None:
    """T16: 10 steps against 4 + 6, with dropout; at another number of ranks the same samples."""
    common = ["model.dropout=0.1", "precision=fp32", "checkpoint.keep_last=0"]
    straight = make_config(tokens, "run_name=straight", "steps=10", *common)
    first = make_config(tokens, "run_name=cut", "steps=10", "checkpoint.every=4", *common)

    results = run_distributed(_interrupted, 2, straight, first)
    assert results[0][0] == results[1][0]
    codes, states = results[0]
    assert codes == [0, EXIT_STOPPED, 0]
    assert losses(first) == losses(straight)
    mine, theirs = weights(first, 10), weights(straight, 10)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 40
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    assert torch.equal(*states)


class _StopsAfter(Trainer):
    """Gets SIGTERM on rank 1 (of one rank: on it) in the middle of step `at`."""

    at = 4

    def _forward_backward(self, micro_batches: list[MicroBatch], num_tokens: int) -> torch.Tensor:
        if self.step + 1 == self.at and self.world.rank == self.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._forward_backward(micro_batches, num_tokens)


def _interrupted(rank: int, world_size: int, straight: Config, cut: Config) -> tuple[list[int], list[torch.Tensor]]:
    codes, states = [], []
    for trainer in (Trainer(straight), _StopsAfter(cut), Trainer(cut)):
        codes.append(trainer.fit())
        states.append(torch.get_rng_state())
    return codes, [states[0], states[2]]


def test_sigterm_to_one_rank_stops_all_after_the_same_step(tokens: Path) -> None:
    """T39, and a resume on one rank instead of two, in the same global batches."""
    cfg = make_config(tokens, "run_name=sigterm", "steps=7")
    whole = make_config(tokens, "run_name=no_sigterm", "steps=7")
    assert run_distributed(_stopped, 2, cfg) == [EXIT_STOPPED, EXIT_STOPPED]
    folder = Path(cfg.output_dir) / cfg.run_name
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()] == ["step_4"]
    assert len(losses(cfg)) == 4
    assert run_distributed(_fit, 1, cfg, whole) == [[0, 0]]
    torch.testing.assert_close(losses(cfg), losses(whole), rtol=0, atol=1e-10)


def _stopped(rank: int, world_size: int, cfg: Config) -> int:
    return _StopsAfter(cfg).fit()


class _Poisoned(Trainer):
    """Step 3 has a NaN loss on rank 1 only."""

    def _forward_backward(self, micro_batches: list[MicroBatch], num_tokens: int) -> torch.Tensor:
        if self.step + 1 not in self.poisoned or self.world.rank != 1:
            return super()._forward_backward(micro_batches, num_tokens)
        head = self.model.module.head
        handle = head.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
        try:
            return super()._forward_backward(micro_batches, num_tokens)
        finally:
            handle.remove()

    def train_step(self):  # type: ignore[no-untyped-def]
        before = self._copy() if self.step + 1 in self.poisoned else None
        stats = super().train_step()
        if before is not None:
            for name, value in self._copy().items():
                assert torch.equal(value, before[name]), name
        return stats

    def _copy(self) -> dict[str, torch.Tensor]:
        self.engine.wait()
        return {name: getattr(value, "data", value).clone() for name, value in self._tensors().items()}


def _poison(rank: int, world_size: int, cfgs: list[Config], forever: Config) -> tuple[list[Any], str]:
    updates = []
    for cfg in cfgs:
        trainer = _Poisoned(cfg)
        trainer.poisoned = {3}
        assert trainer.fit() == 0
        counted = float(trainer.optimizer.steps["head.norm.weight"])
        updates.append((trainer.skips.updates, trainer.skips.skipped, counted, trainer.scaler.scale))
    trainer = _Poisoned(forever)
    trainer.poisoned = {3, 4, 5, 6, 7}
    try:
        trainer.fit()
    except ReportedError as error:
        return updates, str(error)
    return updates, "no error"


def test_a_step_that_is_not_finite_is_skipped_on_every_rank(tokens: Path) -> None:
    """T17: NaN on one rank at step 3; weights, moments and counts stay; k in a row abort."""
    cfgs = [make_config(tokens, f"run_name=nan_{p}", "steps=5", f"precision={p}", "parallel.sharding=IIG") for p in ("bf16", "fp16")]
    forever = make_config(tokens, "run_name=nan_forever", "steps=9", "optim.max_skipped_steps=3")
    for updates, message in run_distributed(_poison, 2, cfgs, forever):
        assert updates == [(4, 1, 4.0, 1.0), (4, 1, 4.0, 65536.0 / 2)]
        assert "3 steps in a row" in message
    for cfg in cfgs:
        assert [record["skipped"] for record in records(cfg) if "loss" in record] == [0, 0, 1, 1, 1]


class _Sums(Transformer):
    """A model whose loss sum is the sum of its tokens at labelled places times a parameter that is 1."""

    has_head = True

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, *, labels: torch.Tensor, positions: Any, documents: Any) -> torch.Tensor:
        return (tokens * (labels >= 0) * self.scale).sum()

    def set_dropout_seed(self, seed: int) -> None: ...


def _batch(total: int, count: int) -> MicroBatch:
    tokens = torch.zeros(1, 600, dtype=torch.int64)
    labels = torch.full((1, 600), -100)
    tokens[0, 0], labels[0, :count] = total, 1
    return MicroBatch(tokens=tokens, labels=labels)


def _normalised(rank: int, world_size: int, cases: list[list[list[tuple[int, int]]]]) -> list[tuple[float, float]]:
    results = []
    mesh = ParallelMesh.build(world_size=world_size, rank=rank)
    grids = [GridCollectives(mesh, algorithm="native") for _ in range(2)]
    for case in cases:
        model = _Sums()
        fp64 = Dtypes(param=torch.float64, grad=torch.float64, reduce=torch.float64, main=torch.float64)
        trainer = Trainer.__new__(Trainer)
        trainer.cfg, trainer.step, trainer.mesh, trainer.model, trainer.scaler = load(["precision=fp64"]), 0, mesh, model, LossScaler()
        trainer.engine = ShardingEngine(
            model,
            [Unit(name="all", modules=(model,))],
            mesh=mesh,
            cells=Cell.parse("NNN"),
            dtypes=fp64,
            gather_collectives=grids[0],
            reduce_collectives=grids[1],
        )
        trainer.runner = PlainRunner(trainer.engine, model)
        batches = [_batch(*values) for values in case[rank]]
        num_tokens = mesh.sum(sum(batch.num_loss_tokens for batch in batches), DATA_AXES)
        loss = mesh.sum(trainer._forward_backward(batches, num_tokens).item(), DATA_AXES)
        trainer.engine.finish_gradients()
        results.append((loss, trainer.engine.trainable_buffers()[0].finished[0].item()))
        trainer.engine.close()
    return results


def test_loss_is_the_mean_over_all_tokens_of_a_step() -> None:
    """T5: sums of losses over sums of tokens, for micro-batches and for ranks; the gradient of `scale` equals the loss."""
    one_rank = [[[(4, 1), (3, 3)]], [[(20, 10), (500, 100)]], [[(2, 1), (90, 9)]]]
    for got, want in zip(run_distributed(_normalised, 1, one_rank)[0], (1.75, 520 / 110, 9.2), strict=True):
        assert got == pytest.approx((want, want), abs=1e-12)
    two_ranks = [[[(4, 1)], [(3, 3)]], [[(4, 1)], [(14, 7)]], [[(0, 0)], [(16, 8)]], [[(0, 0)], [(0, 0)]]]
    for results in run_distributed(_normalised, 2, two_ranks):
        for got, want in zip(results, (1.75, 2.25, 2.0, 0.0), strict=True):
            assert got == pytest.approx((want, want), abs=1e-12)
