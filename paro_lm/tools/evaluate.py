"""`paro-eval`: validation loss and perplexity of a trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paro_lm.cli import Tool, hydra_entry
from paro_lm.config import option


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which model is scored on which text."""

    run: str = option(
        "outputs/quickstart", "Run folder (its newest checkpoint), checkpoint folder, Hugging Face folder, or hf://owner/name."
    )
    valid: list[str] = option([], "Files, globs or prefixes of prepared tokens; empty = the validation part of the run's own data.")
    max_samples: int = option(0, "Windows of the run's sequence length to score; 0 = all.", least=0)
    micro_batch_size: int = option(8, "Windows per forward.", least=1)
    device: str = option("auto", "Device of the model.", choices="auto | cuda | mps | cpu")
    dtype: str | None = option(None, "Of the parameters; null = the type of the run.", choices="fp64 | fp32 | bf16 | fp16")


TOOL = Tool(
    name="paro-eval",
    description="validation loss and perplexity of a trained model.",
    examples=("paro-eval run=outputs/quickstart", "paro-eval run=outputs/quickstart valid='my/*.txt' max_samples=100"),
    schema=EvaluateConfig,
    config_name="evaluate",
)


def task(cfg: EvaluateConfig) -> int:
    """Print the loss in nats per token and the perplexity."""
    import torch

    from paro_lm.data.dataset import TokenDataset
    from paro_lm.data.loader import MicroBatch
    from paro_lm.data.prepare import prepare
    from paro_lm.distributed import pick_device
    from paro_lm.evaluate import evaluate
    from paro_lm.parallel.mesh import MeshShape, ParallelMesh
    from paro_lm.restore import restore

    device = pick_device(cfg.device, 0, 1)
    restored = restore(cfg.run, device=device, dtype=cfg.dtype)
    data = restored.cfg.data
    if cfg.valid:
        data = replace(data, train=cfg.valid, valid=[], weights=[], valid_fraction=0.0)
        if restored.tokenizer is not None:
            path = restored.tokenizer.path
            data = replace(data, tokenizer="bytes" if path is None else str(path))
    prepared = prepare(data, seed=restored.cfg.seed)
    prefixes = prepared.train if cfg.valid else prepared.valid
    if not prefixes:
        raise ValueError(f"run={cfg.run}: its data has no validation part; give valid=<files>.")
    datasets = [
        TokenDataset(
            [prefix],
            seq_length=restored.cfg.seq_length,
            seed=restored.cfg.seed,
            eod=prepared.eod,
            document_mask=data.document_mask,
            vocab_size=restored.meta["vocab_size"],
            cache_dir=Path(data.cache_dir) / "index",
            shuffle=False,
            packing=data.packing,
        )
        for prefix in prefixes
    ]
    mesh = ParallelMesh(shape=MeshShape(), rank=0, device=device)

    @torch.no_grad()
    def loss_of(batch: MicroBatch) -> torch.Tensor:
        return restored.model(batch.tokens, labels=batch.labels, positions=batch.positions, documents=batch.documents)

    loss = evaluate(loss_of, datasets, mesh, micro_batch_size=cfg.micro_batch_size, max_samples=cfg.max_samples)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    print(f"{restored.checkpoint}: step {restored.meta['step']}, validation loss {loss:.6f}, perplexity {perplexity:.4f}")
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
