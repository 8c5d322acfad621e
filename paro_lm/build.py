"""From a config to a model under the sharding engine; what training, evaluation and generation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paro_lm.config import Config, PrecisionConfig
from paro_lm.finetune import check_patterns, prepare_model
from paro_lm.model.flops import layer_costs
from paro_lm.model.spec import ParameterSpec, initial_value
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing, apply_compile
from paro_lm.parallel.axes import default_tp_group_size
from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.pipeline import PipelineRunner, PlainRunner, Runner
from paro_lm.parallel.seams import Seams
from paro_lm.parallel.sharding import Cell, cell_of_unit
from paro_lm.parallel.stages import ZERO_BUBBLE, num_stages, split_by_cost, split_layers, stages_of_rank
from paro_lm.parallel.tensor import TensorParallel
from paro_lm.parallel.tensor_groups import GroupedCollectives
from paro_lm.parallel.unit_buffer import Dtypes
from paro_lm.parallel.verified import is_verified

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIED = "embedding.tokens.weight"


def dtypes_of(cfg: PrecisionConfig) -> Dtypes:
    """torch types of a precision."""
    return Dtypes(param=DTYPES[cfg.param_dtype], grad=DTYPES[cfg.grad_dtype], reduce=DTYPES[cfg.reduce_dtype], main=DTYPES[cfg.main_dtype])


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """What one rank holds of the model: `chunks`, one per stage in `stages` (global indices), and all of them in `module`.

    Names of parameters in `module` and `specs` are global. Without pipelines there is one chunk, the whole model.
    """

    module: nn.Module
    chunks: tuple[Transformer, ...]
    stages: tuple[int, ...]
    num_stages: int
    specs: Mapping[str, ParameterSpec]

    def set_dropout_seed(self, seed: int) -> None:
        for chunk in self.chunks:
            chunk.set_dropout_seed(seed)


def build_model(cfg: Config, mesh: ParallelMesh, *, vocab_size: int, ledger: ByteLedger) -> ModelPart:
    """This rank's part of the model on the meta device, in the parameter dtype, with adapters, freezing, checkpointing and compilation
    applied.
    """
    check_patterns(cfg.finetune, cfg.model, vocab_size=vocab_size)
    tensor = build_tensor(cfg, mesh, ledger=ledger)
    pp, schedule, virtual = mesh.size("pp"), cfg.parallel.schedule, cfg.parallel.virtual_stages
    count = num_stages(schedule, pp, virtual) if pp > 1 else 1
    stages = stages_of_rank(schedule, pp, virtual, mesh.coordinate("pp")) if pp > 1 else [0]
    layers = layers_of_stages(cfg, count, vocab_size=vocab_size)
    chunks = []
    for stage in stages:
        with torch.device("meta"):
            chunk = Transformer(
                cfg.model,
                vocab_size=vocab_size,
                tensor=tensor,
                layers=layers[stage],
                has_embedding=stage == 0,
                has_head=stage == count - 1,
                loss=cfg.loss,
            )
        chunk = chunk.to(DTYPES[cfg.precision.param_dtype])
        prepare_model(chunk, cfg.finetune)
        apply_activation_checkpointing(chunk, cfg.parallel.activation_checkpointing)
        if cfg.runtime.compile:
            apply_compile(chunk)
        chunks.append(chunk)
    specs = {name: spec for chunk in chunks for name, spec in chunk.parameter_specs().items()}
    return ModelPart(module=_joined(chunks), chunks=tuple(chunks), stages=tuple(stages), num_stages=count, specs=specs)


def build_tensor(cfg: Config, mesh: ParallelMesh, *, ledger: ByteLedger) -> TensorParallel | None:
    """The tensor-parallel ranks of this rank; None when it is alone. A collective call."""
    parallel, tp = cfg.parallel, mesh.size("tp")
    if tp == 1:
        return None

    def record(operation: str, num_bytes: int) -> None:
        ledger.record(operation, "tp", num_bytes)

    grouped = None
    if parallel.tp_collectives != "native":
        group_size = parallel.tp_group_size or default_tp_group_size(tp, mesh.local_world_size)
        grouped = GroupedCollectives(
            mesh, algorithm=parallel.tp_collectives, group_size=group_size, record=record, overlap=parallel.overlap
        )
    return TensorParallel(
        group=mesh.group("tp"),
        rank=mesh.coordinate("tp"),
        size=tp,
        sequence_parallel=parallel.sequence_parallel,
        record=record,
        overlap=parallel.overlap,
        split_backward=mesh.size("pp") > 1 and parallel.schedule in ZERO_BUBBLE,
        grouped=grouped,
    )


def layers_of_stages(cfg: Config, count: int, *, vocab_size: int) -> list[range]:
    """Layers of every stage: as listed, by number, or by cost."""
    explicit = cfg.parallel.layers_per_stage
    if explicit:
        starts = [sum(explicit[:stage]) for stage in range(count)]
        return [range(start, start + size) for start, size in zip(starts, explicit, strict=True)]
    if cfg.parallel.balance == "layers":
        return split_layers(cfg.model.num_layers, count)
    costs = layer_costs(cfg.model, vocab_size=vocab_size, seq_length=cfg.seq_length)
    return split_by_cost([costs.block] * cfg.model.num_layers, count, first=costs.embedding, last=costs.head)


def _joined(chunks: Sequence[Transformer]) -> nn.Module:
    """One module with the children of all chunks under their global names."""
    if len(chunks) == 1:
        return chunks[0]
    module = _Joined(chunks)
    layers = nn.ModuleDict()
    for chunk in chunks:
        for name, child in chunk.named_children():
            if name == "layers":
                layers.update(dict(chunk.layers.items()))
            else:
                module.add_module(name, child)
    module.add_module("layers", layers)
    return module


class _Joined(nn.Module):
    """Holds the children of several chunks; train() and eval() reach the chunks, which are no children themselves."""

    def __init__(self, chunks: Sequence[Transformer]) -> None:
        super().__init__()
        self._chunks = tuple(chunks)

    def train(self, mode: bool = True) -> _Joined:
        for chunk in self._chunks:
            chunk.train(mode)
        return super().train(mode)


def build_engine(
    cfg: Config, part: ModelPart, mesh: ParallelMesh, *, ledger: ByteLedger, value_of: Callable[[str], torch.Tensor] | None = None
) -> ShardingEngine:
    """Put the model's parameters into their placements; their first values follow from (seed, name), or come from `value_of`."""
    default = Cell.parse(cfg.parallel.sharding)
    verified = cfg.parallel.collectives == "auto" and mesh.device.type != "cpu" and is_verified(mesh, "nccl")

    def grid() -> GridCollectives:
        return GridCollectives(
            mesh,
            algorithm=cfg.parallel.collectives,
            chunk_bytes=cfg.parallel.chunk_bytes,
            ledger=ledger,
            device=mesh.device,
            verified=verified,
        )

    engine = ShardingEngine(
        part.module,
        [chunk.units() for chunk in part.chunks],
        mesh=mesh,
        cells=lambda unit: cell_of_unit(unit, default, cfg.parallel.sharding_overrides),
        dtypes=dtypes_of(cfg.precision),
        gather_collectives=grid(),
        reduce_collectives=grid(),
        specs=part.specs,
        value_of=value_of or (lambda name: initial_value(name, part.specs[name], cfg.seed)),
        seams=_seams(cfg, part, mesh, ledger),
        overlap=cfg.parallel.overlap,
    )
    for chunk in part.chunks:
        chunk.reset_buffers(mesh.device)
    return engine


