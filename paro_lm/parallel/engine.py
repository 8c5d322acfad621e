"""The sharding engine: parameters, gradients and main parameters of every unit, each in its own placement, around any module.

    engine = ShardingEngine(model, units, mesh=mesh, cells=Cell.parse("IIG"), collectives=...)
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

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_leaves

from paro_lm.model.spec import ParameterSpec, Unit
from paro_lm.parallel.buffer import FlatLayout, FlatShard, Slot, flat_shard
from paro_lm.parallel.collectives import GridCollectives
from paro_lm.parallel.cost import UnitSize
from paro_lm.parallel.mesh import DATA_AXES, ParallelMesh
from paro_lm.parallel.queue import Handle, make_queue
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.unit_buffer import Dtypes, UnitBuffer

MAX_PENDING_REDUCTIONS = 2
"""Units whose whole-sized gradients may wait for the network at a time; backward waits for older ones."""


class State(enum.Enum):
    RESTING = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


class _UnitRuntime:
    """What the engine knows of a unit while it runs."""

    def __init__(self, unit: Unit, index: int, buffers: list[UnitBuffer], parameters: dict[str, nn.Parameter]) -> None:
        self.name, self.modules, self.index, self.buffers, self.parameters = unit.name, unit.modules, index, buffers, parameters
        self.state = State.RESTING
        self.gather: Handle | None = None
        self.hooked_calls = 0  # forwards whose backward ends with an input gradient
        self.open_calls = 0  # forwards whose inputs need no gradient
        self.trainable = next((buffer for buffer in buffers if buffer.trainable), None)
        self.written: set[str] = set()
        self.ready = False
        self.reduction: Handle | None = None
        self.in_flight: torch.Tensor | None = None
        """What the pending reduction reads; a stream may still use it after the job's closure is gone."""

    @property
    def is_sharded(self) -> bool:
        return any(buffer.cell.param for buffer in self.buffers)

    @property
    def is_unsharded(self) -> bool:
        return all(buffer.unsharded for buffer in self.buffers)


