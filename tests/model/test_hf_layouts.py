"""A Hugging Face model under other layouts: the same logits, and the same tensors when it is exported from a checkpoint of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paro_lm.build import DTYPES, build_engine, build_model
from paro_lm.checkpoint.checkpointer import Checkpointer
from paro_lm.config import Config, ParallelConfig, PrecisionConfig
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.spec import ParameterSpec
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.restore import open_source
from paro_lm.testing import run_distributed
from paro_lm.tools.export import export
from tests.model.hf_models import save_model, stored, tokens

TOLERANCE = 1e-5  # on logits, fp32
NAMES = ("llama3", "llama_tied_head_dim", "llama_biases", "mistral_window", "qwen2", "qwen3", "gpt2")  # llama_biases: one kv head
LAYOUTS = (
    {"tp": 2, "group_size": 1, "sharding": "NNN"},
    {"tp": 2, "group_size": 2, "sharding": "IIG", "sequence_parallel": True},
    {"tp": 2, "group_size": 1, "sharding": "GGG"},
    {"tp": 1, "group_size": 2, "sharding": "IIG"},
    {"tp": 1, "group_size": 2, "sharding": "GGG"},
    {"tp": 1, "group_size": 2, "sharding": "NNN"},
)
BF16 = PrecisionConfig(name="bf16", param_dtype="bf16")


def _config(checkpoint: HFCheckpoint, layout: dict[str, object], precision: PrecisionConfig) -> Config:
    return Config(model=checkpoint.model, parallel=ParallelConfig(**layout), precision=precision)  # type: ignore[arg-type]


def _value_of(checkpoint: HFCheckpoint, specs: Mapping[str, ParameterSpec], name: str) -> torch.Tensor:
    return checkpoint.value_of(name, specs[name])


@torch.no_grad()
def _logits(rank: int, world_size: int, folder: Path) -> float:
    """The largest difference to the saved logits over all models and layouts; every second import is saved as a run."""
    worst = 0.0
    device = torch.device("cpu")
    for index, layout in enumerate(LAYOUTS):
        mesh = ParallelMesh.build(
            world_size=world_size,
            rank=rank,
            tp=layout["tp"],  # type: ignore[arg-type]
            group_size=layout["group_size"],  # type: ignore[arg-type]
            local_world_size=world_size,
            device=device,
        )
        for name in NAMES:
            checkpoint = HFCheckpoint(folder / name)
            precision = BF16 if checkpoint.dtype == torch.bfloat16 else PrecisionConfig()
            cfg = _config(checkpoint, layout, precision)
            ledger = ByteLedger()
            part = build_model(cfg, mesh, vocab_size=checkpoint.vocab_size, ledger=ledger)
            value_of = partial(_value_of, checkpoint, part.specs)
            engine = build_engine(cfg, part, mesh, ledger=ledger, value_of=value_of)
            logits = part.module.eval()(tokens(40))
            engine.wait()
            if precision is not BF16:
                worst = max(worst, float((logits - torch.load(folder / name / "logits.pt")).abs().max()))
            if index in (1, 4):
                saved = {f"model/{key}": shard for key, shard in engine.parameter_shards().items()}
                meta = {"config": asdict(cfg), "vocab_size": checkpoint.vocab_size, "tokenizer": None, "hf_config": checkpoint.values}
                run = folder / f"run_{name}_{index}" / "checkpoints"
                Checkpointer(run, mesh=mesh, keep_last=1, async_save=False).save(3, saved, meta=meta, rank_state={})
            engine.close()
    return worst


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Tiny models with their logits, imported and saved again by four ranks; the differences of their logits."""
    folder = tmp_path_factory.mktemp("hf")
    with torch.no_grad():
        for name in NAMES:
            dtype = torch.bfloat16 if name == "qwen2" else torch.float32
            model = save_model(name, folder / name, dtype)
            torch.save(model(tokens(40)).logits, folder / name / "logits.pt")
    return folder, run_distributed(_logits, 4, folder, timeout=200.0)


def test_logits_do_not_depend_on_the_layout(imported: tuple[Path, list[float]]) -> None:
    _, differences = imported
    assert len(differences) == 4
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [1, 4])
def test_export_of_a_sharded_run_is_bitwise_what_was_imported(
    imported: tuple[Path, list[float]], name: str, index: int, tmp_path: Path
) -> None:
    folder, _ = imported
    source = open_source(folder / f"run_{name}_{index}")
    assert source.cfg.precision.param_dtype == ("bf16" if name == "qwen2" else "fp32")
    export(source, tmp_path)
    given, written = stored(folder / name), stored(tmp_path)
    assert written.keys() == given.keys()
    for key in given:
        assert written[key].dtype == given[key].dtype
        assert torch.equal(written[key], given[key]), key
    assert HFCheckpoint(tmp_path).values["model_type"] == HFCheckpoint(folder / name).values["model_type"]  # Mistral stays Mistral


def test_run_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_model("llama3", tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    spec = checkpoint.specs["embedding.tokens.weight"]
    with pytest.raises(ValueError, match=r"embedding.tokens.weight: the model wants the shape \(51, 16\), .* has \(50, 16\)"):
        checkpoint.value_of("embedding.tokens.weight", replace(spec, valid_rows=51))
    with pytest.raises(ValueError, match="has no parameter head.norm.bias"):
        checkpoint.value_of("head.norm.bias", spec)
    assert DTYPES["fp32"] is checkpoint.dtype
