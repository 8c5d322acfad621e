"""Bytes over tp and pp that a training step counts equal their formulas exactly, on every rank, for every schedule."""

from __future__ import annotations

from pathlib import Path

from paro_lm.config import Config
from paro_lm.parallel.cost_axes import Activations, pp_bytes, seam_bytes, tp_bytes
from paro_lm.testing import run_distributed
from paro_lm.trainer import StepStats, Trainer
from tests.parity.test_layouts import Layout
from tests.test_trainer import tokens  # noqa: F401 (a fixture)

FP64 = 8


class _Counting(Trainer):
    """Compares the bytes of each step with the formulas."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.problems: list[str] = []
        self.seen: list[dict[str, int]] = []

    def train_step(self) -> StepStats:
        stats = super().train_step()
        got = {axis: stats.bytes.get(axis, 0) for axis in ("tp", "pp")}
        self.seen.append(got)
        if got != self.expected():
            self.problems.append(f"{self.cfg.run_name} rank {self.world.rank} step {self.step}: {got}, formula {self.expected()}")
        return stats

    def expected(self) -> dict[str, int]:
        cfg, mesh = self.cfg, self.mesh
        parallel, tp, pp = cfg.parallel, mesh.size("tp"), mesh.size("pp")
        micro_batches = cfg.global_batch_size // (cfg.micro_batch_size * mesh.size("dp_inter", "dp_intra"))
        stream = Activations(
            tokens=cfg.micro_batch_size * cfg.seq_length, hidden_size=cfg.model.hidden_size, element=FP64, loss_element=FP64
        )
        in_tp = sum(
            tp_bytes(
                stream,
                tp=tp,
                blocks=len(chunk.layers),
                has_embedding=chunk.has_embedding,
                has_head=chunk.has_head,
                micro_batches=micro_batches,
                sequence_parallel=parallel.sequence_parallel,
                checkpointing=parallel.activation_checkpointing,
            )
            for chunk in self.model.chunks
        )
        in_pp = 0
        if pp > 1:
            message = stream.num_bytes // (tp if parallel.sequence_parallel else 1)
            in_pp = pp_bytes(
                message,
                schedule=parallel.schedule,
                pp=pp,
                virtual_stages=parallel.virtual_stages,
                rank=mesh.coordinate("pp"),
                micro_batches=micro_batches,
            )
        seams = seam_bytes(tp=tp, partial=self.partial_elements(), shared=self.shared_elements(), element=FP64)
        return {"tp": in_tp + seams["tp"], "pp": in_pp + seams["pp"]}

    def partial_elements(self) -> int:
        """Of parameters that act on a split sequence, in this rank's shards: norms and what else is not sliced."""
        whole = {name for name, spec in self.specs.items() if spec.local_shape == spec.shape and self.cfg.parallel.sequence_parallel}
        return sum(
            segment.stop - segment.start
            for buffer in self.engine.trainable_buffers()
            for segment in buffer.segments(buffer.cell.main)
            if segment.slot.name in whole
        )

    def shared_elements(self) -> int:
        """The padded shard of the tied table, where the two ends of the pipeline are different ranks."""
        if not self.cfg.model.tie_embeddings or self.mesh.size("pp") == 1 or self.cfg.parallel.schedule == "zbv":
            return 0
        tables = [b for b in self.engine.trainable_buffers() if b.layout.slots[0].name == "embedding.tokens.weight"]
        return sum(table.layout.shard_numel(table.cell.main) for table in tables)


def _count(rank: int, world_size: int, configs: list[Config]) -> tuple[list[str], list[list[dict[str, int]]]]:
    problems, seen = [], []
    for cfg in configs:
        trainer = _Counting(cfg)
        assert trainer.fit() == 0
        problems += trainer.problems
        seen.append(trainer.seen)
    return problems, seen


TWO = [
    Layout(tp=2, micro_batches=1),
    Layout(tp=2, micro_batches=3, checkpointing="full"),
    Layout(tp=2, micro_batches=2, checkpointing="selective"),
    Layout(tp=2, sequence_parallel=True, micro_batches=1, tied=False),
    Layout(tp=2, sequence_parallel=True, micro_batches=2, checkpointing="full"),
    Layout(tp=2, sequence_parallel=True, micro_batches=2, checkpointing="selective"),
    Layout(tp=2, sequence_parallel=True, micro_batches=2, model="gpt2"),
    Layout(pp=2, micro_batches=2),
    Layout(pp=2, micro_batches=3, tied=False, schedule="gpipe"),
    Layout(pp=2, micro_batches=6, schedule="interleaved_1f1b", checkpointing="full"),
    Layout(pp=2, micro_batches=2, tied=False, schedule="zbv"),
]
FOUR = [
    Layout(tp=2, dp=2, group=2, cell="IIG", sequence_parallel=True, micro_batches=2),
    Layout(tp=2, dp=2, group=1, cell="GGG", sequence_parallel=True, micro_batches=1, model="gpt2"),
    Layout(pp=2, dp=2, group=2, cell="NIG", micro_batches=3),
    Layout(pp=2, dp=2, group=1, cell="NNG", micro_batches=2, schedule="interleaved_1f1b"),
    Layout(tp=2, pp=2, sequence_parallel=True, micro_batches=2, model="gpt2", checkpointing="full"),
    Layout(pp=4, micro_batches=6),
    Layout(tp=4, model="gpt2", micro_batches=1),
]


def test_bytes_over_tp_and_pp_equal_the_formulas(tokens: Path) -> None:  # noqa: F811
    for world_size, layouts in ((2, TWO), (4, FOUR)):
        configs = [layout.config(tokens, steps=2) for layout in layouts]
        for rank, (problems, seen) in enumerate(run_distributed(_count, world_size, configs)):
            assert not problems, "\n".join(problems)
            for layout, steps in zip(layouts, seen, strict=True):
                assert len(steps) == 2
                assert all((step["tp"] > 0) == (layout.tp > 1) and (step["pp"] > 0) == (layout.pp > 1) for step in steps), (layout, rank)
