"""What `paro-reproduce measured=true` runs and writes; the emulated cluster itself is slow and needs root."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paro_lm.cli import load
from paro_lm.distributed import World
from paro_lm.planner.inventory import element_bytes
from paro_lm.testing import run_distributed
from paro_lm.tools.compare import RATIOS, configs_that_fit, groups, measured_table, time_rings
from paro_lm.tools.measure import Timing, highest, interval, read_timings, write_timings
from paro_lm.validation import num_micro_batches, validate


def test_every_ratio_has_its_two_runs() -> None:
    names = {f"{group.setting}, {group.samples}": group.cells for group in groups()}
    assert names["7B full, 1280"] == ("IIG", "GGG", "NII", "NGG")
    assert names["7B full, 17280"] == ("NNI", "NNG")
    assert names["65B PEFT, 1280"] == ("ING", "GGG")
    assert sum(len(cells) for cells in names.values()) == 16


@pytest.mark.parametrize("small", [True, False])
def test_runs_are_valid_and_like_the_paper_s(tmp_path: Path, small: bool) -> None:
    cluster = load(["cluster=a100_roce"]).cluster
    for group in groups():
        for cell in group.cells:
            cfg = group.config(cell, 32, tmp_path, tmp_path / "data", cluster, small=small)
            assert validate(cfg, 32, 8) == []
            assert cfg.parallel.sharding == cell
            assert (cfg.parallel.activation_checkpointing == "full") is (group.setting.model == "65B")
            assert bool(cfg.finetune.last_blocks or cfg.finetune.lora_rank) is (group.setting.trained != "full")
            if not small:
                assert num_micro_batches(cfg, 32) == group.samples // 128
                assert element_bytes(cfg).grad == 2


def _here(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[Timing]]:
    world = World(
        rank=rank, world_size=2, local_rank=0, local_world_size=1, device=torch.device("cpu"), backend="gloo", owns_process_group=False
    )
    fitting = configs_that_fit(world, folder, load(["cluster=a100_roce"]).cluster, small=False)
    return [group.name for group, configs in fitting.items() if configs], time_rings(world, num_bytes=999, rounds=2)


def test_on_two_ranks_what_does_not_fit_is_left_out_and_rings_are_right(tmp_path: Path) -> None:
    for names, rings in run_distributed(_here, 2, tmp_path):
        assert "65B full, 1280" not in names
        assert "7B 1/16, 1280" in names
        assert sorted((each.name, each.round) for each in rings) == [(name, at) for name in ("ho_ring", "ring") for at in range(3)]


def test_table_of_ratios(tmp_path: Path) -> None:
    steps = [
        Timing(name=f"7B full, 1280, {cell}", round=at, seconds=seconds * (9 if at == 0 else 1), loss=1.0)
        for cell, seconds in (("IIG", 1.0), ("GGG", 2.5), ("NGG", 2.0), ("NII", 1.0))
        for at in range(4)
    ]
    write_timings(steps, tmp_path / "steps.csv")
    rings = [Timing(name=name, round=at, seconds=s, loss=0.0) for name, s in (("ring", 4.0), ("ho_ring", 3.0)) for at in range(4)]
    write_timings(rings, tmp_path / "rings.csv")
    assert read_timings(tmp_path / "steps.csv") == steps
    table = measured_table(tmp_path, label="emulated", where="here")
    by_name = {row[0]: row for row in table.rows}
    assert by_name["R1"][3:] == ("2.280", by_name["R1"][4], "2.500 [2.500, 2.500]", "1.000", "2.500")
    assert by_name["R2"][5].startswith("2.000")
    assert by_name["R3"][5] == "does not fit"
    assert by_name["R10"][5] == "25.0 % [25.0, 25.0]"
    assert len(table.rows) == len(RATIOS) + 1
    assert all(len(row) == len(table.header) for row in table.rows)


def test_interval_and_highest() -> None:
    middle, low, high = interval([1.0, 2.0, 9.0])
    assert (middle, low, high) == (2.0, 1.0, 9.0)

    def work() -> None:
        for _ in range(3):  # one after the other
            torch.empty(1 << 20, dtype=torch.uint8).fill_(0)

    assert 1 << 20 <= highest(work, torch.device("cpu")) < 2 << 20