def _seams(cfg: Config, part: ModelPart, mesh: ParallelMesh, ledger: ByteLedger) -> Seams:
    """Sums over tp for partial gradients, and over the first and last stage for a tied weight. A collective call."""
    tied = cfg.model.tie_embeddings and mesh.size("pp") > 1
    return Seams(
        partial=frozenset(name for name, spec in part.specs.items() if "tp" in spec.partial_axes),
        shared=frozenset({TIED}) if tied else frozenset(),
        shared_group=_ends_group(mesh) if tied else None,
        counts_shared=0 in part.stages,
        record=lambda axis, num_bytes: ledger.record("all_reduce", axis, num_bytes),
    )


def _ends_group(mesh: ParallelMesh) -> dist.ProcessGroup | None:
    """The communicator of the first and the last pipeline rank with this rank's other coordinates; None for ranks between."""
    mine = None
    for rank in range(mesh.world_size):
        other = ParallelMesh(shape=mesh.shape, rank=rank, device=mesh.device)
        if other.coordinate("pp") == 0:
            ranks = [rank, other.rank_at(pp=mesh.size("pp") - 1)]
            group = mesh.new_group_of(ranks)
            if mesh.rank in ranks:
                mine = group
    return mine


def build_runner(cfg: Config, part: ModelPart, engine: ShardingEngine, mesh: ParallelMesh, *, ledger: ByteLedger) -> Runner:
    """What runs a step: plainly, or as a pipeline. A collective call."""
    if mesh.size("pp") == 1:
        return PlainRunner(engine, part.chunks[0])
    length = cfg.seq_length // (mesh.size("tp") if cfg.parallel.sequence_parallel else 1)
    dtype = DTYPES[cfg.precision.param_dtype]
    return PipelineRunner(
        engine,
        part.chunks,
        part.stages,
        mesh=mesh,
        schedule=cfg.parallel.schedule,
        num_stages=part.num_stages,
        hidden=torch.empty(cfg.micro_batch_size, length, cfg.model.hidden_size, dtype=dtype, device="meta"),
        loss_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        record=lambda num_bytes: ledger.record("send", "pp", num_bytes),
    )
