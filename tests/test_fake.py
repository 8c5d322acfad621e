"""A fake world: what every kind of rank holds is what the engine's own buffers and the planner say, in seconds."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from paro_lm.cli import load
from paro_lm.config import ConfigError
from paro_lm.fake import describe_world, rank_kinds
from paro_lm.planner.predict import mesh_of
from paro_lm.train import main
from tests.command import call

MODEL = ("model.hidden_size=48", "model.num_layers=5", "model.num_heads=6", "model.num_kv_heads=2", "model.ffn_size=104")
FAKE = ("runtime.backend=fake", "cluster=a100_roce", "data.tokenizer=bytes", *MODEL)


@pytest.mark.parametrize(
    "more",
    [
        ("parallel.sharding=IIG", "precision=bf16"),
        ("parallel.sharding=NIG", "parallel.pp=2", "parallel.tp=2", "model.tie_embeddings=true"),
        ("parallel.sharding=ING", "finetune=lora", "precision=bf16"),
        ("parallel.sharding=GGG", "parallel.sharding_overrides={head:NNG}", "finetune.last_blocks=2"),
        ("parallel.pp=2", "parallel.schedule=zbv"),
    ],
    ids=["plain", "pipeline", "lora", "mixed", "zbv"],
)
def test_buffers_are_those_of_the_plan(more: tuple[str, ...]) -> None:
    cfg = load([*FAKE, "global_batch_size=64", "micro_batch_size=1", *more])
    shape = mesh_of(cfg, 32, 8)
    kinds = list(rank_kinds(cfg, shape, vocab_size=257))
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(range(32))
    for kind in kinds:
        assert kind.state_bytes == kind.planned.states
        assert kind.state_bytes > 0


def test_parts_of_a_v_shaped_pipeline() -> None:
    cfg = load([*FAKE, "global_batch_size=64", "micro_batch_size=1", "parallel.pp=2", "parallel.schedule=zbv"])
    kinds = list(rank_kinds(cfg, mesh_of(cfg, 32, 8), vocab_size=257))
    assert [kind.part for kind in kinds] == ["embedding + layers 0-1, 4 + head", "layers 2-3"]
    assert [kind.ranks[0] for kind in kinds] == [0, 16]


def test_a_thousand_ranks_of_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=llama_7b", "cluster=h100_ib", "runtime.backend=fake", "runtime.world_size=1024", "parallel.sharding=auto"]
    assert call(main, *arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "parallel.sharding=auto chose" in text
    assert "dp_inter 128 x dp_intra 8" in text
    assert "0-1023 embedding" in text
    assert "6,738.4" in text
    assert re.search(r"planned peak [\d.]+ of 76.0 GB: fits", text)


def test_what_training_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(main, *FAKE, "runtime.world_size=3", "global_batch_size=64") == 2
    assert "3 data-parallel ranks" in capsys.readouterr().err
    cfg = load([*FAKE, "runtime.world_size=32", "global_batch_size=64", "micro_batch_size=3"])
    with pytest.raises(ConfigError, match="micro_batch_size=3 x 32"):
        describe_world(cfg, Console())


def test_only_training_has_a_fake_world() -> None:
    from paro_lm.config import RuntimeConfig
    from paro_lm.distributed import initialize

    with pytest.raises(ValueError, match="runtime.backend=fake"):
        initialize(RuntimeConfig(backend="fake"))
