"""Fine-tuning: the options and first values that come from a Hugging Face folder, and what of the model is trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paro_lm.config import Config, ConfigError, FinetuneConfig, ModelConfig
from paro_lm.data.dataset import open_dataset
from paro_lm.data.prepare import prepare
from paro_lm.model.flops import attention_weights, model_flops
from paro_lm.model.hf.checkpoint import HFCheckpoint
from paro_lm.model.hf.config import model_from_hf, read_json
from paro_lm.model.hf.hub import HUB, hf_folder
from paro_lm.model.hf.tokenizer import has_tokenizer
from paro_lm.model.lora import add_adapters, is_adapter
from paro_lm.model.spec import ParameterSpec, initial_value
from paro_lm.model.trainable import trainable_in, trains_all, unmatched
from paro_lm.model.transformer import Transformer
from paro_lm.validation import validate

OF_THE_RUN = ("init_from", "dropout", "vocab_divisor")
"""Model options that the folder never decides."""
MAY_CHANGE = ("max_positions", "rope_theta", "rope_scaling", "init_std", "sliding_window")
"""Model options that may differ from the folder's, since no parameter depends on them (a longer context, say)."""
ANY_NAME = ("name",)
Options = TypeVar("Options", bound=Config)


def resolve(cfg: Config) -> Config:
    """The config with the options and the tokenizer of `model.init_from` filled in; without one, the config as it is.

    Reads config.json only, and may be called again on what it gave. Raises ConfigError for model options that contradict the folder,
    ValueError for a folder that cannot be used or has no tokenizer when the config names none.
    """
    if cfg.model.init_from is None:
        return cfg
    cfg = resolve_model(cfg)
    folder = hf_folder(str(cfg.model.init_from))
    if cfg.data.tokenizer is not None:
        return cfg
    if not has_tokenizer(folder):
        raise ValueError(
            f"model.init_from={cfg.model.init_from}: {folder} has no tokenizer (tokenizer.json, vocab.json or a sentencepiece .model); "
            "copy its files into the folder, or set data.tokenizer."
        )
    return replace(cfg, data=replace(cfg.data, tokenizer=str(folder)))


def resolve_model(cfg: Options) -> Options:
    """The model's part of `resolve`; needs no tokenizer."""
    if cfg.model.init_from is None:
        return cfg
    folder = hf_folder(cfg.model.init_from)
    _, theirs = model_from_hf(read_json(folder / "config.json"), where=folder / "config.json")
    return replace(cfg, model=_merged(cfg.model, theirs))


def _merged(mine: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    default, problems = ModelConfig(), []
    chosen: dict[str, Any] = {name: getattr(mine, name) for name in OF_THE_RUN}
    chosen["name"] = Path(str(mine.init_from).removeprefix(HUB)).name if mine.name in ("hf", default.name) else mine.name
    for item in dataclasses.fields(ModelConfig):
        value, given = getattr(theirs, item.name), getattr(mine, item.name)
        if item.name in (*OF_THE_RUN, *ANY_NAME) or given in (getattr(default, item.name), value):
            continue
        if item.name in MAY_CHANGE:
            chosen[item.name] = given
        else:
            problems.append(f"model.{item.name}: comes from model.init_from, which has {value}, got {given}; leave it out")
    if problems:
        raise ConfigError(problems)
    return replace(theirs, **chosen)


def complete(cfg: Config, *, world_size: int, local_world_size: int) -> Config:
    """The config with everything that `model.init_from` and the data decide filled in, and checked.

    Prepares the data when `epochs` is given. Raises ConfigError with all problems that only show now.
    """
    if cfg.model.init_from is None and cfg.epochs is None:
        return cfg
    cfg = resolve(cfg)
    if cfg.epochs is not None:
        prepared = prepare(cfg.data, seed=cfg.seed)
        dataset = open_dataset(
            cfg, prepared.train, eod=prepared.eod, vocab_size=max(cfg.model.vocab_size or 0, prepared.vocab_size), weights=cfg.data.weights
        )
        cfg = with_steps(cfg, dataset.samples_per_epoch)
    problems = validate(cfg, world_size, local_world_size)
    if problems:
        raise ConfigError(problems)
    return cfg


def hf_values(cfg: Config) -> Mapping[str, Any] | None:
    """config.json of `model.init_from`, which an export is written like; None without one."""
    return None if cfg.model.init_from is None else read_json(hf_folder(cfg.model.init_from) / "config.json")


def with_steps(cfg: Config, samples_per_epoch: int) -> Config:
    """The config with the steps that `epochs` passes over the data take, the last one begun counted whole."""
    if cfg.epochs is None:
        return cfg
    return replace(cfg, steps=max(1, math.ceil(cfg.epochs * samples_per_epoch / cfg.global_batch_size)))


class FirstValues:
    """First values of parameters: those of a Hugging Face checkpoint, and for adapters those that (seed, name) define.

    Raises ValueError as `HFCheckpoint` does.
    """

    def __init__(self, cfg: Config) -> None:
        assert cfg.model.init_from is not None
        self._checkpoint, self._seed = HFCheckpoint(cfg.model.init_from), cfg.seed

    def of(self, specs: Mapping[str, ParameterSpec]) -> Callable[[str], Tensor]:
        """For the boxes of `specs`."""

        def value_of(name: str) -> Tensor:
            if is_adapter(name):
                return initial_value(name, specs[name], self._seed)
            return self._checkpoint.value_of(name, specs[name])

        return value_of


def prepare_model(model: Transformer, cfg: FinetuneConfig) -> None:
    """Add adapters to (a stage of) the model and freeze what is not trained; before the engine takes its parameters."""
    if cfg.lora_rank:
        add_adapters(model, rank=cfg.lora_rank, alpha=cfg.lora_alpha, probability=cfg.lora_dropout, targets=cfg.lora_targets)
    if not trains_all(cfg):
        is_trained = trainable_in(cfg, model.cfg.num_layers)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))


