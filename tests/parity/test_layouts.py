"""Every tensor x pipeline x data layout in every kind of cell trains as one process does: losses and weights, float64, to 1e-10."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paro_lm.config import Config
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.test_trainer import losses, make_config, records, tokens, weights  # noqa: F401 (a fixture)

STEPS = 6
SIZE = ["model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2", "model.hidden_size=24", "model.vocab_size=257"]
LLAMA = [*SIZE, "model.vocab_divisor=4"]
GPT2 = [
    *SIZE, "model.vocab_divisor=4", "model.norm=layernorm", "model.activation=gelu_tanh", "model.positions=learned",
    "model.qkv_bias=true", "model.out_bias=true", "model.mlp_bias=true", "model.num_kv_heads=4",
]  # fmt: skip
MODELS = {"llama": LLAMA, "gpt2": GPT2}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its mesh, cell and what else may change the path but not the numbers."""

    model: str = "llama"
    tied: bool = True
    tp: int = 1
    pp: int = 1
    dp: int = 1
    group: int | None = None
    cell: str = "NNN"
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    micro_batches: int = 3
    checkpointing: str = "none"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        words = [self.model, f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", self.cell, f"m{self.micro_batches}"]
        words += [f"g{self.group}"] * (self.group is not None)
        words += [self.schedule] * (self.pp > 1) + ["sp"] * self.sequence_parallel + ["tied"] * self.tied
        return "-".join([*words, *([self.checkpointing] if self.checkpointing != "none" else [])])

    def config(self, tokens: Path, steps: int = STEPS) -> Config:  # noqa: F811
        virtual = 2 if self.schedule in ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble") else 1
        return make_config(
            tokens,
            *MODELS[self.model],
            f"run_name={self}",
            f"steps={steps}",
            "seq_length=16",
            f"global_batch_size={self.micro_batches * 4}",
            f"micro_batch_size={4 // self.dp}",
            f"parallel.tp={self.tp}",
            f"parallel.pp={self.pp}",
            f"parallel.group_size={self.group or self.dp}",
            f"parallel.sharding={self.cell}",
            f"parallel.schedule={self.schedule}",
            f"parallel.virtual_stages={virtual}",
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"parallel.activation_checkpointing={self.checkpointing}",
            "eval.every=3",
            tied=self.tied,
        )


def fit_all(rank: int, world_size: int, configs: list[Config]) -> list[int]:
    return [Trainer(cfg).fit() for cfg in configs]


def check(tokens: Path, layouts: list[Layout]) -> None:  # noqa: F811
    """Run layouts of one world size, and what they must equal on one process, and compare."""
    plain = {layout: Layout(model=layout.model, tied=layout.tied, micro_batches=layout.micro_batches) for layout in layouts}
    references = {reference: reference.config(tokens) for reference in plain.values()}
    todo = [cfg for cfg in references.values() if not (Path(cfg.output_dir) / cfg.run_name / "checkpoints" / "latest").exists()]
    run_distributed(fit_all, 1, todo)
    run_distributed(fit_all, layouts[0].world_size, [layout.config(tokens) for layout in layouts], timeout=600.0)
    wanted = {reference: weights(cfg, STEPS) for reference, cfg in references.items()}
    for layout in layouts:
        mine, theirs = layout.config(tokens), references[plain[layout]]

        def context(message: str, layout: Layout = layout) -> str:
            return f"{layout}: {message}"

        torch.testing.assert_close(losses(mine), losses(theirs), rtol=0, atol=1e-10, msg=context)
        val = [[r["val_loss"] for r in records(cfg) if "val_loss" in r] for cfg in (mine, theirs)]
        assert len(val[1]) == 3
        torch.testing.assert_close(val[0], val[1], rtol=0, atol=1e-10, msg=context)
        got, want = weights(mine, STEPS), wanted[plain[layout]]
        assert got.keys() == want.keys(), layout
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: context(f"{n}: {m}"))


