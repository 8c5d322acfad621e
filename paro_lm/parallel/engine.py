"""The sharding engine: parameters, gradients and main parameters of every unit, each in its own placement, around any module.

    engine = ShardingEngine(model, [units], mesh=mesh, cells=Cell.parse("IIG"), collectives=...)
    for step in range(steps):
        for index, batch in enumerate(batches):
            with engine.micro_batch(last=index == len(batches) - 1):
                loss(model(batch)).backward()
        engine.finish_gradients()      # sums are complete: engine.trainable_buffers()[i].finished
        ...                            # clip, update main parameters
        engine.sync_parameters()       # main -> parameters, in the background of the next forward

The model is changed in place: names stay, no wrapper. Losses are sums over what every rank computed, so every reduction is a sum.
Two queues carry collectives, one for parameters and one for gradients; each sees its jobs in the same order on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paro_lm.model.spec import ParameterSpec, Unit
from paro_lm.parallel.buffer import FlatShard, Slot
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.cost import UnitSize
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.queue import make_queue
from paro_lm.parallel.seams import Seams
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.unit_buffer import Dtypes, UnitBuffer
from paro_lm.parallel.units import Calls, Reduction, RuntimeUnit, State, UnitBuilder, when_all_have_gradients

PUBLISH_AHEAD = 2
"""Units by which publishing sharded parameters runs ahead of gathering them."""

MAX_PENDING_REDUCTIONS = 2
"""Units whose whole-sized gradients may wait for the network at a time; backward waits for older ones."""


class ShardingEngine:
    """Holds the parameters of `model` in the placements of `cells` and moves them; see the module's text for its use.

    units        disjoint parts of the model in the order in which forward calls them; together they hold every parameter. With
                 pipelines one list per stage of this rank
    cells        one cell, or a function from unit name to cell
    specs        per parameter name its global shape and box; without it parameters are whole on every rank
    value_of     per parameter name its initial box; needed when the model is on the meta device
    seams        sums that gradients need beyond the data axes: over tp, and between the stages that share a tied weight
    overlap      communicate beside computation; off gives bitwise the same numbers
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit] | Sequence[Sequence[Unit]],
        *,
        mesh: ParallelMesh,
        cells: Cell | Callable[[str], Cell],
        dtypes: Dtypes | None = None,
        gather_collectives: GridCollectives,
        reduce_collectives: GridCollectives,
        specs: Mapping[str, ParameterSpec] | None = None,
        value_of: Callable[[str], torch.Tensor] | None = None,
        seams: Seams | None = None,
        overlap: bool = True,
    ) -> None:
        self.model, self.mesh, self.dtypes, self.seams = model, mesh, dtypes or Dtypes(), seams or Seams()
        self._gather_collectives, self._reduce_collectives = gather_collectives, reduce_collectives
        overlap = overlap and mesh.size(*DATA_AXES) > 1
        self._prefetch = overlap
        self._gathers = make_queue(mesh.device, overlap=overlap, name="paro-gather")
        self._reductions = make_queue(mesh.device, overlap=overlap, name="paro-reduce")
        self._builder = UnitBuilder(
            model=model,
            cell_of=cells if callable(cells) else lambda name: cells,
            dtypes=self.dtypes,
            mesh=mesh,
            specs=specs,
            shared=self.seams.shared,
        )
        self._stages = self._builder.build(units, value_of)
        self._units = [unit for stage in self._stages for unit in stage.units]
        self._pending: list[RuntimeUnit] = []
        self._held = False
        self._hooks: list[RemovableHandle] = []
        for unit in self._units:
            for position, module in enumerate(unit.modules):
                before, after = self._before_forward(unit, position), self._after_forward(unit, position == len(unit.modules) - 1)
                self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after))
            self._watch_gradients(unit)
        self._used = self._none_used()

    def _none_used(self) -> dict[str, bool]:
        return {slot.name: False for buffer in self.trainable_buffers() for slot in buffer.layout.slots}

    def _watch_gradients(self, unit: RuntimeUnit) -> None:
        for buffer in unit.trainable:
            for slot in buffer.layout.slots:
                parameter = unit.parameters[slot.name]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._after_gradient(unit, buffer, slot)))

    # ------------------------------------------------------------------ parameters: gather and free

    def _begin_gather(self, unit: RuntimeUnit) -> None:
        if unit.gather is not None or unit.is_unsharded:
            return
        self._publish(unit)
        sharded = [buffer for buffer in unit.buffers if not buffer.unsharded]
        for buffer in sharded:
            buffer.allocate_full()

        def gather() -> None:
            with record_function(f"paro.unshard({unit.name})"):
                for buffer in sharded:
                    buffer.unshard(self._gather_collectives)

        unit.gather = self._gathers.submit(gather)
        for buffer in sharded:
            buffer.unsharded = True
        for following in unit.stage.units[unit.position + PUBLISH_AHEAD :][:1]:
            self._publish(following)

    def _unshard(self, unit: RuntimeUnit) -> None:
        self._begin_gather(unit)
        self._wait_gather(unit)

    def _wait_gather(self, unit: RuntimeUnit) -> None:
        if unit.gather is not None:
            unit.gather.wait()
            unit.gather = None

    def _reshard(self, unit: RuntimeUnit) -> None:
        if unit.is_sharded:
            self._wait_gather(unit)  # it may have been prefetched and not used
            for buffer in unit.buffers:
                buffer.free_full()
        unit.state = State.RESTING

    # ------------------------------------------------------------------ forward

    def _before_forward(self, unit: RuntimeUnit, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._held:
                return
            recomputing = unit.state is State.BACKWARD
            if position == 0 and not recomputing:
                unit.stage.enter(unit)
            self._unshard(unit)
            if not recomputing:
                unit.state = State.FORWARD
                following = unit.stage.units[unit.position + 1 : unit.position + 2]
                if self._prefetch and position == 0 and following:
                    self._begin_gather(following[0])
            if torch.is_grad_enabled():
                self._expect_backward(unit, (args, kwargs))

        return hook

    def _expect_backward(self, unit: RuntimeUnit, inputs: Any) -> None:
        calls = unit.calls.setdefault(unit.stage.forward_of, Calls())
        differentiable = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if differentiable:
            calls.hooked += 1
            # Kept to be removed: buffers that a pipeline receives into are inputs again in the next step.
            calls.handles.append(when_all_have_gradients(differentiable, lambda: self._after_backward_call(unit, calls)))
        else:
            calls.open += 1

    def _after_forward(self, unit: RuntimeUnit, is_last_module: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._held:
                return
            if torch.is_grad_enabled():
                outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
                micro_batch = unit.stage.forward_of
                if outputs:
                    torch.autograd.graph.register_multi_grad_hook(
                        outputs, lambda grad: self._before_backward(unit, micro_batch), mode="any"
                    )
                else:  # no backward will pass here
                    unit.calls[micro_batch].open -= 1
            if is_last_module and unit.state is not State.BACKWARD:
                self._reshard(unit)

        return hook

    # ------------------------------------------------------------------ backward

    def _before_backward(self, unit: RuntimeUnit, micro_batch: int | None) -> None:
        unit.stage.check_complete()
        unit.state = State.BACKWARD
        self._unshard(unit)
        if self._prefetch and unit.position > 0:
            previous = unit.stage.units[unit.position - 1]
            if previous.calls.get(micro_batch):
                self._begin_gather(previous)

    def _after_backward_call(self, unit: RuntimeUnit, calls: Calls) -> None:
        calls.hooked -= 1
        if not calls:
            self._reshard(unit)

    def _after_gradient(self, unit: RuntimeUnit, buffer: UnitBuffer, slot: Slot) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            unit.take_gradient(buffer, slot, gradient)
            if len(unit.written) == unit.num_trainable:
                calls = unit.calls.get(unit.stage.backward_of)
                if calls is None or calls.hooked == 0:  # nothing is left to flow through this unit
                    self._reshard(unit)
                self._gradients_ready(unit)

        return hook

    def _gradients_ready(self, unit: RuntimeUnit) -> None:
        """Issue reductions from the last unit to the first, whatever the order in which gradients become ready."""
        unit.ready = True
        stage = unit.stage
        while stage.cursor > 0 and (stage.units[stage.cursor - 1].ready or not stage.units[stage.cursor - 1].trainable):
            stage.cursor -= 1
            self._reduce(stage.units[stage.cursor])

    def _reduce(self, unit: RuntimeUnit) -> None:
        is_last, written, unit.written = bool(unit.stage.is_last_backward), unit.written, set()
        jobs: list[tuple[UnitBuffer, torch.Tensor | None]] = []
        for buffer in unit.trainable:
            reducing = buffer.end_reduction(written)
            if is_last:
                buffer.zero_unwritten()
            if is_last or reducing is not None:
                jobs.append((buffer, reducing))
        if not jobs:
            return

        def reduce() -> None:
            with record_function(f"paro.reduce({unit.name})"):
                for buffer, reducing in jobs:
                    if reducing is not None:
                        buffer.accumulate(self._reduce_collectives, reducing)
                    if is_last:
                        buffer.finish(self._reduce_collectives)

        if unit.reduction is not None:  # of an earlier micro-batch
            self._wait_reduction(unit)
        reading = [reducing for _, reducing in jobs if reducing is not None]
        unit.reduction = Reduction(handle=self._reductions.submit(reduce), reading=reading)
        self._pending.append(unit)
        while reading and len(self._pending) > MAX_PENDING_REDUCTIONS:
            self._wait_reduction(self._pending[0])

    def _wait_reduction(self, unit: RuntimeUnit) -> None:
        assert unit.reduction is not None
        unit.reduction.handle.wait()
        unit.reduction = None
        self._pending.remove(unit)

    # ------------------------------------------------------------------ the steps of a training step

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around one forward and backward. On the last micro-batch of a step gradients go on to the optimizer's placement."""
        with self.backward_pass(0, None, last=last), self.forward_pass(0, None):
            yield

    @contextmanager
    def forward_pass(self, stage: int, micro_batch: int | None) -> Iterator[None]:
        """Around the forward of one micro-batch through one stage."""
        current = self._stages[stage]
        current.begin_forward(micro_batch)
        yield
        current.end_forward()

    @contextmanager
    def backward_pass(self, stage: int, micro_batch: int | None, *, last: bool) -> Iterator[None]:
        """Around the backward of one micro-batch through one stage; `last`: the step's last backward of this stage."""
        current = self._stages[stage]
        assert current.is_last_backward is None, "backward passes do not nest"
        current.backward_of, current.is_last_backward, current.cursor = micro_batch, last, len(current.units)
        try:
            yield
            for unit in reversed(current.units):
                if (calls := unit.calls.pop(micro_batch, None)) is not None:
                    calls.remove_hooks()
                self._reshard(unit)
                unit.ready = True
            if current.cursor > 0:
                self._gradients_ready(current.units[current.cursor - 1])
        finally:
            current.is_last_backward = None
            for unit in current.units:
                unit.ready = False

    @contextmanager
    def input_pass(self, stage: int) -> Iterator[None]:
        """Around the input half of a split backward (zero-bubble schedules): weights get their gradients in `weight_pass`."""
        yield
        for unit in self._stages[stage].units:
            if unit.state is State.BACKWARD:
                self._reshard(unit)

    @contextmanager
    def weight_pass(self, stage: int, micro_batch: int | None, *, last: bool) -> Iterator[None]:
        """Around the weight half: parameters are whole again, and gradients are collected that autograd's hooks did not see."""
        units = self._stages[stage].units
        for unit in reversed(units):
            self._unshard(unit)
        with self.backward_pass(stage, micro_batch, last=last):
            yield
            for unit in reversed(units):
                for buffer in unit.trainable:
                    for slot in buffer.layout.slots:
                        parameter = unit.parameters[slot.name]
                        gradient, parameter.grad = parameter.grad, None
                        if gradient is not None:
                            unit.take_gradient(buffer, slot, gradient)

    def finish_gradients(self) -> None:
        """Wait until every gradient is complete, and agree over the data ranks on which parameters had one."""
        while self._pending:
            self._wait_reduction(self._pending[0])
        self.wait()  # main parameters may be written from here on: nothing may still be reading them
        self.seams.finish(self.trainable_buffers(), self.mesh)
        written = {name for buffer in self.trainable_buffers() for name in buffer.written}
        if self._used:
            flags = torch.tensor([float(name in written) for name in self._used], device=self.mesh.device)
            self._used = dict(zip(self._used, (flag > 0 for flag in self.mesh.max(flags, DATA_AXES).tolist()), strict=True))

    def sync_parameters(self) -> None:
        """Publish updated main parameters and drop the gradients; the next forward waits for its units only.

        Sharded parameters are published a few units ahead of their gather: what is needed first does not queue behind all others.
        """
        self.drop_gradients()
        for unit in self._units:
            unit.unpublished = [buffer for buffer in unit.trainable if buffer.main is not buffer.param]
        for unit in self._units:
            if not unit.is_sharded or unit.position < PUBLISH_AHEAD:
                self._publish(unit)

    def _publish(self, unit: RuntimeUnit) -> None:
        buffers, unit.unpublished = unit.unpublished, []
        if buffers:
            handle = self._gathers.submit(self._publish_job(unit.name, buffers))
            if any(not buffer.cell.param for buffer in buffers):
                unit.gather = handle

    def drop_gradients(self) -> None:
        """Forget this step's gradients (alone: the step is skipped)."""
        for buffer in self.trainable_buffers():
            buffer.drop_gradients()

    def _publish_job(self, name: str, buffers: list[UnitBuffer]) -> Callable[[], None]:
        def publish() -> None:
            with record_function(f"paro.publish({name})"):
                for buffer in buffers:
                    buffer.publish(self._gather_collectives)

        return publish

    def wait(self) -> None:
        """Wait for parameters that are on their way; before they are read outside a forward."""
        for unit in self._units:
            self._publish(unit)
        self._gathers.submit(lambda: None).wait()
        for unit in self._units:
            self._wait_gather(unit)

    def close(self) -> None:
        """Finish what was submitted, end the queues and let go of the model, which a hook of a parameter would hold for ever."""
        self._gathers.close()
        self._reductions.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """The model with all parameters whole, for reading and for forwards without gradients, which then need no other data rank.

        Entering is a collective call.
        """
        for unit in self._units:
            self._unshard(unit)
        self._held = True
        try:
            yield self.model
        finally:
            self._held = False
            for unit in self._units:
                self._reshard(unit)

    def set_trainable(self, trainable: Callable[[str], bool]) -> None:
        """Freeze or unfreeze parameters, by name, between steps; a collective call, with the same answer for a name on every rank.

        Values stay, and cells: units that change get new buffers, and the model new `nn.Parameter`s there. A parameter that was
        frozen has main parameters from now on; one that is frozen keeps its main value, rounded to the parameter type. Make a new
        optimizer afterwards: the old one updates buffers that are gone.
        """
        self.wait()
        assert not self._pending and all(buffer.finished is None for buffer in self.trainable_buffers()), "only between steps"
        for unit in self._units:
            if all(parameter.requires_grad is trainable(name) for name, parameter in unit.parameters.items()):
                continue
            values: dict[str, torch.Tensor] = {}

            def gather(unit: RuntimeUnit = unit, values: dict[str, torch.Tensor] = values) -> None:
                for buffer in unit.buffers:
                    values.update(buffer.whole_values(self._gather_collectives))

            self._gathers.submit(gather).wait()
            self._builder.rebuild(unit, trainable, values)
            self._watch_gradients(unit)
        self._used = self._none_used()

    # ------------------------------------------------------------------ what others read

    def buffers(self) -> list[UnitBuffer]:
        """Every buffer, in the order of units."""
        return [buffer for unit in self._units for buffer in unit.buffers]

    def trainable_buffers(self) -> list[UnitBuffer]:
        """Buffers of trainable parameters, in the order of units."""
        return [buffer for unit in self._units for buffer in unit.trainable]

    def used(self, name: str) -> bool:
        """Whether any data rank had a gradient for this parameter in this step (after finish_gradients)."""
        return self._used[name]

    def trainable_names(self) -> list[str]:
        return list(self._used)

    def parameter_shards(self) -> dict[str, FlatShard]:
        """What a checkpoint holds of the parameters: main parameters of trainable ones, parameters of frozen ones."""
        return {name: shard for buffer in self.buffers() for name, shard in buffer.parameter_shards().items()}

    def unit_sizes(self) -> list[UnitSize]:
        """Padded elements of every unit with its cell, what the formulas of `parallel.cost` take."""
        return [unit.size() for unit in self._units]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's resting parameters, gradients and main parameters; `shared` of them are counted in param and in main."""
        total = Counter({"param": 0, "grad": 0, "main": 0, "shared": 0})
        for buffer in self.buffers():
            total.update(buffer.state_bytes())
        return dict(total)
