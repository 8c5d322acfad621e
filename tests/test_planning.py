"""`parallel.sharding=auto` over ranks, and what a run says when memory is short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paro_lm.config import Config, read_config
from paro_lm.data.loader import MicroBatch
from paro_lm.distributed import World
from paro_lm.logs import ReportedError
from paro_lm.planner.predict import choose
from paro_lm.planning import MemoryShortageError, is_out_of_memory, with_advice
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.test_trainer import make_config, tokens  # noqa: F401 (a fixture)

AUTO = ("parallel.group_size=2", "global_batch_size=8", "cluster.reserved_gb=0")


class _NoMemory(Trainer):
    def _forward_backward(self, micro_batches: list[MicroBatch], num_tokens: int) -> torch.Tensor:
        if self.step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super()._forward_backward(micro_batches, num_tokens)


def _runs(rank: int, world_size: int, first: Config, other: Config, short: Config) -> tuple[list[int], str]:
    codes = [Trainer(cfg).fit() for cfg in (first, other)]
    try:
        _NoMemory(short).fit()
    except ReportedError as error:
        return codes, str(error)
    return codes, "no failure"


def test_auto_on_four_ranks_and_its_resume_and_no_memory(tokens: Path) -> None:  # noqa: F811
    wide = make_config(tokens, "run_name=auto", "parallel.sharding=auto", "steps=2", *AUTO)
    memory = {str(c.cell): c.memory.total for c in choose(wide, world_size=4, local_world_size=4, vocab_size=257).candidates}
    assert len(memory) == 14
    tight = sorted(memory.values())[2] / 1e9  # three cells fit
    first = make_config(tokens, "run_name=auto", "parallel.sharding=auto", "steps=2", *AUTO, f"cluster.memory_gb={tight}")
    expected = choose(first, world_size=4, local_world_size=4, vocab_size=257).best
    assert expected is not None
    cell = str(expected.cell)
    assert cell != "NNN"
    other = make_config(tokens, "run_name=auto", "parallel.sharding=auto", "steps=3", *AUTO)  # memory for every cell
    short = make_config(tokens, "run_name=short", "parallel.sharding=NNN", "steps=3", *AUTO)

    results = run_distributed(_runs, 4, first, other, short)

    assert all(codes == [0, 0] for codes, _ in results)
    folder = Path(first.output_dir) / "auto"
    assert read_config(folder / "config.yaml").parallel.sharding == cell
    log = (folder / "logs" / "rank_0.log").read_text()
    assert f"parallel.sharding=auto chose {cell}: " in log
    assert f"parallel.sharding=auto keeps {cell}" in log
    message = json.loads((Path(short.output_dir) / "short" / "logs" / "first_failure.json").read_text())["message"]
    assert "Tried to allocate 2.00 GiB" in message
    assert "out of memory with parallel.sharding=NNN" in message
    assert message.count("% time per step") == 3
    assert "states" in message
    assert all(message in text for _, text in results)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (RuntimeError("shape mismatch"), False),
        (OSError("can't allocate memory"), False),
    ],
)
def test_which_errors_are_about_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_allocator_of_this_torch_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_advice_has_actual_bytes_and_leaves_other_errors(tokens: Path) -> None:  # noqa: F811
    cfg = make_config(tokens, "parallel.sharding=NNN", *AUTO)
    world = World(
        rank=0, world_size=4, local_rank=0, local_world_size=4, device=torch.device("cpu"), backend="gloo", owns_process_group=True
    )
    held = {"param": 8_000_000_000, "grad": 4_000_000_000, "main": 9_000_000_000, "shared": 3_000_000_000}
    error = MemoryError("asked for much")
    told = with_advice(error, cfg, world, vocab_size=257, held=held, peak=21e9)
    assert isinstance(told, MemoryShortageError)
    assert told.__cause__ is error
    assert "asked for much" in str(told)
    lines = {line.split()[0]: line for line in str(told).splitlines() if "actual" in line}
    actual = {name: float(line.rpartition("actual")[2]) for name, line in lines.items()}
    assert actual == {"param": 8.0, "grad": 4.0, "main": 6.0, "states": 18.0, "total": 21.0}
    other = KeyError("x")
    assert with_advice(other, cfg, world, vocab_size=257, held=held, peak=0.0) is other
