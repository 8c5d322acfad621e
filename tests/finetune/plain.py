"""A plain fine-tuning loop with transformers and torch's AdamW, and the data that both sides read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paro_lm.cli import load
from paro_lm.config import Config
from paro_lm.data.dataset import open_dataset
from paro_lm.data.indexed import IndexedWriter
from paro_lm.data.loader import Loader
from paro_lm.data.prepare import prepare
from paro_lm.finetune import complete
from paro_lm.optim.schedule import learning_rate
from tests.data.test_conversation import make_tokenizer
from tests.model.hf_models import make_model

STEPS = 20


def make_folder(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> Path:
    """A tiny checkpoint with a tokenizer of 259 ids, and token files for it in `data`."""
    make_model(name, dtype, vocab_size=300, max_position_embeddings=64, **options).save_pretrained(folder)
    make_tokenizer(folder, None)
    random = np.random.default_rng(0)
    for part in ("train", "valid"):
        with IndexedWriter(folder / "data" / part, dtype=np.uint16) as writer:
            for length in random.integers(3, 90, size=30):
                writer.add_document(np.cumsum(random.integers(1, 4, size=length)) % 250 + 4)
    return folder


def make_config(folder: Path, *overrides: str) -> Config:
    return load(
        [
            "model=hf", f"model.init_from={folder}", "model.vocab_divisor=4",
            f"data.train=[{folder / 'data' / 'train'}]", f"data.valid=[{folder / 'data' / 'valid'}]", f"data.cache_dir={folder / 'cache'}",
            f"output_dir={folder / 'outputs'}", "precision=fp64", f"steps={STEPS}", "seq_length=17", "global_batch_size=8",
            "micro_batch_size=4", "optim.lr=0.01", "optim.warmup_steps=3", "eval.every=0", *overrides,
        ]
    )  # fmt: skip


def batches(cfg: Config) -> Callable[[], list[Any]]:
    """What every step trains on."""
    prepared = prepare(cfg.data, seed=cfg.seed)
    dataset = open_dataset(cfg, prepared.train, eod=prepared.eod, vocab_size=cfg.model.vocab_size or prepared.vocab_size)
    loader = Loader(dataset, data_rank=0, data_size=1, micro_batch_size=cfg.micro_batch_size)
    return lambda: loader.next(cfg.global_batch_size // cfg.micro_batch_size)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[Any], *, max_norm: float) -> float:
    """One step; the mean loss over its tokens."""
    num_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
    total = 0.0
    for batch in micro_batches:
        logits = model(input_ids=batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / num_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def plain_optimizer(model: Any, cfg: Config, *, fused: bool | None = None) -> torch.optim.AdamW:
    """AdamW with decay of matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": cfg.optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optim = cfg.optim
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=fused)


def plain_losses(model: Any, cfg: Config) -> list[float]:
    """Losses of every step of a plain loop over the same batches."""
    cfg = complete(cfg, world_size=1, local_world_size=1)
    optimizer, following, losses = plain_optimizer(model, cfg), batches(cfg), []
    for step in range(cfg.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg.optim, step, cfg.steps)
        losses.append(plain_step(model, optimizer, following(), max_norm=cfg.optim.max_norm))
    return losses
