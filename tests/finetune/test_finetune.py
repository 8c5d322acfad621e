"""Fine-tuning equals what other libraries do from the same start, under every layout; what is frozen stays, bitwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paro_lm.checkpoint.reading import load_full
from paro_lm.config import Config
from paro_lm.finetune import complete
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.spec import ParameterSpec, initial_value
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.finetune.plain import STEPS, make_config, make_folder, plain_losses
from tests.test_trainer import losses

TOLERANCE = 1e-6  # of losses, float64
PEFT_NAMES = {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
LORA = ["finetune.lora_rank=3", "finetune.lora_alpha=12", "finetune.lora_targets=[q,v,o,gate,down]"]
PARTS: dict[str, list[str]] = {
    "full": [],
    "blocks": ["finetune.last_blocks=1"],
    "patterns": ["finetune.trainable=[layers.0.mlp.*,*norm*]"],
    "lora": LORA,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Config]:
    """One run per way of choosing parameters, on one process."""
    configs = {name: make_config(folder, f"run_name={name}", *options) for name, options in PARTS.items()}
    assert run_distributed(fit, 1, list(configs.values())) == [[0] * len(configs)]
    return {name: complete(cfg, world_size=1, local_world_size=1) for name, cfg in configs.items()}


def fit(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    return [Trainer(cfg).fit() for cfg in configs]


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").train()


def weights(cfg: Config) -> dict[str, torch.Tensor]:
    return load_full(Path(cfg.output_dir) / cfg.run_name / "checkpoints" / f"step_{cfg.steps}")


def their_name(name: str) -> str:
    """transformers' name of a parameter of ours."""
    from paro_lm.model.hf.families import family_named

    return family_named("llama").place(name).name


@pytest.mark.parametrize("name", ["full", "blocks", "patterns"])
def test_losses_equal_a_plain_transformers_loop(folder: Path, runs: dict[str, Config], name: str) -> None:
    model = loaded(folder)
    trained = {their_name(key.removeprefix("step/")) for key in weights(runs[name]) if key.startswith("step/")}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trained)
    expected = plain_losses(model, runs[name])
    torch.testing.assert_close(losses(runs[name]), expected, rtol=0, atol=TOLERANCE)
    assert expected[-1] < expected[0] - 0.1
    own = weights(runs[name])
    for key, parameter in model.named_parameters():
        (ours,) = [k for k in own if k.startswith("model/") and their_name(k.removeprefix("model/")) == key]
        torch.testing.assert_close(own[ours][: parameter.shape[0]], parameter.detach(), rtol=0, atol=1e-6)


def test_lora_equals_peft_from_the_same_start(folder: Path, runs: dict[str, Config]) -> None:
    import peft

    cfg = runs["lora"]
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(loaded(folder), peft.LoraConfig(r=3, lora_alpha=12, target_modules=modules)).double()
    specs = adapter_specs(cfg)
    with torch.no_grad():
        for name, spec in specs.items():
            linear, _, factor = name.rpartition(".lora.")
            _, layer, path = linear.split(".", 2)
            module = model.get_submodule(f"base_model.model.model.layers.{layer}.{PEFT_NAMES[path]}")
            getattr(module, f"lora_{factor.upper()}")["default"].weight.copy_(initial_value(name, spec, cfg.seed))
    expected = plain_losses(model, cfg)
    torch.testing.assert_close(losses(cfg), expected, rtol=0, atol=TOLERANCE)
    assert expected[-1] < expected[0] - 0.1
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(math.prod(spec.shape) for spec in specs.values())


def adapter_specs(cfg: Config) -> dict[str, ParameterSpec]:
    from paro_lm.finetune import prepare_model
    from paro_lm.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(cfg.model, vocab_size=300)
    prepare_model(model, cfg.finetune)
    return {name: spec for name, spec in model.parameter_specs().items() if ".lora." in name}


@pytest.mark.parametrize("name", list(PARTS))
def test_frozen_parameters_are_bitwise_unchanged_and_have_no_state(folder: Path, runs: dict[str, Config], name: str) -> None:
    given, own = HFCheckpoint(folder), weights(runs[name])
    trained = {key.removeprefix("step/") for key in own if key.startswith("step/")}
    for key in given.specs:
        same = torch.equal(own[f"model/{key}"], given.value_of(key)[: len(own[f"model/{key}"])])  # less vocabulary padding
        assert same is (key not in trained), key
    assert {key.removeprefix("exp_avg/") for key in own if key.startswith("exp_avg/")} == trained
    assert all(float(own[f"step/{key}"]) == STEPS for key in trained)
    counts = {"full": len(given.specs), "blocks": 9, "patterns": 3 + 5, "lora": 2 * 2 * 5}
    assert len(trained) == counts[name]


LAYOUTS = {
    2: [
        ["parallel.tp=2"],
        ["parallel.tp=2", "parallel.sequence_parallel=true", "seq_length=18"],
        ["parallel.pp=2"],
    ],
    4: [
        *[["parallel.group_size=2", "micro_batch_size=2", f"parallel.sharding={cell}"] for cell in ("NNN", "IIG", "GGG", "ING")],
        ["parallel.group_size=2", "micro_batch_size=2", "parallel.sharding=ING", "parallel.activation_checkpointing=full"],
        ["parallel.tp=2", "parallel.group_size=2", "parallel.sharding=ING"],
        ["parallel.pp=2", "parallel.group_size=1", "micro_batch_size=2", "parallel.sharding=IIG"],
    ],
}


@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_train_as_one_process_does(folder: Path, world_size: int) -> None:
    """LoRA in every layout, the last block and patterns in some: losses to 1e-10 and weights to 1e-9 in float64."""
    todo: list[tuple[list[str], list[str]]] = [(LORA, layout) for layout in LAYOUTS[world_size]]
    if world_size == 2:
        todo += [(PARTS["blocks"], LAYOUTS[2][0]), (PARTS["blocks"], LAYOUTS[2][2]), (PARTS["patterns"], LAYOUTS[2][2])]
    else:
        todo.append((PARTS["patterns"], LAYOUTS[4][3]))
    mine, theirs = [], []
    for index, (part, layout) in enumerate(todo):
        common = ["steps=6", *part, *[option for option in layout if option.startswith("seq_length")]]
        mine.append(make_config(folder, f"run_name=w{world_size}-{index}", *common, *layout))
        theirs.append(make_config(folder, f"run_name=plain{world_size}-{index}", *common))
    run_distributed(fit, 1, theirs)
    run_distributed(fit, world_size, mine, timeout=300.0)
    for (part, layout), a, b in zip(todo, mine, theirs, strict=True):
        label = f"{part} {layout}"
        torch.testing.assert_close(losses(a), losses(b), rtol=0, atol=1e-10, msg=lambda m, label=label: f"{label}: {m}")
        got, want = weights(a), weights(b)
        assert got.keys() == want.keys(), label
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name, label=label: f"{label} {n}: {m}")
