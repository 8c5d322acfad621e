"""`paro-generate`: continue a prompt with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paro_lm.cli import Tool, hydra_entry
from paro_lm.config import option


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What is continued, and how the next token is chosen."""

    run: str = option(
        "outputs/quickstart", "Run folder (its newest checkpoint), checkpoint folder, Hugging Face folder, or hf://owner/name."
    )
    prompt: str = option("", "Text to continue; empty starts with the end-of-document token.")
    max_new_tokens: int = option(128, "Tokens to add at most.", least=1)
    temperature: float = option(0.8, "0 takes the likeliest token; higher is more varied.", least=0)
    top_k: int = option(50, "Draw among the likeliest k tokens; 0 = all.", least=0)
    top_p: float = option(1.0, "Draw among the fewest tokens whose probability reaches this.", above=0)
    num_samples: int = option(1, "Continuations to print.", least=1)
    seed: int = option(1234, "Equal seeds give equal texts.", least=0)
    device: str = option("auto", "Device of the model.", choices="auto | cuda | mps | cpu")
    dtype: str | None = option(None, "Of the parameters; null = the type of the run.", choices="fp64 | fp32 | bf16 | fp16")


TOOL = Tool(
    name="paro-generate",
    description="continue a prompt with a trained model.",
    examples=(
        "paro-generate run=outputs/quickstart prompt='My fellow Americans'",
        "paro-generate run=outputs/quickstart/checkpoints/step_100 prompt='The state of' temperature=0 max_new_tokens=32",
    ),
    schema=GenerateConfig,
    config_name="generate",
)


def task(cfg: GenerateConfig) -> int:
    """Print the prompt with each continuation."""
    from paro_lm.distributed import pick_device
    from paro_lm.model.generate import generate
    from paro_lm.restore import restore

    restored = restore(cfg.run, device=pick_device(cfg.device, 0, 1), dtype=cfg.dtype)
    tokenizer = restored.need_tokenizer()
    start = [tokenizer.eod] if tokenizer.eod is not None else [0]
    prompt = tokenizer.encode_batch([cfg.prompt])[0] or start
    prompts = [prompt] * cfg.num_samples
    rows = generate(
        restored.model,
        prompts,
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        eos=tokenizer.eod,
        seed=cfg.seed,
    )
    for row in rows:
        print(tokenizer.decode([token for token in row if token != tokenizer.eod]), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    hydra_entry(task, TOOL, argv)


if __name__ == "__main__":
    main()
