"""Running forward and backward of a step: plainly, or through the stages of a pipeline (torch.distributed.pipelining).

A runner takes all micro-batches of a step and tells the engine which one runs through which stage and which is the last. Losses are
sums over tokens; the runner returns this rank's part of them, zero on ranks without the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from paro_lm.parallel.engine import ShardingEngine
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.stages import ONE_STAGE, stages_of_rank

SCHEDULE_CLASSES: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}

Forward = Callable[[nn.Module, Tensor | None, int], Tensor]
"""(chunk of the model, hidden states or None on the first stage, micro-batch) -> hidden states, or the loss on the last stage."""


class Runner(Protocol):
    def forward_backward(self, forward: Forward, num_micro_batches: int, scale: float) -> Tensor:
        """Run all micro-batches, backward from `scale` times each loss; returns the sum of this rank's losses (not scaled)."""

    def forward_only(self, forward: Forward) -> Tensor:
        """The loss of one micro-batch (index 0), without gradients; zero where this rank has no last stage."""


class PlainRunner:
    """One stage: forward and backward of one micro-batch after the other."""

    def __init__(self, engine: ShardingEngine, chunk: nn.Module) -> None:
        self._engine, self._chunk = engine, chunk

    def forward_backward(self, forward: Forward, num_micro_batches: int, scale: float) -> Tensor:
        losses = []
        for index in range(num_micro_batches):
            with self._engine.micro_batch(last=index == num_micro_batches - 1):
                loss = forward(self._chunk, None, index)
                (loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def forward_only(self, forward: Forward) -> Tensor:
        return forward(self._chunk, None, 0)


class _StageModule(nn.Module):
    """What torch calls as a stage: the first argument is an index on the first stage, hidden states on the others."""

    def __init__(self, chunk: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.chunk, self.is_first = chunk, is_first
        self.forward_fn: Forward | None = None
        self.micro_batch = 0

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.forward_fn is not None
        output = self.forward_fn(self.chunk, None if self.is_first else inputs, self.micro_batch)
        if torch.is_grad_enabled() and not output.requires_grad:  # a stage that is wholly frozen still takes part in the backward
            return output.detach().requires_grad_()
        return output


class _EngineStage(PipelineStage):
    """A stage that tells the engine which micro-batch passes, in which direction, and which backward is the last."""

    def __init__(
        self,
        engine: ShardingEngine,
        local_index: int,
        module: _StageModule,
        *args: Any,
        record: Callable[[int], None] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, *args, **kwargs)
        self._engine, self._local_index, self._module, self._record = engine, local_index, module, record

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        if self._record is not None:
            self._record(sum(send.tensor.nbytes for send in sends))
        return sends

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._module.micro_batch = fwd_chunk_id
        with self._engine.forward_pass(self._local_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False, **kwargs: Any
    ) -> Any:
        arguments = {"loss": loss, "full_backward": full_backward, "last_backward": last_backward, **kwargs}
        if full_backward:
            with self._engine.backward_pass(self._local_index, bwd_chunk_id, last=last_backward):
                return super().backward_one_chunk(bwd_chunk_id, **arguments)
        with self._engine.input_pass(self._local_index):
            return super().backward_one_chunk(bwd_chunk_id, **arguments)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self._engine.weight_pass(self._local_index, bwd_chunk_id, last=last_backward):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


class PipelineRunner:
    """All micro-batches of a step through one torch schedule. A schedule is built once per number of micro-batches.

    chunks       this rank's parts of the model, in the order of the engine's stages
    stages       their global stage indices
    hidden       an example of the hidden states between stages, on the meta device
    loss_dtype   type of a micro-batch's loss
    record       told of the bytes of every message between stages that a step sends
    """

    def __init__(
        self,
        engine: ShardingEngine,
        chunks: Sequence[nn.Module],
        stages: Sequence[int],
        *,
        mesh: ParallelMesh,
        schedule: str,
        num_stages: int,
        hidden: Tensor,
        loss_dtype: torch.dtype,
        record: Callable[[int], None] | None = None,
    ) -> None:
        self._mesh, self._schedule_name, self._num_stages = mesh, schedule, num_stages
        self._hidden, self._loss_dtype = hidden, loss_dtype
        self._group = mesh.new_group("pp")
        self._scale = 1.0
        self._modules = {s: _StageModule(chunk, is_first=s == 0) for s, chunk in zip(stages, chunks, strict=True)}
        index = torch.empty(1, dtype=torch.int64, device="meta")
        between = hidden.detach().requires_grad_()
        loss = torch.empty((), dtype=loss_dtype, device="meta").requires_grad_()
        self._stages = [
            _EngineStage(
                engine,
                local,
                module,
                s,
                num_stages,
                mesh.device,
                input_args=(index if s == 0 else between,),
                output_args=(loss if s == num_stages - 1 else between,),
                group=self._group,
                record=record,
            )
            for local, (s, module) in enumerate(self._modules.items())
        ]
        self._schedules: dict[int, Any] = {}
        pp = mesh.size("pp")
        self._rank_of = {
            stage: mesh.rank_at(pp=rank) for rank in range(pp) for stage in stages_of_rank(schedule, pp, num_stages // pp, rank)
        }

    def _schedule(self, num_micro_batches: int) -> Any:
        if num_micro_batches not in self._schedules:
            stages = self._stages[0] if self._schedule_name in ONE_STAGE else self._stages
            self._schedules[num_micro_batches] = SCHEDULE_CLASSES[self._schedule_name](
                stages, num_micro_batches, loss_fn=lambda loss, index: loss * self._scale, scale_grads=False
            )
        return self._schedules[num_micro_batches]

    @contextmanager
    def _using(self, forward: Forward) -> Iterator[None]:
        for module in self._modules.values():
            module.forward_fn = forward
        try:
            yield
        finally:
            for module in self._modules.values():
                module.forward_fn = None

    def forward_backward(self, forward: Forward, num_micro_batches: int, scale: float) -> Tensor:
        """One `schedule.step`. Losses are taken before they are scaled, so a loss scale of fp16 does not enter them."""
        losses: list[Tensor] = []

        def keep_loss(chunk: nn.Module, inputs: Tensor | None, index: int) -> Tensor:
            output = forward(chunk, inputs, index)
            if output.dim() == 0:
                losses.append(output.detach().clone())
            return output

        self._scale = scale
        indices = torch.arange(num_micro_batches, device=self._mesh.device)
        with self._using(keep_loss):
            schedule = self._schedule(num_micro_batches)
            arguments = (indices,) if 0 in self._modules else ()
            schedule.step(*arguments, target=indices, return_outputs=False)
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=self._loss_dtype, device=self._mesh.device)

    @torch.no_grad()
    def forward_only(self, forward: Forward) -> Tensor:
        """Through the stages one after the other; the next micro-batch enters while this one is on its way."""
        loss = torch.zeros((), dtype=self._loss_dtype, device=self._mesh.device)
        local: Tensor | None = None
        for stage, module in sorted(self._modules.items()):
            inputs = local
            if stage > 0 and self._rank_of[stage - 1] != self._mesh.rank:
                inputs = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self._mesh.device)
                dist.recv(inputs, src=self._rank_of[stage - 1], group=self._group)
            output = forward(module.chunk, inputs, 0)
            if stage == self._num_stages - 1:
                loss = output
            elif self._rank_of[stage + 1] == self._mesh.rank:
                local = output
            else:
                dist.send(output.contiguous(), dst=self._rank_of[stage + 1], group=self._group)
        return loss
