"""The inventory from options equals the units, names and flat buffers of the model itself (meta device), exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro_lm.config import Config, FinetuneConfig, ModelConfig, ParallelConfig
from paro_lm.finetune import prepare_model
from paro_lm.model.transformer import Transformer
from paro_lm.parallel import buffer
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.buffer import FlatLayout
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.tensor import TensorParallel
from paro_lm.planner.inventory import ALIGNMENT, rank_profiles, stage_layers, stage_profiles, unit_sizes, vocab_of

LLAMA = ModelConfig(hidden_size=48, num_layers=5, num_heads=6, num_kv_heads=2, ffn_size=104)
GPT2 = ModelConfig(
    hidden_size=40, num_layers=3, num_heads=4, norm="layernorm", activation="gelu", positions="learned", max_positions=33,
    qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
QWEN = replace(LLAMA, qk_norm=True, head_dim=16, tie_embeddings=True)
VOCAB = 301


def build(cfg: ModelConfig, tp: int, layers: range, first: bool, last: bool) -> Transformer:
    tensor = TensorParallel(group=None, rank=tp - 1, size=tp) if tp > 1 else None
    with torch.device("meta"):
        return Transformer(cfg, vocab_size=VOCAB, tensor=tensor, layers=layers, has_embedding=first, has_head=last)


@pytest.mark.parametrize("cfg", [LLAMA, GPT2, QWEN], ids=["llama", "gpt2", "qwen"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, False), (False, True)])
def test_units_equal_the_model(cfg: ModelConfig, tp: int, first: bool, last: bool) -> None:
    shape = MeshShape(dp_inter=2, dp_intra=3, tp=tp)
    layers = range(1, 3)
    model = build(cfg, tp, layers, first, last)

    def is_trainable(name: str) -> bool:
        return "attention" in name or "head" in name

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        unit
        for profile in stage_profiles(cfg, vocab_size=VOCAB, tp=tp, layers=layers, first=first, last=last, is_trainable=is_trainable)
        for unit in profile.expand()
    ]
    assert [unit.name for unit in found] == [unit.name for unit in model.units()]
    owned: set[int] = set()
    for expected, profile in zip(model.units(), found, strict=True):
        numels = []
        for trainable in (True, False):
            boxes = [
                (names[id(p)], tuple(p.shape), (0,) * p.dim(), tuple(p.shape))
                for p in expected.parameters()
                if id(p) not in owned and is_trainable(names[id(p)]) is trainable
            ]
            numels.append(FlatLayout.build(boxes, shape).numel)
        owned |= {id(p) for p in expected.parameters()}
        assert profile.padded(shape.dp) == tuple(numels), expected.name


def test_alignment_is_that_of_the_buffers() -> None:
    assert ALIGNMENT == buffer.ALIGNMENT


def test_fewer_heads_than_ranks_are_held_by_all() -> None:
    cfg = replace(LLAMA, num_heads=8, num_kv_heads=2, hidden_size=64)
    model = build(cfg, 4, range(1), False, False)
    (block,) = stage_profiles(cfg, vocab_size=VOCAB, tp=4, layers=range(1), first=False, last=False)
    assert sum(block.trainable) == sum(p.numel() for p in model.parameters())


def test_a_frozen_prefix_is_gathered_once_and_units_have_their_cells() -> None:
    cfg = Config(
        model=replace(LLAMA, vocab_size=VOCAB),
        parallel=ParallelConfig(sharding="IIG", sharding_overrides={"layers.4": "NIG", "head": "GGG"}),
    )
    units = unit_sizes(cfg, MeshShape(dp_inter=2, dp_intra=2), is_trainable=lambda name: name.startswith(("layers.3", "layers.4", "head")))
    assert [unit.gathers for unit in units] == [1, 1, 1, 1, 2, 2, 2]
    assert [str(unit.cell) for unit in units] == ["IIG"] * 5 + ["NIG", "GGG"]
    assert [unit.trainable > 0 for unit in units] == [False] * 4 + [True] * 3
    assert units[0].cell == Cell.parse("IIG")


def test_ranks_of_a_pipeline_hold_every_unit_once() -> None:
    cfg = Config(model=replace(LLAMA, vocab_size=VOCAB), parallel=ParallelConfig(pp=2, schedule="interleaved_1f1b", virtual_stages=2))
    held = [[unit.name for p in rank_profiles(cfg, MeshShape(pp=2), pp_rank=rank) for unit in p.expand()] for rank in range(2)]
    assert held == [["embedding", "layers.0", "layers.1", "layers.3"], ["layers.2", "layers.4", "head"]]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers=5 do not fill 8"):
        stage_layers(Config(model=LLAMA), pp=8, vocab_size=VOCAB)


def test_the_vocabulary_must_be_known() -> None:
    assert vocab_of(Config()) == 4096
    with pytest.raises(ValueError, match="model.vocab_size"):
        vocab_of(Config(data=replace(Config().data, tokenizer="some/folder")))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "finetune",
    [
        FinetuneConfig(lora_rank=3, lora_targets=["q", "v", "down", "gate"]),
        FinetuneConfig(last_blocks=2),
        FinetuneConfig(trainable=["head.*"]),
    ],
    ids=["lora", "last_blocks", "trainable"],
)
def test_units_of_a_fine_tuning_equal_the_model(finetune: FinetuneConfig, tp: int) -> None:
    shape = MeshShape(dp_inter=2, dp_intra=3, tp=tp)
    cfg = Config(model=replace(LLAMA, vocab_size=VOCAB), finetune=finetune)
    model = build(LLAMA, tp, range(5), True, True)
    prepare_model(model, finetune)
    units = [unit for profile in rank_profiles(cfg, shape) for unit in profile.expand()]
    assert [unit.name for unit in units] == [unit.name for unit in model.units()]
    for expected, unit in zip(model.units(), units, strict=True):
        for trainable, numels in ((True, unit.trainable), (False, unit.frozen)):
            assert sorted(numels) == sorted(p.numel() for p in expected.parameters() if p.requires_grad is trainable), unit.name
    first = {"lora": 1, "last_blocks": 4, "trainable": 6}[
        "lora" if finetune.lora_rank else "last_blocks" if finetune.last_blocks else "trainable"
    ]
    assert [unit.gathers for unit in units] == [1] * first + [2] * (7 - first)
