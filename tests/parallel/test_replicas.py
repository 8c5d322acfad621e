"""Replicas: equal after training in every kind of placement; one changed bit anywhere is found, with parameter, axis and ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paro_lm.config import Config
from paro_lm.logs import ReportedError
from paro_lm.parallel.replicas import BLOCK, ReplicaError, check_replicas, digest, replicas
from paro_lm.parallel.sharding import ALL_CELLS, KEPT_CELLS, Cell, advice
from paro_lm.testing import run_distributed
from paro_lm.trainer import Trainer
from tests.test_trainer import make_config, tokens  # noqa: F401 (a fixture)

NORM, MATRIX = "layers.0.mlp_norm.weight", "layers.1.mlp.down.weight"


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the last element."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[-1] ^= 1


class _Corrupts(Trainer):
    """After step 3, one bit of (kind, parameter) on one rank is another."""

    kind, name, bad_rank = "main", MATRIX, 1

    def train_step(self) -> Any:
        stats = super().train_step()
        if self.step == 3 and self.world.rank == self.bad_rank:
            self.engine.wait()
            for replica in replicas(self.engine, self.optimizer.state_shards(), lambda name: self.specs[name].replicated_axes):
                if (replica.kind, replica.name) == (self.kind, self.name):
                    flip(replica.data)
        return stats


def run(rank: int, world_size: int, clean: list[Config], corrupted: list[tuple[Config, str, str, int]]) -> list[Any]:
    results: list[Any] = [Trainer(cfg).fit() for cfg in clean]
    for cfg, kind, name, bad_rank in corrupted:
        trainer = _Corrupts(cfg)
        trainer.kind, trainer.name, trainer.bad_rank = kind, name, bad_rank
        try:
            results.append((trainer.fit(), "no error"))
        except ReportedError as error:
            results.append((trainer.step, str(error)))
    return results


def test_equal_replicas_pass_and_one_changed_bit_is_named(tokens: Path) -> None:  # noqa: F811
    def config(name: str, *overrides: str) -> Config:
        common = ["steps=4", "parallel.check_replicas_every=3", "precision=bf16", "parallel.group_size=2"]
        return make_config(tokens, f"run_name=replicas_{name}", *common, *overrides)

    clean = [config(cell, f"parallel.sharding={cell}") for cell in ("NNN", "NII", "IIG", "GGN")]
    clean.append(
        config("tp", "parallel.tp=2", "model.num_kv_heads=2", "parallel.group_size=1", "parallel.sequence_parallel=true", "seq_length=18")
    )
    clean.append(config("tied", "parallel.pp=2", "global_batch_size=4"))
    # (run, buffer and parameter, the rank that changes it, what the message says)
    cases = [
        (config("a", "parallel.sharding=NNI"), "main", MATRIX, 1, f"main of {MATRIX} over dp_inter: the bits on ranks 1, 3 differ"),
        (config("b", "parallel.sharding=NNN"), "exp_avg", NORM, 2, f"exp_avg of {NORM} over dp_inter: the bits on ranks 0, 2 differ"),
        (
            config("c", "parallel.sharding=NNG", "parallel.group_size=4"), "param", MATRIX, 2,
            f"param of {MATRIX} over dp_intra: the bits on rank 2 differ from those of ranks 0, 1, 3",
        ),
        (
            config("d", "parallel.tp=2", "model.num_kv_heads=2", "parallel.group_size=2", "parallel.sharding=GGG"), "exp_avg_sq", NORM, 2,
            f"exp_avg_sq of {NORM} over tp: the bits on ranks 2, 3 differ",
        ),
        (
            config("e", "parallel.pp=2", "parallel.sharding=GGG", "global_batch_size=4"), "main", "embedding.tokens.weight", 3,
            "main of embedding.tokens.weight over pp: the bits on ranks 1, 3 differ",
        ),
    ]  # fmt: skip
    answers = run_distributed(run, 4, clean, [case[:4] for case in cases])
    for answer in answers:
        assert answer[: len(clean)] == [0] * len(clean)
        for (step, message), case in zip(answer[len(clean) :], cases, strict=True):
            assert step == 3, message
            assert case[4] in message
            assert "ReplicaError" in message


def _bare(rank: int, world_size: int) -> str:
    from paro_lm.parallel.mesh import ParallelMesh
    from paro_lm.parallel.replicas import Replica

    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    same = [Replica(kind="param", name=f"w{i}", axes=frozenset({"dp_inter", "dp_intra"}), data=torch.ones(3)) for i in range(30)]
    check_replicas(mesh, same)
    differs = [Replica(kind="param", name=f"w{i}", axes=frozenset({"dp_intra"}), data=torch.full((3,), float(rank))) for i in range(30)]
    with pytest.raises(ReplicaError) as error:
        check_replicas(mesh, [*same, *differs])
    own = [Replica(kind="param", name="w", axes=frozenset(), data=torch.full((3,), float(rank)))]
    check_replicas(mesh, own)
    return str(error.value)


def test_all_ranks_tell_the_same_and_not_without_end() -> None:
    messages = run_distributed(_bare, 4)
    assert len(set(messages)) == 1
    assert "and 40 more" in messages[0]
    assert re.search("param of w0 over dp_intra: the bits on ranks 2, 3 differ", messages[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_tells_bits_and_places(dtype: torch.dtype) -> None:
    value = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(value) == digest(value.clone())
    for other in (value.flip(0), torch.cat([value[1:], value[:1]]), torch.cat([value[:500], -value[500:501], value[501:]])):
        assert digest(other) != digest(value)
    changed = value.clone()
    flip(changed)
    assert digest(changed) != digest(value)
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))  # bits, not values


def test_a_digest_goes_over_blocks() -> None:
    value = torch.zeros(BLOCK + 3, dtype=torch.bfloat16)
    value[BLOCK] = 1
    moved = torch.zeros(BLOCK + 3, dtype=torch.bfloat16)
    moved[0] = 1
    assert len({int(digest(x)) for x in (value, moved, torch.zeros(BLOCK + 3))}) == 3


def test_the_thirteen_eliminated_cells_are_told_once_with_what_dominates_them() -> None:
    eliminated = [cell for cell in ALL_CELLS if not cell.is_kept]
    assert len(eliminated) == 13
    for cell in eliminated:
        text = advice([cell, cell])
        assert text is not None
        assert text.count(f"{cell} by {cell.dominating}") == 1
        assert cell.dominating.is_kept
    assert advice(KEPT_CELLS) is None
    text = advice([Cell.parse("GIN"), Cell.parse("IIG"), Cell.parse("NIN")])
    assert text is not None
    assert "GIN by GIG, NIN by NII" in text


def test_a_run_warns_once(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    cfg = make_config(tokens, "run_name=eliminated", "steps=2", "parallel.sharding=GIN", "parallel.sharding_overrides={embedding: IIN}")
    assert run_distributed(run, 1, [cfg], []) == [[0]]
    log = (Path(cfg.output_dir) / cfg.run_name / "logs" / "rank_0.log").read_text()
    assert log.count("WARNING") == 1
    assert log.count("GIN by GIG, IIN by III") == 1
