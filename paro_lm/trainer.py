"""The training loop: config -> mesh -> model -> engine -> optimizer -> data -> step -> checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from paro_lm import distributed
from paro_lm.best import BestCheckpoint
from paro_lm.build import build_engine, build_model, build_runner
from paro_lm.checkpoint.checkpointer import Checkpointer
from paro_lm.checkpoint.folder import latest_checkpoint
from paro_lm.config import Config, config_hash
from paro_lm.console import RunSummary, describe_run, say
from paro_lm.data.dataset import TokenDataset, check_vocab, open_dataset
from paro_lm.data.loader import Loader, MicroBatch
from paro_lm.data.prepare import Prepared, prepare
from paro_lm.evaluate import evaluate, unigram_loss
from paro_lm.finetune import FirstValues, complete, flops_per_token, hf_values, num_trainable
from paro_lm.logs import ReportedError, report_failure, setup_logging
from paro_lm.metrics import MetricsLogger, StepRecord, Throughput, memory_gb, peak_tflops
from paro_lm.model.dropout import dropout_seed
from paro_lm.model.flops import count_parameters
from paro_lm.model.transformer import Transformer
from paro_lm.optim.clip import clip_coefficient, grad_norm
from paro_lm.optim.optimizer import AdamW
from paro_lm.optim.scaler import LossScaler, SkipCounter
from paro_lm.optim.schedule import batch_size_at, learning_rate, total_samples
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import AXES, DATA_AXES, ParallelMesh
from paro_lm.parallel.replicas import check_replicas, replicas
from paro_lm.parallel.sharding import advice
from paro_lm.planning import with_advice, with_cell
from paro_lm.profiler import Profiler
from paro_lm.run import Run, check_tokenizer, open_run
from paro_lm.sample import sample_text
from paro_lm.stop import StopRequest

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_STOPPED = 0, 75
MAX_BASELINE_TOKENS = 100_000_000
"""Training tokens up to which the unigram baseline is counted at the end."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one step gave, the same on every rank. `loss` is the mean over loss tokens, `tokens` counts each token of the step
    once, `stop` says that a rank wants to stop. `bytes` are those that this rank sent per mesh axis since the last step's
    gradients were complete: updated parameters travel beside the next forward and belong to it.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    stop: bool
    bytes: dict[str, int]


