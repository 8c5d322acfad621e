"""Time of a training step against a plain PyTorch loop over the same model, and against transformers' Trainer with Llama of the same size.

One process, one device. All three take turns, step by step, so that whatever else the machine does hits all alike; printed are the
median of the pairwise ratios and its bootstrap 95 % interval. Needs the `dev` extra.

    python scripts/bench_step.py                        # about 10 M parameters, fp32
    python scripts/bench_step.py --hidden 512 --layers 8 --pairs 30
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as HFTrainer

from paro_lm import distributed
from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.data.indexed import IndexedWriter
from paro_lm.model.flops import count_parameters
from paro_lm.model.transformer import Transformer
from paro_lm.trainer import Trainer

VOCAB, WARMUP = 4096, 3


def make_config(folder: Path, args: argparse.Namespace) -> Config:
    with IndexedWriter(folder / "tokens", dtype=np.uint16) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 256, size=200_000).astype(np.uint16))
    return load(
        [
            f"data.train=[{folder / 'tokens'}]",
            "data.tokenizer=bytes",
            f"data.cache_dir={folder / 'cache'}",
            f"output_dir={folder}",
            f"model.vocab_size={VOCAB}",
            f"model.hidden_size={args.hidden}",
            f"model.num_layers={args.layers}",
            f"model.num_heads={args.hidden // 64}",
            f"model.num_kv_heads={args.hidden // 64}",
            f"model.ffn_size={args.hidden * 3}",
            f"seq_length={args.seq_length}",
            f"global_batch_size={args.batch}",
            f"micro_batch_size={args.batch}",
            f"precision={args.precision}",
            "optim.schedule=constant",
            "optim.lr=1e-4",
            "eval.every=0",
            "steps=1000000",
        ]
    )


def paro_step(cfg: Config) -> Callable[[], None]:
    trainer = Trainer(cfg)
    trainer.world = distributed.initialize(cfg.runtime)
    trainer.open()
    return lambda: trainer.train_step() and None


def batch_of(cfg: Config, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (cfg.micro_batch_size, cfg.seq_length + 1), generator=generator)


def plain_step(cfg: Config) -> Callable[[], None]:
    """The loop that anybody would write around the same model class: sum of losses over tokens, clip, fused AdamW."""
    model = Transformer(cfg.model, vocab_size=VOCAB).initialize(cfg.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": cfg.optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.optim.lr, betas=(cfg.optim.beta1, cfg.optim.beta2), eps=cfg.optim.eps, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        batch = batch_of(cfg, generator)
        loss = model(batch[:, :-1].contiguous(), labels=batch[:, 1:].contiguous()) / batch[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


class TakeTurns(TrainerCallback):
    """Between two steps of the Hugging Face Trainer, one step of each of the others; their time does not count for it."""

    def __init__(self, steps: dict[str, Callable[[], None]]) -> None:
        self.steps = steps
        self.seconds: dict[str, list[float]] = {name: [] for name in (*steps, "transformers")}
        self.started = 0.0

    def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.started == 0.0:
            self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.seconds["transformers"].append(time.perf_counter() - self.started)
        for name, step in self.steps.items():
            begin = time.perf_counter()
            step()
            self.seconds[name].append(time.perf_counter() - begin)
        self.started = time.perf_counter()


def run_turns(cfg: Config, turns: TakeTurns, pairs: int, folder: Path) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=cfg.model.hidden_size,
            intermediate_size=cfg.model.ffn_size,
            num_hidden_layers=cfg.model.num_layers,
            num_attention_heads=cfg.model.num_heads,
            num_key_value_heads=cfg.model.num_kv_heads,
        )
    ).to({"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.precision.name])
    generator = torch.Generator().manual_seed(0)
    rows = [batch_of(cfg, generator)[0] for _ in range(cfg.micro_batch_size * (pairs + WARMUP))]
    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in rows]  # the model shifts labels itself
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=cfg.micro_batch_size,
        max_steps=pairs + WARMUP,
        learning_rate=cfg.optim.lr,
        lr_scheduler_type="constant",
        max_grad_norm=cfg.optim.max_norm,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    HFTrainer(model=model, args=arguments, train_dataset=data, callbacks=[turns]).train()


def median_and_interval(ratios: np.ndarray) -> tuple[float, float, float]:
    draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cfg = make_config(folder, args)
        turns = TakeTurns({"paro_lm": paro_step(cfg), "plain": plain_step(cfg)})
        run_turns(cfg, turns, args.pairs, folder)
    seconds = {name: np.array(values[WARMUP:]) for name, values in turns.seconds.items()}
    tokens = cfg.micro_batch_size * cfg.seq_length
    print(f"{count_parameters(cfg.model, vocab_size=VOCAB).total:,} parameters, {args.precision}, {tokens} tokens a step, "
          f"{torch.get_num_threads()} threads, {args.pairs} pairs")  # fmt: skip
    for name, values in seconds.items():
        print(f"{name:<13} {np.median(values) * 1e3:8.1f} ms a step, {tokens / np.median(values):10,.0f} tokens/s")
    step, low, high = median_and_interval(seconds["paro_lm"] / seconds["plain"])
    print(f"step time, paro_lm / plain loop:           {step:.3f}  [{low:.3f}, {high:.3f}]  (bar: at most 1.03)")
    rate, low, high = median_and_interval(seconds["transformers"] / seconds["paro_lm"])
    print(f"tokens/s, paro_lm / transformers.Trainer:  {rate:.3f}  [{low:.3f}, {high:.3f}]  (bar: at least 1.00)")


if __name__ == "__main__":
    main()
