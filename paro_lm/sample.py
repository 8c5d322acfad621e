"""Text from a model in training."""

from __future__ import annotations

from paro_lm.config import Config
from paro_lm.data.prepare import Prepared
from paro_lm.data.tokenizer import load_tokenizer
from paro_lm.model.generate import generate
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh


def sample_text(engine: ShardingEngine, mesh: ParallelMesh, prepared: Prepared, cfg: Config) -> str:
    """The prompt of the config with its continuation, drawn at temperature 0.8 by the first data rank ("" elsewhere).

    With pipeline stages no rank has the whole model; the text then says what to do. A collective call.
    """
    if mesh.size("pp") > 1:
        return f"none with pipeline stages; paro-generate run={cfg.output_dir}/{cfg.run_name} draws one from the checkpoint"
    if prepared.tokenizer is None:
        return "none, the tokenizer of the prepared data is not known (data.tokenizer names it)"
    with engine.unsharded() as model:
        assert isinstance(model, Transformer)
        if mesh.index(*DATA_AXES) != 0:
            return ""
        tokenizer = load_tokenizer(prepared.tokenizer)
        prompt = tokenizer.encode_batch([cfg.logging.sample_prompt or ""])[0] or [tokenizer.eod or 0]
        prompt = prompt[-max(1, cfg.model.max_positions - 1) :]
        length = min(cfg.logging.sample_tokens, cfg.model.max_positions - len(prompt))
        (ids,) = generate(model, [prompt], max_new_tokens=length, temperature=0.8, top_k=50, eos=tokenizer.eod, seed=cfg.seed)
        return tokenizer.decode([token for token in ids if token != tokenizer.eod])
