"""What a rank of a stage computes: seconds per unit from FLOPs, memory traffic and the cluster's rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paro_lm.config import ClusterConfig, ModelConfig
from paro_lm.model.flops import model_flops
from paro_lm.model.sizes import ModelSizes
from paro_lm.parallel.cost import ElementBytes
from paro_lm.parallel.sharding import Cell
from paro_lm.planner.activations import Activations, activations
from paro_lm.planner.inventory import UnitProfile
from paro_lm.planner.links import MICRO, Links
from paro_lm.planner.timing import UnitWork


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """FLOPs of one micro-batch's forward on the whole model width: weights and attention of a block, the head."""

    block: float
    attention: float
    attention_module: float
    head: float

    @classmethod
    def of(cls, cfg: ModelConfig, *, vocab_size: int, seq_length: int, num_samples: int) -> ForwardFlops:
        """From `model_flops`, whose backward is twice the forward; attention counts its causal half.

        A sliding window spares nothing: the fused kernels compute what its mask hides.
        """
        one = replace(cfg, num_layers=1, sliding_window=None)
        block = model_flops(one, vocab_size=0, seq_length=seq_length, num_samples=num_samples) / 3
        head = model_flops(one, vocab_size=vocab_size, seq_length=seq_length, num_samples=num_samples) / 3 - block
        sizes = ModelSizes.of(cfg, vocab_size)
        tokens = num_samples * seq_length
        attention = 2.0 * tokens * seq_length * sizes.query_size
        projections = 2.0 * tokens * cfg.hidden_size * 2 * (sizes.query_size + sizes.kv_size)
        return cls(block=block, attention=attention, attention_module=attention + projections, head=head)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of a data rank and how its activations are treated."""

    micro_batch_size: int
    seq_length: int
    checkpointing: str = "none"
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_length


def batch_activations(
    cfg: ModelConfig, batch: Batch, *, vocab_size: int, width: int, tp: int, checkpointing: str | None = None
) -> Activations:
    """Activation bytes of a batch, under its own or another kind of checkpointing."""
    return activations(
        cfg,
        vocab_size=vocab_size,
        tokens=batch.tokens,
        width=width,
        tp=tp,
        sequence_parallel=batch.sequence_parallel,
        mode=checkpointing or batch.checkpointing,
    )


def stage_work(
    cfg: ModelConfig, profiles: Sequence[UnitProfile], batch: Batch, links: Links, element: ElementBytes, *, vocab_size: int
) -> list[UnitWork]:
    """The work of every profile of a stage, in order."""
    cluster, tp = links.cluster, links.shape.tp
    flops = ForwardFlops.of(cfg, vocab_size=vocab_size, seq_length=batch.seq_length, num_samples=batch.micro_batch_size)
    plain = batch_activations(cfg, batch, vocab_size=vocab_size, width=element.param, tp=tp, checkpointing="none")
    exchange = links.collective("all_reduce", ("tp",), batch.tokens * cfg.hidden_size * element.param).seconds
    scores = 2 * links.collective("all_reduce", ("tp",), batch.tokens * 4 * 2).seconds
    result = []
    for profile in profiles:
        passes = _Passes(cluster, tp, profile, element)
        if profile.kind == "block":
            matrices = flops.block - flops.attention
            work = passes.of(matrices, flops.attention, flops.attention_module, plain.block, batch.checkpointing, tp=2 * exchange)
        elif profile.kind == "embedding":
            work = passes.of(0.0, 0.0, 0.0, batch.tokens * cfg.hidden_size * element.param, "none", tp_forward=exchange)
        else:  # the projection of a tied head is computed here, whoever holds its matrix
            work = passes.of(flops.head, 0.0, 0.0, plain.head, "none", tp_forward=scores, tp_backward=exchange)
        result.append(work)
    return result


class _Passes:
    """Turns FLOPs and bytes of one unit into seconds."""

    def __init__(self, cluster: ClusterConfig, tp: int, profile: UnitProfile, element: ElementBytes) -> None:
        self.cluster, self.tp, self.profile = cluster, tp, profile
        self.numel, self.trainable = sum(profile.trainable) + sum(profile.frozen), sum(profile.trainable)
        self.weights = self.numel * element.param

    def seconds(self, flops: float, traffic: float) -> float:
        cluster = self.cluster
        computing = flops / self.tp / (cluster.peak_tflops * cluster.efficiency * 1e12)
        return computing + traffic / (cluster.memory_gbytes * 1e9) + cluster.unit_us * MICRO

    def of(
        self, matrices: float, attention: float, attention_module: float, saved: float, checkpointing: str, *,
        tp: float = 0.0, tp_forward: float = 0.0, tp_backward: float = 0.0,
    ) -> UnitWork:  # fmt: skip
        """Each saved byte is written and read once in forward, twice in backward; weights are read in each product."""
        profile = self.profile
        forward = self.seconds(matrices + attention, 2 * saved + self.weights)
        backward = recompute = 0.0
        if profile.gathers > 1:
            share = self.trainable / max(1, self.numel)
            backward = self.seconds(matrices * (1 + share) + 2 * attention, 4 * saved + 2 * self.weights)
            if checkpointing != "none":
                recompute = forward if checkpointing == "full" else self.seconds(attention_module, saved / 2)
        repeated = tp * {"none": 0.0, "selective": 0.5, "full": 1.0}[checkpointing]
        return UnitWork(
            name=profile.name,
            trainable=0,
            frozen=0,
            gathers=profile.gathers,
            count=profile.count,
            forward=forward,
            backward=backward + recompute,
            recompute=recompute,
            tp_forward=tp + tp_forward,
            tp_backward=(tp + repeated + tp_backward) if profile.gathers > 1 else 0.0,
        )


def with_sizes(work: Sequence[UnitWork], profiles: Sequence[UnitProfile], dp: int) -> list[UnitWork]:
    """The same work with the padded buffers of `dp` data ranks."""
    result = []
    for unit, profile in zip(work, profiles, strict=True):
        trainable, frozen = profile.padded(dp)
        result.append(replace(unit, trainable=trainable, frozen=frozen))
    return result


def optimizer_seconds(units: Sequence[UnitWork], cells: Sequence[Cell], links: Links, element: ElementBytes) -> float:
    """The update reads main parameters, both moments and the gradient, and writes all but the gradient and the parameters."""
    per_element = 6 * element.main + element.grad + element.param
    elements = sum(unit.count * unit.trainable / links.shape.size(*cell.main) for unit, cell in zip(units, cells, strict=True))
    return elements * per_element / (links.cluster.memory_gbytes * 1e9)
