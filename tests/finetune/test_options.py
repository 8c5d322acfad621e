"""What fine-tuning refuses, by name and with exit code 2, and what it fills in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paro_lm.cli import check_run, load
from paro_lm.config import CheckpointConfig, Config, ConfigError, DataConfig, EvalConfig, FinetuneConfig, ModelConfig, ParallelConfig
from paro_lm.finetune import check_patterns, flops_per_token, num_trainable, resolve
from paro_lm.model.flops import count_parameters, model_flops
from paro_lm.validation import validate
from tests.data.test_conversation import make_tokenizer
from tests.finetune.plain import make_config, make_folder
from tests.model.hf_models import make_model

CHAT = DataConfig(format="messages", train=["a.jsonl"], tokenizer="some/folder")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"finetune": FinetuneConfig(lora_rank=4, last_blocks=2)}, "finetune: finetune.last_blocks=2 and finetune.lora_rank=4 each say"),
        (
            {"finetune": FinetuneConfig(trainable=["head.*"], lora_rank=4)},
            "finetune: finetune.trainable=['head.*'] and finetune.lora_rank=4",
        ),
        ({"finetune": FinetuneConfig(lora_dropout=0.1)}, "finetune.lora_dropout: has no effect with finetune.lora_rank=0, got 0.1"),
        ({"finetune": FinetuneConfig(lora_rank=4, lora_targets=["q", "query"])}, "finetune.lora_targets: must be some of q, k, v, o,"),
        ({"finetune": FinetuneConfig(lora_rank=4, lora_targets=[])}, "finetune.lora_targets: must be some of"),
        ({"finetune": FinetuneConfig(lora_rank=4, lora_dropout=1.0)}, "finetune.lora_dropout: must be below 1, got 1.0"),
        ({"finetune": FinetuneConfig(last_blocks=5)}, "finetune.last_blocks: the model has model.num_layers=4 blocks, got 5"),
        (
            {"finetune": FinetuneConfig(lora_rank=4, lora_targets=["gate"]), "model": ModelConfig(activation="gelu")},
            "finetune.lora_targets: the MLP of model.activation=gelu has no gate",
        ),
        ({"model": ModelConfig(name="hf")}, "model.init_from: model=hf needs a Hugging Face folder"),
        ({"checkpoint": CheckpointConfig(keep_best="val_loss"), "eval": EvalConfig(every=0)}, "checkpoint.keep_best: val_loss needs"),
        ({"data": DataConfig(packing="documents")}, "data.packing: documents in one sample must not see each other"),
        ({"data": replace(CHAT, train=[])}, "data.train: data.format=messages needs files"),
        ({"data": replace(CHAT, tokenizer="bytes")}, "data.tokenizer: data.format=messages needs a tokenizer with a chat template"),
        ({"data": replace(CHAT, format="completion", tokenizer=None)}, "data.tokenizer: none is trained on data.format=completion"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(changes: dict[str, object], expected: str) -> None:
    (problem,) = validate(replace(Config(), **changes), 1)  # type: ignore[arg-type]
    assert problem.startswith(expected)


def test_frozen_parameters_and_a_split_backward() -> None:
    cfg = Config(
        finetune=FinetuneConfig(last_blocks=1), parallel=ParallelConfig(pp=2, schedule="zbv"), global_batch_size=16, micro_batch_size=4
    )
    problems = validate(cfg, 2)
    assert any(problem.startswith("parallel.schedule: zbv splits the backward of weights, which is not supported") for problem in problems)


def test_checks_wait_for_what_the_folder_and_the_data_decide() -> None:
    """Sizes of the default model and the default steps say nothing about those that will be filled in."""
    cfg = load(["model=hf", "model.init_from=some/folder", "seq_length=100000", "epochs=1", "optim.warmup_steps=1000"])
    assert check_run(cfg) == []
    problems = validate(cfg, 1)
    assert [problem.split(":")[0] for problem in problems] == ["optim.warmup_steps", "model.max_positions"]


def test_options_and_tokenizer_of_the_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3")
    cfg = resolve(make_config(folder, "model.dropout=0.1", "model.max_positions=128"))
    model = cfg.model
    assert (model.qk_norm, model.head_dim, model.vocab_size, model.name) == (True, 8, 300, "model")
    assert (model.dropout, model.max_positions, model.vocab_divisor) == (0.1, 128, 4)
    assert cfg.data.tokenizer == str(folder)
    assert resolve(cfg) == cfg
    other = make_tokenizer(tmp_path / "other", None)
    assert resolve(make_config(folder, f"data.tokenizer={other}")).data.tokenizer == str(other)
    with pytest.raises(ConfigError, match=r"model.hidden_size: comes from model.init_from, which has 16, got 20; leave it out"):
        resolve(make_config(folder, "model.hidden_size=20"))


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    with pytest.raises(ValueError, match=r"model has no tokenizer .* copy its files into the folder, or set data.tokenizer"):
        resolve(make_config(folder))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "mixtral"}))
    with pytest.raises(ValueError, match="model_type='mixtral' is not supported"):
        resolve(make_config(folder))
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="there is no such folder"):
        resolve(make_config(folder))


def test_patterns_that_match_nothing() -> None:
    model = ModelConfig(num_layers=2)
    with pytest.raises(ValueError, match=r"finetune.trainable: layers.2.\*, lm_head.\* matches no parameter; names are embedding"):
        check_patterns(FinetuneConfig(trainable=["layers.2.*", "layers.1.*", "lm_head.*"]), model, vocab_size=50)
    check_patterns(FinetuneConfig(trainable=["layers.1.*"]), model, vocab_size=50)


@pytest.mark.parametrize("tied", [True, False])
def test_counts_and_flops(tied: bool) -> None:
    cfg = Config(model=ModelConfig(hidden_size=64, num_layers=4, tie_embeddings=tied), seq_length=32)
    full = model_flops(cfg.model, vocab_size=500, seq_length=32) / 32
    counts = count_parameters(cfg.model, vocab_size=500)

    def tuned(**options: object) -> Config:
        return replace(cfg, finetune=FinetuneConfig(**options))  # type: ignore[arg-type]

    assert num_trainable(cfg.finetune, cfg.model, vocab_size=500) == counts.total
    assert num_trainable(FinetuneConfig(last_blocks=2), cfg.model, vocab_size=500) == 2 * counts.block
    assert num_trainable(FinetuneConfig(lora_rank=3, lora_targets=["q", "up"]), cfg.model, vocab_size=500) == 4 * 3 * (64 + 64 + 64 + 192)
    assert flops_per_token(tuned(trainable=["*"]), vocab_size=500) == full
    head, attention = 64 * 500, 64 * 32
    block = counts.block - 2 * 64
    expected = 2 * (4 * block + head) + 2 * 4 * attention + 2 * (block + head) + 4 * attention + 2 * block
    assert flops_per_token(tuned(last_blocks=1), vocab_size=500) == expected
    lora = flops_per_token(tuned(lora_rank=1), vocab_size=500)
    assert 0.66 * full < lora < 0.72 * full  # no gradients of the weights