class Trainer:
    """Pretrains, or continues, the run that a config describes. `fit()` is the whole life of it."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.console = Console()
        self.step = 0
        self.consumed_tokens = 0
        self.val_loss = math.nan
        self.vocab_size = cfg.model.vocab_size or 0  # the tokenizer's, once it is known
        self._stop = StopRequest(cfg.runtime.max_minutes)
        self._logs: Path | None = None  # the run folder, once ranks log into it

    def fit(self) -> int:
        """Train to the end; the exit code: 0 done, 75 stopped by a signal or the time limit after saving. A collective call.

        Raises ValueError for what the user can mend (data, checkpoint, layout), before anything is written where possible, and
        ReportedError when training failed, after each rank has told so.
        """
        self.world = distributed.initialize(self.cfg.runtime)
        together = False  # whether all ranks leave here
        try:
            run = self.open()
            if run.finished:
                self._say_finished(run)
                code = EXIT_DONE
            else:
                code = self._loop()
                self.close()
            together = True
            return code
        except (ValueError, OSError):
            raise  # the user's to mend; the command line says it in a sentence
        except Exception as error:
            error = self._advised(error)
            if self._logs is None:
                raise error from error.__cause__
            raise ReportedError(report_failure(self._logs, self.world.rank, error)) from error
        finally:
            distributed.shutdown(self.world, together=together)

    def _advised(self, error: Exception) -> Exception:
        held = {} if self._logs is None else self.state_bytes()
        peak = 1e9 * memory_gb(self.world.device)
        return with_advice(error, self.cfg, self.world, vocab_size=self.vocab_size, held=held, peak=peak)

    # ------------------------------------------------------------------ building

    def open(self) -> Run:
        """Build everything for the run that the config names, and load its checkpoint if it has one; nothing for a finished run."""
        if not distributed.all_ranks_equal(config_hash(self.cfg)):
            raise ValueError("the ranks were started with different configs; start all of them with the same command line.")
        self.cfg = complete(self.cfg, world_size=self.world.world_size, local_world_size=self.world.local_world_size)
        self.cfg, self._choice = with_cell(self.cfg, self.world)
        run = distributed.on_rank_zero(lambda: open_run(self.cfg))
        if not run.finished:
            self._build(run, prepare(self.cfg.data, seed=self.cfg.seed))  # a lock lets one rank work; the others find it done
        return run

    def _build(self, run: Run, prepared: Prepared) -> None:
        cfg, world = self.cfg, self.world
        self.prepared = prepared
        if run.checkpoint is not None:
            check_tokenizer(run, prepared.tokenizer, prepared.tokenizer_digest)
        distributed.seed_everything(cfg.seed)
        self.mesh = ParallelMesh.build(
            world_size=world.world_size,
            rank=world.rank,
            tp=cfg.parallel.tp,
            pp=cfg.parallel.pp,
            group_size=cfg.parallel.group_size,
            local_world_size=world.local_world_size,
            device=world.device,
            timeout=timedelta(minutes=cfg.runtime.timeout_minutes),
        )
        self.vocab_size = check_vocab(cfg, prepared.vocab_size)
        self.ledger = ByteLedger()
        self.model = build_model(cfg, self.mesh, vocab_size=self.vocab_size, ledger=self.ledger)
        self.specs = self.model.specs
        self.engine = build_engine(cfg, self.model, self.mesh, ledger=self.ledger, value_of=self._first_values(run))
        self.runner = build_runner(cfg, self.model, self.engine, self.mesh, ledger=self.ledger)
        self.optimizer = AdamW(self.engine, cfg.optim, decays=lambda name: self.specs[name].decay)
        self.scaler = LossScaler.from_config(cfg.precision)
        self.skips = SkipCounter(max_in_a_row=cfg.optim.max_skipped_steps)
        self.valid = [self._dataset([prefix], shuffle=False) for prefix in prepared.valid] if cfg.eval.every else []
        self.loader = Loader(
            self._dataset(prepared.train, weights=cfg.data.weights),
            data_rank=self.mesh.index(*DATA_AXES),
            data_size=self.mesh.size(*DATA_AXES),
            micro_batch_size=cfg.micro_batch_size,
            prefetch=True,
        )
        tokenizer = None if prepared.tokenizer in (None, "bytes") else Path(prepared.tokenizer)
        distributed.on_rank_zero(lambda: run.create(cfg, tokenizer))
        self.run, self._logs = run, run.folder
        setup_logging(run.folder, world.rank, console=self.console)
        if self._choice is not None:
            logger.info(self._choice)
        if (warning := advice(size.cell for size in self.engine.unit_sizes())) is not None:
            logger.warning(warning)
        self.checkpointer = Checkpointer(
            run.checkpoints, mesh=self.mesh, keep_last=cfg.checkpoint.keep_last, async_save=cfg.checkpoint.async_save
        )
        self.best: BestCheckpoint | None = None
        if cfg.checkpoint.keep_best != "none":
            self.best = BestCheckpoint(run.folder / "best", mesh=self.mesh, async_save=cfg.checkpoint.async_save, counts=run.goes_on)
        for report in (*self.loader.dataset.reports(), *(text for dataset in self.valid for text in dataset.reports())):
            logger.info(report)
        if run.checkpoint is not None:
            self._load(run.checkpoint)
            distributed.on_rank_zero(lambda: run.write_config(cfg))  # not before: what is refused must not change what a run says it is

    def close(self) -> None:
        """Give back what `open` took: threads and communicators. A collective call."""
        self.loader.close()
        self.engine.close()
        self.mesh.close()

    def _first_values(self, run: Run) -> Callable[[str], torch.Tensor] | None:
        """First values of parameters; None = those that follow from (seed, name)."""
        if run.checkpoint is not None:  # it replaces all of them
            return lambda name: torch.zeros(self.specs[name].local_shape)
        if self.cfg.model.init_from is None:
            return None
        return FirstValues(self.cfg).of(self.specs)

    def _dataset(self, prefixes: Any, *, weights: Any = None, shuffle: bool = True) -> TokenDataset:
        eod, vocab_size = self.prepared.eod, self.vocab_size
        return open_dataset(self.cfg, list(prefixes), eod=eod, vocab_size=vocab_size, weights=weights or (), shuffle=shuffle)

    # ------------------------------------------------------------------ one step

    def train_step(self) -> StepStats:
        """One attempt at an update."""
        micro_batches = self.loader.next(self._num_micro_batches())
        num_tokens = self.mesh.sum(sum(batch.num_loss_tokens for batch in micro_batches), DATA_AXES)
        loss, stops = self._agree(self._forward_backward(micro_batches, num_tokens))
        self.engine.finish_gradients()
        sent = self.ledger.by_axis()
        self.ledger.reset()
        norm = grad_norm(self.engine, replicated=lambda name: self.specs[name].replicated_axes) / self.scaler.scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        lr = learning_rate(self.cfg.optim, self.skips.updates, self.cfg.steps)
        if finite:
            self.optimizer.step(lr, scale=clip_coefficient(norm, self.cfg.optim.max_norm) / self.scaler.scale)
            self.engine.sync_parameters()
        else:
            self.engine.drop_gradients()
        tokens = sum(batch.tokens.numel() for batch in micro_batches) * self.mesh.size(*DATA_AXES)
        self.step += 1
        self.consumed_tokens += tokens
        self.skips.record(finite, step=self.step, loss=loss, grad_norm=norm, loss_scale=self.scaler.scale)
        self.scaler.update(finite)
        return StepStats(loss=loss, grad_norm=norm, lr=lr, tokens=tokens, stop=stops > 0, bytes=sent)

    def _forward_backward(self, micro_batches: list[MicroBatch], num_tokens: int) -> torch.Tensor:
        """Accumulate gradients of the mean loss over the step's tokens; returns this rank's part of that mean."""
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        data_rank = self.mesh.index(*DATA_AXES)

        def forward(chunk: nn.Module, hidden: torch.Tensor | None, index: int) -> torch.Tensor:
            self.model.set_dropout_seed(dropout_seed(self.cfg.seed, step=self.step, micro_batch=index, data_rank=data_rank))
            return run_chunk(chunk, hidden, batches[index])

        loss = self.runner.forward_backward(forward, len(batches), self.scaler.scale / max(1, num_tokens))
        return loss / max(1, num_tokens)

    def _agree(self, loss: torch.Tensor) -> tuple[float, float]:
        """Sum of the losses over data ranks, and how many ranks want to stop: one small all-reduce over the world."""
        own = loss.item() if self.mesh.coordinate("tp") == 0 else 0.0
        wants = 0.0 if self._stop.reason is None else 1.0
        values = torch.tensor([own, wants], dtype=torch.float64)
        loss_sum, stops = self.mesh.sum(values, AXES).tolist()
        return loss_sum, stops

    def _batch_size(self) -> int:
        multiple = self.cfg.micro_batch_size * self.mesh.size(*DATA_AXES)
        return batch_size_at(self.cfg.batch_ramp, self.cfg.global_batch_size, self.loader.consumed_samples, multiple)

    def _num_micro_batches(self) -> int:
        return self._batch_size() // (self.cfg.micro_batch_size * self.mesh.size(*DATA_AXES))

    # ------------------------------------------------------------------ the loop

    def _loop(self) -> int:
        cfg = self.cfg
        self._describe()
        throughput = Throughput(
            num_ranks=self.world.world_size,
            flops_per_token=flops_per_token(cfg, vocab_size=self.vocab_size),
            peak_tflops=peak_tflops(cfg.logging.peak_tflops, self.mesh.device, self.engine.dtypes.param),
        )
        profiler = Profiler(cfg.logging.profile_steps, self.run.folder / "profile", rank=self.world.rank)
        metrics = MetricsLogger(
            cfg.logging,
            self.run.folder,
            run_name=cfg.run_name,
            total_steps=cfg.steps,
            rank=self.world.rank,
            resume_step=self.step,
            config=asdict(cfg),
            console=self.console,
        )
        with self._stop, metrics:
            try:
                return self._steps(metrics, throughput, profiler)
            finally:
                profiler.close()
                self.loader.close()

    def _steps(self, metrics: MetricsLogger, throughput: Throughput, profiler: Profiler) -> int:
        cfg = self.cfg
        metrics.log_state_bytes(distributed.gather_objects(self.state_bytes()))
        if self.step == 0:
            self._evaluate(metrics)
        stopped = False
        while self.step < cfg.steps and not stopped:
            throughput.start()
            with profiler.step(self.step + 1):
                stats = self.train_step()
            self._log(metrics, throughput, stats)
            if cfg.parallel.check_replicas_every and self.step % cfg.parallel.check_replicas_every == 0:
                self._check_replicas()
            stopped = stats.stop and self.step < cfg.steps
            if not stopped and _due(self.step, cfg.eval.every, cfg.steps):
                self._evaluate(metrics)
                self._keep_best()
            if stopped or _due(self.step, cfg.checkpoint.every, cfg.steps) or self.step == cfg.steps:
                self._save()
        self.checkpointer.wait()
        if self.best is not None:
            self.best.wait()
        self.engine.wait()
        if stopped:
            logger.info("stopped after step %d, saved; the same command continues the run", self.step)
            return EXIT_STOPPED
        self._finish()
        return EXIT_DONE

    def _check_replicas(self) -> None:
        self.engine.wait()
        held = replicas(self.engine, self.optimizer.state_shards(), lambda name: self.specs[name].replicated_axes)
        check_replicas(self.mesh, held, self.engine.seams)

    def _log(self, metrics: MetricsLogger, throughput: Throughput, stats: StepStats) -> None:
        record = StepRecord(
            step=self.step,
            loss=stats.loss,
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            tokens=stats.tokens,
            consumed_tokens=self.consumed_tokens,
            skipped=self.skips.skipped,
            rates=throughput.stop(stats.tokens),
            memory_gb=memory_gb(self.mesh.device),
            loss_scale=self.scaler.scale if self.cfg.precision.param_dtype == "fp16" else None,
            bytes=stats.bytes,
        )
        metrics.log_step(record)

    def _evaluate(self, metrics: MetricsLogger) -> None:
        if not self.valid:
            return
        self.engine.wait()
        sent = self.ledger.entries()
        self.model.module.eval()
        loss = evaluate(
            lambda batch: self.runner.forward_only(lambda chunk, hidden, _: run_chunk(chunk, hidden, batch)),
            self.valid,
            self.mesh,
            micro_batch_size=self.cfg.micro_batch_size,
            max_samples=self._valid_samples,
        )
        self.model.module.train()
        self.engine.wait()
        self.ledger.restore(sent)  # bytes are those of training steps
        metrics.log_evaluation(self.step, loss)
        self.val_loss = loss

    @property
    def _valid_samples(self) -> int:
        return self.cfg.eval.batches * self.cfg.global_batch_size

    # ------------------------------------------------------------------ what a person is told

    def _describe(self) -> None:
        if self.world.rank != 0:
            return
        cfg, mesh = self.cfg, self.mesh
        num_params = count_parameters(cfg.model, vocab_size=self.vocab_size).total
        samples = total_samples(cfg.batch_ramp, cfg.global_batch_size, cfg.steps, cfg.micro_batch_size * mesh.size(*DATA_AXES))
        summary = RunSummary(
            run_name=cfg.run_name,
            model_name=cfg.model.name,
            num_params=num_params,
            num_trainable=num_trainable(cfg.finetune, cfg.model, vocab_size=self.vocab_size),
            data_tokens=self.prepared.num_train_tokens,
            samples_per_step=cfg.global_batch_size,
            seq_length=cfg.seq_length,
            steps=cfg.steps,
            total_tokens=samples * cfg.seq_length,
            state_bytes=self.state_bytes(),
            layout=f"{mesh.shape}, {cfg.parallel.sharding}, {cfg.precision.name}, {mesh.device}, {self.world.backend}",
        )
        describe_run(summary, self.console)

    def _finish(self) -> None:
        """The last words of a run: losses beside a baseline, a sample, where the checkpoint is, how to go on."""
        if self.cfg.logging.sample_prompt is not None:
            self._say(f"sample: {sample_text(self.engine, self.mesh, self.prepared, self.cfg)}")
        if self.valid and self.world.rank == 0 and self.prepared.num_train_tokens <= MAX_BASELINE_TOKENS:
            baseline = unigram_loss(self.prepared.train, self.valid, vocab_size=self.vocab_size, max_samples=self._valid_samples)
            self._say(f"validation loss {self.val_loss:.4f}, add-one unigram model of the training text {baseline:.4f} (nats per token)")
        self._say(f"checkpoint: {latest_checkpoint(self.run.checkpoints)}")
        if self.best is not None and math.isfinite(self.best.loss):
            self._say(f"best: {latest_checkpoint(self.best.folder)}, validation loss {self.best.loss:.4f}")
        self._say_how_to_go_on()

    def _say_finished(self, run: Run) -> None:
        self.run = run
        self._say(f"run {self.cfg.run_name} is finished: step {run.step} of {self.cfg.steps}, checkpoint {run.checkpoint}")
        self._say_how_to_go_on()

    def _say_how_to_go_on(self) -> None:
        longer = 2 * max(self.cfg.steps, self.run.step)
        self._say(
            f"to train on: the same command with steps={longer}; to change anything else: run_name=<new> and what you change; "
            f"to generate: paro-generate run={Path(self.cfg.output_dir) / self.cfg.run_name} prompt='...'"
        )

    def _say(self, text: str) -> None:
        if self.world.rank == 0:
            say(self.console, text)

    # ------------------------------------------------------------------ state

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's buffers: params, grads, main parameters with moments; `shared` of them count in param and main."""
        sizes = self.engine.state_bytes()
        return sizes | {"main": sizes["main"] + self.optimizer.state_bytes()}

    def _tensors(self) -> dict[str, Any]:
        self.engine.wait()
        model = {f"model/{name}": shard for name, shard in self.engine.parameter_shards().items()}
        return model | self.optimizer.state_shards()

    def _save(self) -> None:
        self.checkpointer.save(self.step, self._tensors(), meta=self._meta(), rank_state=distributed.random_state(self.mesh.device))

    def _keep_best(self) -> None:
        if self.best is not None and self.best.improves(self.val_loss):
            state = distributed.random_state(self.mesh.device)
            self.best.save(self.val_loss, self.step, self._tensors(), meta=self._meta(), rank_state=state)

    def _meta(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "consumed_tokens": self.consumed_tokens,
            "loader": self.loader.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skips": self.skips.state_dict(),
            "vocab_size": self.vocab_size,
            "tokenizer": None if self.prepared.tokenizer is None else str(self.prepared.tokenizer),
            "tokenizer_digest": self.prepared.tokenizer_digest,
            "config": asdict(self.cfg),
            "hf_config": hf_values(self.cfg),
        }

    def _load(self, path: Path) -> None:
        loaded = self.checkpointer.load(path, self._tensors())
        self.step, self.consumed_tokens = loaded.meta["step"], loaded.meta["consumed_tokens"]
        self.scaler.load_state_dict(loaded.meta["scaler"])
        self.skips.load_state_dict(loaded.meta["skips"])
        same_data = self.loader.load_state_dict(loaded.meta["loader"])
        self.engine.sync_parameters()
        self.engine.wait()
        self.ledger.reset()
        if loaded.rank_state is not None:
            distributed.set_random_state(loaded.rank_state, self.mesh.device)
        logger.info("continues from %s", path)
        for change in self.run.changes:
            logger.info("changed since: %s", change)
        if not same_data:
            logger.warning("the data differs from that of the checkpoint: the samples that follow are not those it would have seen.")


def run_chunk(chunk: nn.Module, hidden: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
    """One stage's part of a forward: hidden states, or on the last stage the summed loss."""
    assert isinstance(chunk, Transformer)
    return chunk(
        batch.tokens if hidden is None else hidden,
        labels=batch.labels if chunk.has_head else None,
        positions=batch.positions,
        documents=batch.documents,
    )


def _due(step: int, every: int, total: int) -> bool:
    return every > 0 and (step % every == 0 or step == total)
