"""Fine-tuning in all 14 kept cells: what ranks hold and send equals the formulas for Psi' < Psi, exactly and, in the paper's form, up to
padding."""

from __future__ import annotations

from dataclasses import replace

import torch

from paro_lm.build import build_engine, build_model
from paro_lm.config import Config, FinetuneConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from paro_lm.optim.optimizer import AdamW
from paro_lm.parallel.collectives import ByteLedger
from paro_lm.parallel.collectives.grid import AUTO_BYTES
from paro_lm.parallel.cost import ElementBytes, ideal_memory, memory, step_bytes, wire_algorithm
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.sharding import KEPT_CELLS, Cell
from paro_lm.planner.inventory import unit_sizes
from paro_lm.testing import run_distributed

VOCAB = 512
MODEL = ModelConfig(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=VOCAB, max_positions=64)
TUNES = {
    "lora": FinetuneConfig(lora_rank=4, lora_targets=["q", "v", "down"]),
    "blocks": FinetuneConfig(last_blocks=1),
    "patterns": FinetuneConfig(trainable=["layers.2.mlp.*", "*norm.weight"]),
}
TIED = {"lora"}  # where the table is needed at both ends, too
ELEMENT = ElementBytes()  # bf16 parameters, fp32 gradients and states
ACCUMULATION = 2


def config(name: str, cell: Cell) -> Config:
    return Config(
        model=replace(MODEL, tie_embeddings=name in TIED),
        finetune=TUNES[name],
        precision=PrecisionConfig(name="bf16", param_dtype="bf16"),
        parallel=ParallelConfig(sharding=str(cell), group_size=2, overlap=False, collectives="ho_ring"),
    )


def measure(mesh: ParallelMesh, name: str, cell: Cell) -> list[str]:
    """Differences between a counted step and the formulas."""
    cfg, ledger = config(name, cell), ByteLedger()
    part = build_model(cfg, mesh, vocab_size=VOCAB, ledger=ledger)
    engine = build_engine(cfg, part, mesh, ledger=ledger)
    optimizer = AdamW(engine, OptimConfig(), decays=lambda name: part.specs[name].decay)
    tokens = torch.arange(24).view(2, 12) * 7 % VOCAB
    for _ in range(2):  # the second: its first forward waits for updated parameters
        engine.wait()
        ledger.reset()
        for index in range(ACCUMULATION):
            with engine.micro_batch(last=index == ACCUMULATION - 1):
                part.module(tokens, labels=tokens).backward()
        engine.finish_gradients()
        optimizer.step(0.1)
        engine.sync_parameters()
    engine.wait()
    sent = {axis: ledger.by_axis().get(axis, 0) for axis in DATA_AXES}
    units = unit_sizes(cfg, mesh.shape, vocab_size=VOCAB)  # from options alone
    last = mesh.coordinate("dp_intra") == mesh.size("dp_intra") - 1
    algorithm = wire_algorithm("ho_ring", gloo=True, auto_bytes=AUTO_BYTES)
    expected = step_bytes(units, mesh.shape, ELEMENT, accumulation=ACCUMULATION, algorithm=algorithm, last_of_group=last)
    wrong = [] if sent == expected else [f"{name} {cell}: sent {sent}, formula {expected}"]
    held, formula, moments = engine.state_bytes(), memory(units, mesh.shape, ELEMENT), optimizer.state_bytes()
    if (found := (held["param"], held["grad"], held["main"] + moments)) != (formula.param, formula.grad, formula.main):
        wrong.append(f"{name} {cell}: holds {found}, formula {formula}")
    sizes = {flag: sum(p.numel() for p in part.module.parameters() if p.requires_grad is flag) for flag in (True, False)}
    paper = ideal_memory(cell, num_params=sum(sizes.values()), num_trainable=sizes[True], shape=mesh.shape, grad_bytes=4)
    if not 1 <= sum(found) / paper.total < 1.05:
        wrong.append(f"{name} {cell}: holds {sum(found)}, paper {paper.total}")
    if sizes[True] / sum(sizes.values()) > 0.3:
        wrong.append(f"{name}: {sizes} is no small part")
    engine.close()
    return wrong


def kept_cells(rank: int, world_size: int) -> list[str]:
    mesh = ParallelMesh.build(world_size=world_size, rank=rank, group_size=2)
    return [problem for name in TUNES for cell in KEPT_CELLS for problem in measure(mesh, name, cell)]


def test_bytes_sent_and_held_for_frozen_parameters() -> None:
    assert len(KEPT_CELLS) == 14
    for rank, wrong in enumerate(run_distributed(kept_cells, 4, timeout=300.0)):
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)