class ShardingEngine:
    """Holds the parameters of `model` in the placements of `cells` and moves them; see the module's text for its use.

    units        disjoint parts of the model in the order in which forward calls them; together they hold every parameter
    cells        one cell, or a function from unit name to cell
    specs        per parameter name its global shape and box; without it parameters are whole on every rank
    value_of     per parameter name its initial box; needed when the model is on the meta device
    overlap      communicate beside computation; off gives bitwise the same numbers
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        mesh: ParallelMesh,
        cells: Cell | Callable[[str], Cell],
        dtypes: Dtypes | None = None,
        gather_collectives: GridCollectives,
        reduce_collectives: GridCollectives,
        specs: Mapping[str, ParameterSpec] | None = None,
        value_of: Callable[[str], torch.Tensor] | None = None,
        overlap: bool = True,
    ) -> None:
        self.model, self.mesh, self.dtypes = model, mesh, dtypes or Dtypes()
        self._cell_of = cells if callable(cells) else lambda name: cells
        self._gather_collectives, self._reduce_collectives = gather_collectives, reduce_collectives
        overlap = overlap and mesh.size(*DATA_AXES) > 1
        self._prefetch = overlap
        self._gathers = make_queue(mesh.device, overlap=overlap, name="paro-gather")
        self._reductions = make_queue(mesh.device, overlap=overlap, name="paro-reduce")
        self._units = self._build_units(units, specs, value_of)
        self._pending: list[_UnitRuntime] = []
        self._micro_batch_is_last: bool | None = None
        self._cursor = len(self._units)
        self._last_forward = -1
        self._held = False
        self._used: dict[str, bool] = {name: False for unit in self._units if unit.trainable for name in _names(unit.trainable)}
        for unit in self._units:
            self._install(unit)

    # ------------------------------------------------------------------ building

    def _build_units(
        self,
        units: Sequence[Unit],
        specs: Mapping[str, ParameterSpec] | None,
        value_of: Callable[[str], torch.Tensor] | None,
    ) -> list[_UnitRuntime]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        homes = _homes(self.model)
        result, owned = [], set()
        for index, unit in enumerate(units):
            parameters = {}
            for module in unit.modules:
                for parameter in module.parameters():
                    if id(parameter) not in owned:
                        parameters[names[id(parameter)]] = parameter
                        owned.add(id(parameter))
            buffers = []
            for trainable in (True, False):
                chosen = {name: p for name, p in parameters.items() if p.requires_grad is trainable}
                if chosen:
                    buffers.append(self._build_buffer(unit.name, chosen, specs, value_of, trainable))
            installed = {name: _replace(homes[id(parameters[name])], view) for b in buffers for name, view in _named_views(b, parameters)}
            for buffer in buffers:
                buffer.free_full()
            result.append(_UnitRuntime(unit, index, buffers, installed))
        left = sorted(name for key, name in names.items() if key not in owned)
        assert not left, f"parameters outside all units: {left}"
        return result

    def _build_buffer(
        self,
        unit: str,
        parameters: dict[str, nn.Parameter],
        specs: Mapping[str, ParameterSpec] | None,
        value_of: Callable[[str], torch.Tensor] | None,
        trainable: bool,
    ) -> UnitBuffer:
        def box(name: str, parameter: nn.Parameter) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
            local = tuple(parameter.shape)
            if specs is None:
                return name, local, (0,) * len(local), local
            return name, specs[name].shape, specs[name].offset, local

        layout = FlatLayout.build([box(name, parameter) for name, parameter in parameters.items()], self.mesh.shape)
        buffer = UnitBuffer(layout, self._cell_of(unit), self.dtypes, self.mesh, trainable=trainable)
        buffer.load(value_of or (lambda name: parameters[name].detach()))
        return buffer

    def _install(self, unit: _UnitRuntime) -> None:
        for position, module in enumerate(unit.modules):
            module.register_forward_pre_hook(self._before_forward(unit, position), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward(unit, position == len(unit.modules) - 1))
        if unit.trainable is not None:
            for slot in unit.trainable.layout.slots:
                unit.parameters[slot.name].register_post_accumulate_grad_hook(self._after_gradient(unit, unit.trainable, slot))

    # ------------------------------------------------------------------ parameters: gather and free

    def _begin_gather(self, unit: _UnitRuntime) -> None:
        if unit.gather is not None or unit.is_unsharded:
            return
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

    def _unshard(self, unit: _UnitRuntime) -> None:
        self._begin_gather(unit)
        if unit.gather is not None:
            unit.gather.wait()
            unit.gather = None

    def _reshard(self, unit: _UnitRuntime) -> None:
        if unit.is_sharded:
            if unit.gather is not None:  # prefetched and not used
                unit.gather.wait()
                unit.gather = None
            for buffer in unit.buffers:
                buffer.free_full()
        unit.state = State.RESTING

    # ------------------------------------------------------------------ forward

    def _before_forward(self, unit: _UnitRuntime, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._held:
                return
            recomputing = unit.state is State.BACKWARD
            if position == 0 and not recomputing:
                self._check_order(unit)
            self._unshard(unit)
            if not recomputing:
                unit.state = State.FORWARD
                if self._prefetch and position == 0 and unit.index + 1 < len(self._units):
                    self._begin_gather(self._units[unit.index + 1])
            if not torch.is_grad_enabled():
                return
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if inputs:
                unit.hooked_calls += 1
                torch.autograd.graph.register_multi_grad_hook(inputs, lambda grads: self._after_backward_call(unit), mode="all")
            else:
                unit.open_calls += 1

        return hook

    def _after_forward(self, unit: _UnitRuntime, is_last_module: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._held:
                return
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if torch.is_grad_enabled():
                if outputs:
                    torch.autograd.graph.register_multi_grad_hook(outputs, lambda grad: self._before_backward(unit), mode="any")
                else:  # no backward will pass here
                    unit.open_calls = max(0, unit.open_calls - 1)
            if is_last_module and unit.state is not State.BACKWARD:
                self._reshard(unit)

        return hook

    def _check_order(self, unit: _UnitRuntime) -> None:
        """Ranks gather in the order of units, so a unit that one of them leaves out would make the others wait for ever."""
        if unit.index > self._last_forward + 1:
            self._refuse_skipped(self._units[self._last_forward + 1 : unit.index])
        self._last_forward = unit.index

    def _refuse_skipped(self, units: Sequence[_UnitRuntime]) -> None:
        skipped = [unit.name for unit in units if unit.is_sharded]
        if skipped:
            raise ValueError(
                f"forward did not use {', '.join(skipped)}, whose parameters are sharded: the other ranks gather them and would wait "
                f"for ever. Use every unit in every forward, or give these units a cell with p = N (parallel.sharding_overrides)."
            )

    # ------------------------------------------------------------------ backward

    def _before_backward(self, unit: _UnitRuntime) -> None:
        unit.state = State.BACKWARD
        self._unshard(unit)
        if self._prefetch and unit.index > 0:
            previous = self._units[unit.index - 1]
            if previous.hooked_calls or previous.open_calls:
                self._begin_gather(previous)

    def _after_backward_call(self, unit: _UnitRuntime) -> None:
        unit.hooked_calls -= 1
        if unit.hooked_calls == 0 and unit.open_calls == 0:
            self._reshard(unit)

    def _after_gradient(self, unit: _UnitRuntime, buffer: UnitBuffer, slot: Slot) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            with torch.no_grad():
                self._take_gradient(unit, buffer, slot, gradient.reshape(-1))
            if len(unit.written) == len(buffer.layout.slots):
                if unit.hooked_calls == 0:
                    unit.open_calls = 0
                    self._reshard(unit)
                self._gradients_ready(unit)

        return hook

    def _take_gradient(self, unit: _UnitRuntime, buffer: UnitBuffer, slot: Slot, gradient: torch.Tensor) -> None:
        assert self._micro_batch_is_last is not None, "backward outside `with engine.micro_batch(last=...)`"
        if buffer.cell.grad:
            target, first = buffer.begin_reduction(), slot.name not in unit.written
        else:
            assert buffer.grad is not None
            target, first = buffer.grad, not self._used[slot.name]
        view = target[slot.start : slot.stop]
        if first:
            view.copy_(gradient)
        else:
            view.add_(gradient)
        unit.written.add(slot.name)
        self._used[slot.name] = True

    def _gradients_ready(self, unit: _UnitRuntime) -> None:
        """Issue reductions from the last unit to the first, whatever the order in which gradients become ready."""
        unit.ready = True
        while self._cursor > 0 and (self._units[self._cursor - 1].ready or self._units[self._cursor - 1].trainable is None):
            self._cursor -= 1
            if self._units[self._cursor].trainable is not None:
                self._reduce(self._units[self._cursor])

    def _reduce(self, unit: _UnitRuntime) -> None:
        buffer, is_last = unit.trainable, self._micro_batch_is_last
        assert buffer is not None and buffer.grad is not None
        written, unit.written = unit.written, set()
        reducing = None
        if buffer.cell.grad:
            reducing = buffer.begin_reduction()
            _zero(reducing, [slot for slot in buffer.layout.slots if slot.name not in written])
            buffer.reducing = None
        elif is_last:
            _zero(buffer.grad, [slot for slot in buffer.layout.slots if not self._used[slot.name]])
        if reducing is None and not is_last:
            return

        def reduce() -> None:
            with record_function(f"paro.reduce({unit.name})"):
                if reducing is not None:
                    buffer.accumulate(self._reduce_collectives, reducing)
                if is_last:
                    buffer.finish(self._reduce_collectives)

        unit.in_flight = reducing
        unit.reduction = self._reductions.submit(reduce)
        self._pending.append(unit)
        while reducing is not None and len(self._pending) > MAX_PENDING_REDUCTIONS:
            self._wait_reduction(self._pending[0])

    def _wait_reduction(self, unit: _UnitRuntime) -> None:
        assert unit.reduction is not None
        unit.reduction.wait()
        unit.reduction = unit.in_flight = None
        self._pending.remove(unit)

    # ------------------------------------------------------------------ the steps of a training step

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around one forward and backward. On the last micro-batch of a step gradients go on to the optimizer's placement."""
        assert self._micro_batch_is_last is None, "micro-batches do not nest"
        self._micro_batch_is_last, self._cursor, self._last_forward = last, len(self._units), -1
        try:
            yield
            if self._last_forward >= 0:
                self._refuse_skipped(self._units[self._last_forward + 1 :])
            for unit in reversed(self._units):
                unit.hooked_calls = unit.open_calls = 0
                self._reshard(unit)
                unit.ready = True
            if self._units and self._cursor > 0:
                self._gradients_ready(self._units[self._cursor - 1])
        finally:
            self._micro_batch_is_last = None
            for unit in self._units:
                unit.ready = False

    def finish_gradients(self) -> None:
        """Wait until every gradient is complete, and agree over the data ranks on which parameters had one."""
        while self._pending:
            self._wait_reduction(self._pending[0])
        for unit in self._units:  # main parameters may be written from here on: nothing may still be reading them
            if unit.gather is not None:
                unit.gather.wait()
                unit.gather = None
        if self._used:
            flags = torch.tensor([float(used) for used in self._used.values()], device=self.mesh.device)
            self._used = dict(zip(self._used, (flag > 0 for flag in self.mesh.max(flags, DATA_AXES).tolist()), strict=True))

    def sync_parameters(self) -> None:
        """Publish updated main parameters and drop the gradients; the next forward waits for its units only."""
        self.drop_gradients()
        for unit in self._units:
            buffer = unit.trainable
            if buffer is not None and buffer.main is not buffer.param:
                handle = self._gathers.submit(self._publish_job(unit.name, buffer))
                if not buffer.cell.param:
                    unit.gather = handle

    def drop_gradients(self) -> None:
        """Forget this step's gradients (alone: the step is skipped)."""
        for buffer in self.trainable_buffers():
            buffer.drop_gradients()
        self._used = dict.fromkeys(self._used, False)

    def _publish_job(self, name: str, buffer: UnitBuffer) -> Callable[[], None]:
        def publish() -> None:
            with record_function(f"paro.publish({name})"):
                buffer.publish(self._gather_collectives)

        return publish

    def wait(self) -> None:
        """Wait for parameters that are on their way; before they are read outside a forward."""
        self._gathers.submit(lambda: None).wait()
        for unit in self._units:
            if unit.gather is not None:
                unit.gather.wait()
                unit.gather = None

    def close(self) -> None:
        """Finish what was submitted and end the queues."""
        self._gathers.close()
        self._reductions.close()

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """The model with all parameters whole, for reading and for forwards without gradients, which then need no other rank.

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

    # ------------------------------------------------------------------ what others read

    def trainable_buffers(self) -> list[UnitBuffer]:
        """Buffers of trainable parameters, in the order of units."""
        return [unit.trainable for unit in self._units if unit.trainable is not None]

    def used(self, name: str) -> bool:
        """Whether any data rank had a gradient for this parameter in this step (after finish_gradients)."""
        return self._used[name]

    def trainable_names(self) -> list[str]:
        return list(self._used)

    def parameter_shards(self) -> dict[str, FlatShard]:
        """What a checkpoint holds of the parameters: main parameters of trainable ones, parameters of frozen ones."""
        result = {}
        for unit in self._units:
            for buffer in unit.buffers:
                placement = buffer.cell.main if buffer.main is not None else buffer.cell.param
                shard = buffer.main if buffer.main is not None else buffer.param
                for segment in buffer.segments(placement):
                    result[segment.slot.name] = flat_shard(segment, shard)
        return result

    def unit_sizes(self) -> list[UnitSize]:
        """Padded elements of every unit with its cell, what the formulas of `parallel.cost` take."""
        result = []
        for unit in self._units:
            frozen = sum(buffer.layout.numel for buffer in unit.buffers if not buffer.trainable)
            trainable = unit.trainable.layout.numel if unit.trainable else 0
            result.append(UnitSize(cell=self._cell_of(unit.name), trainable=trainable, frozen=frozen))
        return result

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's resting parameters, gradients and main parameters; `shared` of them are counted in param and in main."""
        result = {"param": 0, "grad": 0, "main": 0, "shared": 0}
        for unit in self._units:
            for buffer in unit.buffers:
                result["param"] += buffer.param.nbytes
                result["grad"] += buffer.grad.nbytes if buffer.grad is not None else 0
                if buffer.main is not None:
                    result["main"] += buffer.main.nbytes
                    result["shared"] += buffer.main.nbytes if buffer.main is buffer.param else 0
        return result


def _names(buffer: UnitBuffer) -> list[str]:
    return [slot.name for slot in buffer.layout.slots]


def _homes(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Per parameter (by identity) every module attribute that holds it; tied parameters have several."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, attribute))
    return homes


def _named_views(buffer: UnitBuffer, parameters: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    buffer.allocate_full()
    names = _names(buffer)
    return [(name, nn.Parameter(view, requires_grad=buffer.trainable)) for name, view in zip(names, buffer.views(), strict=True)]


def _replace(homes: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> nn.Parameter:
    for module, attribute in homes:
        setattr(module, attribute, parameter)
    return parameter


def _zero(buffer: torch.Tensor, slots: list[Slot]) -> None:
    for slot in slots:
        buffer[slot.start : slot.stop].zero_()
