"""Time of a fine-tuning step against a plain loop with transformers (and peft for LoRA) from the same checkpoint, on the same batches.

One process, one device. Both take turns, step by step, and first the one, then the other; printed are the medians, the median of the
pairwise ratios and its bootstrap 95 % interval. Both read the same samples, clip, and use torch's fused AdamW. Needs the `dev` extra.

    python scripts/bench_finetune.py                      # a random Llama of about 10 M parameters, fp32
    python scripts/bench_finetune.py --model data_cache/SmolLM2-135M-Instruct --batch 2 --pairs 15
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paro_lm import distributed
from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.data.dataset import open_dataset
from paro_lm.data.indexed import IndexedWriter
from paro_lm.data.loader import Loader
from paro_lm.data.prepare import prepare
from paro_lm.trainer import Trainer

WARMUP = 3
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
WAYS = {"full": [], "lora": ["finetune.lora_rank=8", f"finetune.lora_targets=[{','.join(TARGETS)}]"]}
BAR = 1.05


def make_checkpoint(folder: Path, args: argparse.Namespace) -> Path:
    """A random Llama with the tokenizer `bytes`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from paro_lm.model.hf.tokenizer import write_bytes_tokenizer

    options: dict[str, Any] = {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 64}
    config = LlamaConfig(
        vocab_size=4096, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, **options
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_bytes_tokenizer(folder / "model")
    return folder / "model"


def make_config(folder: Path, model: Path, args: argparse.Namespace, way: str) -> Config:
    if not (folder / "tokens.bin").exists():
        with IndexedWriter(folder / "tokens", dtype=np.uint16) as writer:
            writer.add_document(np.random.default_rng(0).integers(0, 256, size=200_000).astype(np.uint16))
    return load(
        [
            "model=hf", f"model.init_from={model}", f"data.train=[{folder / 'tokens'}]", f"data.cache_dir={folder / 'cache'}",
            f"output_dir={folder}", f"run_name={way}", f"seq_length={args.seq_length}", f"global_batch_size={2 * args.batch}",
            f"micro_batch_size={args.batch}", f"precision={args.precision}", "optim.schedule=constant", "optim.lr=1e-5", "eval.every=0",
            "steps=1000000", *WAYS[way],
        ]
    )  # fmt: skip


def paro_step(cfg: Config, trainer: Trainer) -> Callable[[], None]:
    trainer.world = distributed.initialize(cfg.runtime)
    trainer.open()
    return lambda: trainer.train_step() and None


def plain_step(cfg: Config, way: str, device: torch.device) -> Callable[[], None]:
    """The loop that anybody would write: sum of losses over the step's tokens, clip, fused AdamW."""
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.precision.name]
    model: Any = AutoModelForCausalLM.from_pretrained(str(cfg.model.init_from), dtype=dtype).to(device).train()
    if way == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=[f"{name}_proj" for name in TARGETS]))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": cfg.optim.weight_decay}]
    groups += [{"params": rest, "weight_decay": 0.0}] if (rest := [p for p in trained if p.ndim < 2]) else []
    optim = cfg.optim
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    prepared = prepare(cfg.data, seed=cfg.seed)
    dataset = open_dataset(cfg, prepared.train, eod=prepared.eod, vocab_size=model.config.vocab_size)
    loader = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=cfg.micro_batch_size, prefetch=True)

    def step() -> None:
        micro_batches = [batch.to(device) for batch in loader.next(2)]
        num_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            logits = model(input_ids=batch.tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum") / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def median_and_interval(ratios: np.ndarray) -> tuple[float, float, float]:
    draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a Hugging Face folder; default: a random Llama")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch; a step has two")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=list(WAYS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or make_checkpoint(folder, args)
        for way in args.ways:
            trainer = Trainer(make_config(folder, model, args, way))
            ours = paro_step(trainer.cfg, trainer)
            device = trainer.mesh.device
            theirs = plain_step(trainer.cfg, way, device)
            pairs = []
            for turn in range(WARMUP + args.pairs):  # who is first changes, so that neither always finds the other's caches
                first, second = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
                times = {first: seconds_of(first, device)}
                times[second] = seconds_of(second, device)
                pairs.append((times[ours], times[theirs]))
            seconds = np.array(pairs[WARMUP:])
            ratio, low, high = median_and_interval(seconds[:, 0] / seconds[:, 1])
            mine, others = np.median(seconds, axis=0) * 1e3
            print(f"{way}: paro_lm {mine:.1f} ms, plain {others:.1f} ms a step of {2 * args.batch * args.seq_length} tokens; ", end="")
            print(f"ratio {ratio:.3f}  [{low:.3f}, {high:.3f}]  (bar: at most {BAR})")
            trainer.close()
            distributed.shutdown(trainer.world)


if __name__ == "__main__":
    main()