def test_tensor_and_pipeline_parallel_on_two_ranks(tokens: Path) -> None:  # noqa: F811
    check(
        tokens,
        [
            Layout(tp=2),
            Layout(tp=2, sequence_parallel=True, tied=False, checkpointing="full"),
            Layout(tp=2, sequence_parallel=True, model="gpt2", micro_batches=1),
            Layout(pp=2),
            Layout(pp=2, micro_batches=2, tied=False),
            Layout(pp=2, micro_batches=6, model="gpt2", schedule="gpipe"),
            Layout(pp=2, micro_batches=6, schedule="interleaved_1f1b", checkpointing="full"),
            Layout(pp=2, micro_batches=2, tied=False, schedule="zbv"),
            Layout(pp=2, micro_batches=6, tied=False, schedule="zbv"),
        ],
    )


CELLS = ("NNN", "NNG", "NIG", "III", "IIG", "IGG", "GGG")


def covering(world_size: int) -> list[Layout]:
    """Each cell with each of tp, pp and both, and every other choice with several of them."""
    layouts = []
    for index, cell in enumerate(CELLS):
        common = {"cell": cell, "dp": 2, "group": 1 + index % 2, "tied": index % 2 == 0, "model": ("llama", "gpt2")[index // 2 % 2]}
        if world_size == 4:
            layouts.append(Layout(tp=2, sequence_parallel=index % 3 != 0, micro_batches=(1, 3)[index % 2], **common))
            schedule = ("1f1b", "interleaved_1f1b", "gpipe")[index % 3]
            layouts.append(
                Layout(pp=2, schedule=schedule, micro_batches=(2, 6)[index % 2], checkpointing=("none", "full")[index // 3 % 2], **common)
            )
        else:
            schedule = ("interleaved_1f1b", "1f1b")[index % 2]
            layouts.append(Layout(tp=2, pp=2, schedule=schedule, sequence_parallel=index % 2 == 1, micro_batches=2, **common))
            layouts.append(Layout(pp=2, micro_batches=3, **common | {"dp": 4, "group": 2}))
    if world_size == 4:
        layouts += [Layout(pp=2, dp=2, group=2, cell=cell, tied=False, schedule="zbv", micro_batches=2) for cell in ("III", "IIG", "GGG")]
        layouts += [Layout(pp=2, dp=2, group=1, cell=cell, schedule="1f1b", micro_batches=4) for cell in ("GGG", "IIG", "NIG")]  # case T8
        layouts += [Layout(dp=4, group=2, cell="IIG", checkpointing="selective"), Layout(pp=4, micro_batches=6), Layout(tp=4, model="gpt2")]
    return layouts


def test_layouts_on_four_ranks(tokens: Path) -> None:  # noqa: F811
    check(tokens, covering(4))


def test_layouts_on_eight_ranks(tokens: Path) -> None:  # noqa: F811
    check(tokens, covering(8))


# ------------------------------------------------------------------------------------------------ the whole matrix

MESHES = [(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2), (1, 2), (1, 2, 4)) if 1 < tp * pp * dp <= 8]
SPLIT_BACKWARD = ("NNN", "III", "IIG", "GGG")
"""Cells that the matrix runs under zbv."""


def matrix(tp: int, pp: int, dp: int, cell: str) -> Iterator[Layout]:
    """Every model, schedule, number of micro-batches, tied or not, with and without sequence parallelism, on one mesh in one cell."""
    schedules = ("gpipe", "1f1b", "interleaved_1f1b", "zbv") if pp > 1 else ("1f1b",)
    numbers = (2, 3, 6) if pp > 1 else (1, 3)
    for model, tied, schedule, number, sequence in itertools.product(MODELS, (True, False), schedules, numbers, (False, True)[:tp]):
        if schedule == "zbv" and (tied or cell not in SPLIT_BACKWARD):  # tied is refused: one rank holds both ends
            continue
        group = 2 if dp > 1 else None
        yield Layout(
            model=model, tied=tied, tp=tp, pp=pp, dp=dp, group=group, cell=cell, schedule=schedule, sequence_parallel=sequence,
            micro_batches=number,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tp", "pp", "dp", "cell"), [(*mesh, cell) for mesh in MESHES for cell in (CELLS if mesh[2] > 1 else ("NNN",))])
def test_every_layout(tokens: Path, tp: int, pp: int, dp: int, cell: str) -> None:  # noqa: F811
    """1,582 layouts, an hour and a half on two cores. With one data rank all cells are the same."""
    layouts = list(matrix(tp, pp, dp, cell))
    for start in range(0, len(layouts), 40):
        check(tokens, layouts[start : start + 40])
