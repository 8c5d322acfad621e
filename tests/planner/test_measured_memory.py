"""Predicted peaks against measured ones: live tensor bytes of a real training step, counted by the allocator's own events.

Measured is what is held before the step (states, exact) and the highest sum of allocations and frees during it. Within 5 %, on four
ranks 3 %.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paro_lm.config import Config, ModelConfig, OptimConfig, ParallelConfig
from paro_lm.model.spec import initial_value
from paro_lm.model.transformer import Transformer
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.activation import apply_activation_checkpointing
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner.candidates import Layout, evaluator_of
from paro_lm.testing import run_distributed
from paro_lm.tools.measure import highest

VOCAB, BATCH, LENGTH, ACCUMULATION = 1024, 2, 128, 2
LLAMA = ModelConfig(hidden_size=128, num_layers=6, num_heads=4, ffn_size=384, vocab_size=VOCAB)
GPT2 = replace(LLAMA, norm="layernorm", activation="gelu", positions="learned", max_positions=LENGTH, tie_embeddings=True)


def measured_and_predicted(mesh: ParallelMesh, model_cfg: ModelConfig, cell: Cell, mode: str) -> tuple[int, int, float, float]:
    """(measured states, measured peak, predicted states, predicted peak) of the second step of a real training."""
    with torch.device("meta"):
        model = Transformer(model_cfg, vocab_size=VOCAB)
    apply_activation_checkpointing(model, mode)
    specs = model.parameter_specs()
    gathers, reductions = (GridCollectives(mesh, algorithm="ho_ring") for _ in range(2))
    engine = ShardingEngine(
        model, model.units(), mesh=mesh, cells=cell, gather_collectives=gathers, reduce_collectives=reductions, specs=specs,
        value_of=lambda name: initial_value(name, specs[name], 0),
    )  # fmt: skip
    model.reset_buffers(mesh.device)
    optimizer = AdamW(engine, OptimConfig(), decays=lambda name: True)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH))

    def step() -> None:
        for index in range(ACCUMULATION):
            with engine.micro_batch(last=index == ACCUMULATION - 1):
                model(tokens, labels=tokens).backward()
        engine.finish_gradients()
        optimizer.step(1e-3)
        engine.sync_parameters()
        engine.wait()

    step()
    held = engine.state_bytes()
    states = held["param"] + held["grad"] + held["main"] - held["shared"] + optimizer.state_bytes()
    scratch = gathers.scratch_bytes + reductions.scratch_bytes
    peak = states + scratch + highest(step, mesh.device)
    engine.close()
    cfg = Config(
        model=model_cfg,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        global_batch_size=BATCH * ACCUMULATION * mesh.shape.dp,
        parallel=ParallelConfig(activation_checkpointing=mode, collectives="ho_ring"),
    )
    layout = Layout(shape=mesh.shape, micro_batch_size=BATCH, accumulation=ACCUMULATION, checkpointing=mode, sequence_parallel=False)
    predicted = evaluator_of(cfg, layout, VOCAB).memory(cell)
    return states, peak, predicted.states, predicted.total


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_one_process(cfg: ModelConfig, mode: str) -> None:
    results = run_distributed(_one, 1, cfg, mode)
    states, peak, predicted_states, predicted = results[0]
    assert predicted_states == states
    assert predicted == pytest.approx(peak, rel=0.05)


def _one(rank: int, world_size: int, cfg: ModelConfig, mode: str) -> tuple[int, int, float, float]:
    return measured_and_predicted(ParallelMesh.build(world_size=1, rank=0), cfg, Cell.parse("NNN"), mode)


def _grid(rank: int, world_size: int) -> dict[str, tuple[int, int, float, float]]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    return {str(cell): measured_and_predicted(mesh, LLAMA, cell, "none") for cell in KEPT_CELLS}


@pytest.mark.slow
def test_all_kept_cells_on_four_ranks() -> None:
    for rank, found in enumerate(run_distributed(_grid, 4, timeout=400.0)):
        for cell, (states, peak, predicted_states, predicted) in found.items():
            assert predicted_states == states, (rank, cell)
            assert predicted == pytest.approx(peak, rel=0.03), (rank, cell, peak, predicted)
