"""From a config to a model under the sharding engine; what training, evaluation and generation share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paro_lm.config import Config, PrecisionConfig
from paro_lm.model.spec import ParameterSpec, initial_value
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing, apply_compile
from paro_lm.parallel.collectives import ByteLedger, GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.sharding import Cell, cell_of_unit
from paro_lm.parallel.tensor import TensorParallel
from paro_lm.parallel.unit_buffer import Dtypes

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtypes_of(cfg: PrecisionConfig) -> Dtypes:
    """torch types of a precision."""
    return Dtypes(param=DTYPES[cfg.param_dtype], grad=DTYPES[cfg.grad_dtype], reduce=DTYPES[cfg.reduce_dtype], main=DTYPES[cfg.main_dtype])


def build_model(cfg: Config, mesh: ParallelMesh, *, vocab_size: int, ledger: ByteLedger) -> Transformer:
    """This rank's part of the model on the meta device, in the parameter dtype, with checkpointing and compilation applied."""
    tensor = None
    if mesh.size("tp") > 1:
        tensor = TensorParallel(
            group=mesh.group("tp"),
            rank=mesh.coordinate("tp"),
            size=mesh.size("tp"),
            sequence_parallel=cfg.parallel.sequence_parallel,
            record=lambda operation, num_bytes: ledger.record(operation, "tp", num_bytes),
        )
    with torch.device("meta"):
        model = Transformer(cfg.model, vocab_size=vocab_size, tensor=tensor).to(DTYPES[cfg.precision.param_dtype])
    apply_activation_checkpointing(model, cfg.parallel.activation_checkpointing)
    if cfg.runtime.compile:
        apply_compile(model)
    return model


def build_engine(
    cfg: Config, model: Transformer, mesh: ParallelMesh, *, ledger: ByteLedger, value_of: Callable[[str], torch.Tensor] | None = None
) -> ShardingEngine:
    """Put the model's parameters into their placements; their first values follow from (seed, name), or come from `value_of`."""
    specs = model.parameter_specs()
    default = Cell.parse(cfg.parallel.sharding)

    def grid() -> GridCollectives:
        return GridCollectives(
            mesh, algorithm=cfg.parallel.collectives, chunk_bytes=cfg.parallel.chunk_bytes, ledger=ledger, device=mesh.device
        )

    engine = ShardingEngine(
        model,
        model.units(),
        mesh=mesh,
        cells=lambda unit: cell_of_unit(unit, default, cfg.parallel.sharding_overrides),
        dtypes=dtypes_of(cfg.precision),
        gather_collectives=grid(),
        reduce_collectives=grid(),
        specs=specs,
        value_of=value_of or (lambda name: initial_value(name, specs[name], cfg.seed)),
        overlap=cfg.parallel.overlap,
    )
    model.reset_buffers(mesh.device)
    return engine


def num_parameters(specs: dict[str, ParameterSpec]) -> int:
    """Parameters of the whole model, padding of the vocabulary not counted."""
    return sum(torch.Size((spec.valid_rows or spec.shape[0], *spec.shape[1:])).numel() for spec in specs.values())
