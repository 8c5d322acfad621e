"""`paro-train`, also `python -m paro_lm.train` and under torchrun: pretrain, fine-tune or continue a run from a hydra config."""

from __future__ import annotations

from collections.abc import Sequence

from paro_lm.cli import Tool, check_run, hydra_entry
from paro_lm.config import Config

TOOL = Tool(
    name="paro-train",
    description="pretrain or fine-tune a language model, or continue a run.",
    examples=(
        "paro-train experiment=quickstart",
        "paro-train model=llama_125m data.train='my/*.txt' run_name=mine steps=2000 optim.lr=6e-4",
        "paro-train model=hf model.init_from=path/of/checkpoint data=chat data.train='chats/*.jsonl' finetune=lora epochs=2 run_name=chat",
        "torchrun --nproc-per-node 4 -m paro_lm.train parallel.sharding=NNN precision=bf16",
        "paro-train experiment=llama_7b cluster=h100_ib runtime.backend=fake runtime.world_size=1024",
    ),
    check=check_run,
)


def task(cfg: Config) -> int:
    """Train, or describe a fake world; the exit code is 0 when done and 75 when stopped after saving."""
    # torch is imported only for a config that is right
    if cfg.runtime.backend == "fake":
        from paro_lm.fake import describe_world

        return describe_world(cfg)
    from paro_lm.trainer import Trainer

    return Trainer(cfg).fit()


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
