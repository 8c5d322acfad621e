"""AdamW over the shards of main parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paro_lm.config import OptimConfig
from paro_lm.optim.clip import scale_gradients
from paro_lm.parallel.buffer import FlatShard, Segment, flat_shard
from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.unit_buffer import UnitBuffer


@dataclass(frozen=True)
class _Part:
    """One parameter's segment in one main shard, with its moments."""

    buffer: UnitBuffer
    segment: Segment
    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class AdamW:
    """torch's AdamW on views of the main shards; one group with decay and one without.

    Moments are flat buffers in the main dtype with the main parameters' layout. Every parameter has a step count of its own, the
    same on all ranks: what had no gradient on any data rank is neither moved nor decayed nor counted (`ShardingEngine.used`).

    decays    whether weight decay applies to a parameter, by name
    """

    def __init__(self, engine: ShardingEngine, cfg: OptimConfig, *, decays: Callable[[str], bool]) -> None:
        self._engine = engine
        self._parts: list[_Part] = []
        self._moments: list[torch.Tensor] = []
        self.steps = {name: torch.zeros((), dtype=torch.float32) for name in engine.trainable_names()}
        for buffer in engine.trainable_buffers():
            assert buffer.main is not None
            exp_avg, exp_avg_sq = torch.zeros_like(buffer.main), torch.zeros_like(buffer.main)
            self._moments += [exp_avg, exp_avg_sq]
            for segment in buffer.segments(buffer.cell.main):
                self._parts.append(_Part(buffer, segment, segment.of(buffer.main), segment.of(exp_avg), segment.of(exp_avg_sq)))
        self._folds_scale = _can_fuse(engine) and engine.dtypes.main == torch.float32
        groups = [
            {"params": [part.main for part in self._parts if decays(part.segment.slot.name) is flag], "weight_decay": decay}
            for flag, decay in ((True, cfg.weight_decay), (False, 0.0))
        ]
        self._adam: torch.optim.AdamW | None = None
        if self._parts:
            self._adam = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=cfg.lr,
                betas=(cfg.beta1, cfg.beta2),
                eps=cfg.eps,
                fused=_can_fuse(engine),
            )
            for part in self._parts:
                step = torch.zeros((), dtype=torch.float32, device=part.main.device)
                self._adam.state[part.main] = {"step": step, "exp_avg": part.exp_avg, "exp_avg_sq": part.exp_avg_sq}

    @torch.no_grad()
    def step(self, lr: float, *, scale: float = 1.0) -> None:
        """Update main parameters from `scale` times the `finished` gradients with this learning rate."""
        for name in self.steps:
            if self._engine.used(name):
                self.steps[name] += 1
        if self._adam is None:
            return
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._folds_scale:  # the fused kernel divides by this number, in fp32, which saves a pass over all gradients
            self._adam.grad_scale = None if scale == 1.0 else torch.tensor(1.0 / scale, device=self._engine.mesh.device)  # type: ignore[attr-defined]
        else:
            scale_gradients(self._engine, scale)
        for part in self._parts:
            name = part.segment.slot.name
            part.main.grad = None
            if self._engine.used(name):
                assert part.buffer.finished is not None, f"{name}: step before finish_gradients"
                part.main.grad = part.segment.of(part.buffer.finished).to(part.main.dtype)
                self._adam.state[part.main]["step"].fill_(self.steps[name] - 1)
        self._adam.step()
        for part in self._parts:
            part.main.grad = None

    def state_shards(self) -> dict[str, FlatShard | torch.Tensor]:
        """Moments as shards and step counts as 0-d tensors, by "exp_avg/<name>", "exp_avg_sq/<name>", "step/<name>"."""
        result: dict[str, FlatShard | torch.Tensor] = {f"step/{name}": step for name, step in self.steps.items()}
        for part in self._parts:
            for key, view in (("exp_avg", part.exp_avg), ("exp_avg_sq", part.exp_avg_sq)):
                whole = flat_shard(part.segment, view)
                result[f"{key}/{part.segment.slot.name}"] = FlatShard(**(vars(whole) | {"data": view}))
        return result

    def state_bytes(self) -> int:
        """Bytes of the moments on this rank."""
        return sum(moment.nbytes for moment in self._moments)


def _can_fuse(engine: ShardingEngine) -> bool:
    return engine.mesh.device.type in ("cpu", "cuda")
