"""Options of the loss, of tensor-parallel collectives and dropout through whole trainings, over layouts (T3, T19)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paro_lm.build import _joined
from paro_lm.config import Config, LossConfig
from paro_lm.model import transformer
from paro_lm.model.transformer import Transformer
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from paro_lm.validation import validate
from tests.parity.test_layouts import LLAMA, fit_all
from tests.test_trainer import losses, make_config, records, tokens, weights  # noqa: F401 (a fixture)

STEPS = 2
LOSS = ["loss.label_smoothing=0.1", "loss.z_loss=0.01"]
COMMON = [*LLAMA, f"steps={STEPS}", "seq_length=16", "eval.every=2", "micro_batch_size=2", "global_batch_size=8"]
PIPELINE = ["parallel.pp=2", "micro_batch_size=1"]
INTERLEAVED = [*PIPELINE, "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2"]
TIED = {
    "tp": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "tp_alone": ["parallel.tp=2", "parallel.overlap=false"],
    "native": ["parallel.tp=4", "parallel.sequence_parallel=true"],
    "ho_ring": [
        "parallel.tp=4", "parallel.sequence_parallel=true", "parallel.tp_collectives=ho_ring", "parallel.tp_group_size=2",
    ],
    "hierarchical": ["parallel.tp=4", "parallel.tp_collectives=hierarchical", "parallel.tp_group_size=2"],
    "1f1b": PIPELINE,
    "interleaved": INTERLEAVED,
    "tp_pp": ["parallel.tp=2", *PIPELINE, "parallel.sequence_parallel=true"],
}  # fmt: skip
UNTIED = {"gpipe": [*PIPELINE, "parallel.schedule=gpipe"], "zbv": ["parallel.tp=2", *PIPELINE, "parallel.schedule=zbv"]}

SOME = ("tp", "native", "ho_ring", "interleaved", "zbv")


def validations(cfg: Config) -> list[float]:
    return [record["val_loss"] for record in records(cfg) if "val_loss" in record]


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_losses_with_options_do_not_depend_on_the_layout(which: str, tokens: Path) -> None:  # noqa: F811
    """Smoothed losses with z-loss, and weights, as in one process; validation losses are those of a plain run (float64, 1e-10)."""
    one = {
        "plain": make_config(tokens, *COMMON, f"run_name=options-plain-{which}"),
        "tied": make_config(tokens, *COMMON, *LOSS, f"run_name=options-tied-{which}"),
        "untied": make_config(tokens, *COMMON, *LOSS, f"run_name=options-untied-{which}", tied=False),
    }
    four = {
        name: make_config(tokens, *COMMON, *LOSS, *options, f"run_name=options-{name}-{which}", tied=name in TIED)
        for name, options in (TIED | UNTIED).items()
        if which == "all" or name in SOME
    }
    dropped = make_config(tokens, *COMMON, *INTERLEAVED, "model.dropout=0.5", f"run_name=options-dropout-{which}")
    run_distributed(fit_all, 1, list(one.values()))
    run_distributed(fit_all, 4, [*four.values(), dropped], timeout=600.0)
    for name, cfg in four.items():
        reference = one["untied" if name in UNTIED else "tied"]
        torch.testing.assert_close(losses(cfg), losses(reference), rtol=0, atol=1e-10, msg=name)
        torch.testing.assert_close(validations(cfg), validations(reference), rtol=0, atol=1e-10, msg=name)
        got, want = weights(cfg, STEPS), weights(reference, STEPS)
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=f"{name}: {key}")
    sent = {name: [record["bytes"]["tp"] for record in records(four[name]) if "loss" in record] for name in ("native", "ho_ring")}
    assert sent["native"] == sent["ho_ring"]
    assert validations(one["tied"])[0] == validations(one["plain"])[0]
    assert losses(one["tied"])[0] > losses(one["plain"])[0] + 0.01
    assert validations(dropped)[0] == pytest.approx(validations(one["plain"])[0], abs=1e-10)  # no dropout in validation


@pytest.mark.parametrize("tied", [False, True])
def test_training_loss_is_torchs(tied: bool, tokens: Path) -> None:  # noqa: F811
    """Label smoothing as torch defines it and z log(sum exp)^2, in training mode only; padded columns take no part."""
    cfg = make_config(tokens, *LLAMA, "model.vocab_divisor=16", tied=tied).model
    options = LossConfig(label_smoothing=0.2, z_loss=0.05)
    model = Transformer(cfg, vocab_size=257, loss=options).double().initialize(3)
    inputs = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = inputs.roll(-1, dims=1)
    labels[:, 4] = -100
    logits = model(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2)
    expected = expected + 0.05 * logits.logsumexp(-1).square()[labels >= 0].sum()
    torch.testing.assert_close(model(inputs, labels=labels), expected, rtol=1e-12, atol=0)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model.eval()(inputs, labels=labels), plain, rtol=1e-12, atol=0)


def test_evaluation_mode_reaches_every_chunk(tokens: Path) -> None:  # noqa: F811
    cfg = make_config(tokens, *LLAMA).model
    chunks = [Transformer(cfg, vocab_size=257, layers=range(i, i + 1), has_embedding=i == 0, has_head=i == 3) for i in (0, 3)]
    module = _joined(chunks)
    module.eval()
    assert not any(part.training for chunk in chunks for part in chunk.modules())
    module.train()
    assert all(part.training for chunk in chunks for part in chunk.modules())


def test_smoothing_of_everything_is_refused() -> None:
    (problem,) = validate(Config(loss=LossConfig(label_smoothing=1.0)), 1)
    assert problem == "loss.label_smoothing: must be below 1, got 1.0"


# ------------------------------------------------------------------------------------------------ dropout (T19)

Masks = dict[tuple[str, int], Tensor]


def fit_and_watch(rank: int, world_size: int, configs: list[Config]) -> list[tuple[Masks, dict[str, int]]]:
    """Per run: every mask on the residual stream, by (region, how often it was drawn before), and the coordinates of this rank."""
    plain: Callable[..., Tensor] = transformer.dropout
    seen: Masks = {}

    def watched(x: Tensor, state: Any, region: str, tensor: Any) -> Tensor:
        mask = plain(torch.ones_like(x), state, region, tensor) != 0
        output = plain(x, state, region, tensor)
        assert torch.equal(output, x * mask * 2)
        seen[region, sum(name == region for name, _ in seen)] = mask
        return output

    transformer.dropout = watched
    results = []
    for cfg in configs:
        seen.clear()
        trainer = Trainer(cfg)
        assert trainer.fit() == 0
        mesh = trainer.mesh
        results.append((dict(seen), {"tp": mesh.coordinate("tp"), "dp": mesh.index("dp_inter", "dp_intra")}))
    return results


def test_dropout_masks_over_the_mesh(tokens: Path) -> None:  # noqa: F811
    """T19, dropout .5 on tp 2 x dp 2: masks differ over data ranks, micro-batches, steps and sequence shards, are equal over tp ranks
    where the stream is replicated, and repeat for the same seed and layout.
    """
    base = [*LLAMA, "model.dropout=0.5", "steps=2", "seq_length=16", "micro_batch_size=2", "global_batch_size=8", "parallel.tp=2"]
    names = {
        "sharded": ["parallel.sequence_parallel=true"],
        "again": ["parallel.sequence_parallel=true"],
        "replicated": [],
        "other": ["seed=7"],
    }
    configs = [make_config(tokens, *base, f"run_name=masks-{name}", *options) for name, options in names.items()]
    per_rank = run_distributed(fit_and_watch, 4, configs)
    for index, name in enumerate(names):
        masks = {(where["tp"], where["dp"]): seen for seen, where in (results[index] for results in per_rank)}
        regions = {region for region, _ in masks[0, 0]}
        assert regions == {"embedding", *(f"layers.{i}.{part}_residual" for i in range(4) for part in ("attention", "mlp"))}
        for key, mask in masks[0, 0].items():
            assert 0.3 < mask.double().mean() < 0.7
            assert mask.shape[1] == (8 if name in ("sharded", "again") else 16)
            assert torch.equal(mask, masks[1, 0][key]) == (name in ("replicated", "other"))
            assert torch.equal(masks[0, 1][key], masks[1, 1][key]) == (name in ("replicated", "other"))
            assert not torch.equal(mask, masks[0, 1][key])
        distinct = {tuple(mask.flatten().tolist()) for (region, _), mask in masks[0, 0].items() if region == "embedding"}
        assert len(distinct) == 4  # 2 steps x 2 micro-batches
    for results in per_rank:
        first, again, replicated, other = (result[0] for result in results)
        assert first.keys() == again.keys()
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not any(torch.equal(replicated[key], other[key]) for key in other)