def check_patterns(cfg: FinetuneConfig, model: ModelConfig, *, vocab_size: int) -> None:
    """Raises ValueError for patterns of `finetune.trainable` that match no parameter."""
    if not cfg.trainable:
        return
    with torch.device("meta"):
        names = list(Transformer(model, vocab_size=vocab_size).parameter_specs())
    wrong = unmatched(cfg, names)
    if wrong:
        last = [name for name in names if name.startswith(f"layers.{model.num_layers - 1}.")]
        known = [name for name in names if not name.startswith("layers.")] + last
        raise ValueError(
            f"finetune.trainable: {', '.join(wrong)} matches no parameter; names are {', '.join(known)}, and so on for every layer."
        )


def num_trainable(cfg: FinetuneConfig, model: ModelConfig, *, vocab_size: int) -> int:
    """Trainable elements of the whole model, without padding of the vocabulary."""
    with torch.device("meta"):
        whole = Transformer(model, vocab_size=vocab_size)
    prepare_model(whole, cfg)
    specs = whole.parameter_specs()

    def numel(spec: ParameterSpec) -> int:
        return math.prod((spec.shape[0] if spec.valid_rows is None else spec.valid_rows, *spec.shape[1:]))

    return sum(numel(specs[name]) for name, parameter in whole.named_parameters() if parameter.requires_grad)


def flops_per_token(cfg: Config, *, vocab_size: int) -> float:
    """Model FLOPs of forward and backward per token, as `model_flops` counts them, without what frozen parameters spare: the gradients
    of their weights, and everything below the first trained one.
    """
    if trains_all(cfg.finetune):
        return model_flops(cfg.model, vocab_size=vocab_size, seq_length=cfg.seq_length) / cfg.seq_length
    with torch.device("meta"):
        whole = Transformer(cfg.model, vocab_size=vocab_size)
    prepare_model(whole, cfg.finetune)
    table = "embedding.tokens.weight" if cfg.model.tie_embeddings else "head.output.weight"
    trained = {name: p.numel() for name, p in whole.named_parameters() if p.requires_grad}
    layers = [int(name.split(".")[1]) for name in trained if name.startswith("layers.")]
    lowest = 0 if any(name.startswith("embedding.") for name in trained) else min(layers, default=cfg.model.num_layers)
    matrices = {name: p.numel() for name, p in whole.named_parameters() if p.dim() == 2 and (name.startswith("layers.") or name == table)}
    matrices[table] = cfg.model.hidden_size * vocab_size
    attention = attention_weights(cfg.model, whole.sizes, cfg.seq_length)
    passed = sum(numel for name, numel in matrices.items() if name == table or int(name.split(".")[1]) >= lowest)
    forward = 2 * sum(matrices.values()) + 2 * cfg.model.num_layers * attention
    to_inputs = 2 * passed + 4 * (cfg.model.num_layers - lowest) * attention
    return forward + to_inputs + 2 * sum(numel for name, numel in matrices.items() if name in trained)
