"""Units as the engine runs them: their buffers, which forwards wait for a backward, and the pipeline stage they belong to."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paro_lm.model.spec import ParameterSpec, Unit
from paro_lm.parallel.buffer import FlatLayout, Slot
from paro_lm.parallel.cost import UnitSize
from paro_lm.parallel.mesh import ParallelMesh
from paro_lm.parallel.queue import Handle
from paro_lm.parallel.sharding import Cell
from paro_lm.parallel.unit_buffer import Dtypes, UnitBuffer


class State(enum.Enum):
    RESTING = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass
class Calls:
    """Forwards of a unit in one micro-batch whose backward is to come: `hooked` end with an input gradient, `open` do not."""

    hooked: int = 0
    open: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __bool__(self) -> bool:
        return self.hooked + self.open > 0


def when_all_have_gradients(tensors: Sequence[torch.Tensor], done: Callable[[], None]) -> RemovableHandle:
    """Call `done` when the gradients of all these tensors are known."""
    if len(tensors) == 1:  # works for leaves under autograd.grad too, which split backwards use
        return tensors[0].register_hook(lambda grad: done())
    return torch.autograd.graph.register_multi_grad_hook(tensors, lambda grads: done(), mode="all")


@dataclass(kw_only=True)
class Reduction:
    """Gradients of a unit on their way; `reading` is kept until the job is over, which may be later than its closure."""

    handle: Handle
    reading: list[torch.Tensor]


@dataclass(kw_only=True, eq=False)
class RuntimeUnit:
    """One unit: its modules in the order of their calls, its parameters by name, its buffers, and what is under way."""

    name: str
    modules: tuple[nn.Module, ...]
    cell: Cell
    stage: Stage
    position: int
    buffers: list[UnitBuffer]
    parameters: dict[str, nn.Parameter]
    state: State = State.RESTING
    gather: Handle | None = None
    unpublished: list[UnitBuffer] = field(default_factory=list)
    """Buffers whose updated main parameters have yet to be published."""
    calls: dict[int | None, Calls] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    """Parameters with a gradient in the running backward."""
    ready: bool = False
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        self.hold(self.buffers, self.parameters)

    def hold(self, buffers: list[UnitBuffer], parameters: dict[str, nn.Parameter]) -> None:
        """Use these buffers and the parameters that are views of them."""
        self.buffers, self.parameters = buffers, parameters
        self.trainable = [buffer for buffer in buffers if buffer.trainable]
        self.num_trainable = sum(len(buffer.layout.slots) for buffer in self.trainable)
        self.is_sharded = any(buffer.cell.param for buffer in buffers)

    @property
    def is_unsharded(self) -> bool:
        return all(buffer.unsharded for buffer in self.buffers)

    @torch.no_grad()
    def take_gradient(self, buffer: UnitBuffer, slot: Slot, gradient: torch.Tensor) -> None:
        """Add a gradient to what this micro-batch reduces, or to whole gradients directly."""
        assert self.stage.is_last_backward is not None, "backward outside `with engine.micro_batch(last=...)`"
        assert buffer.grad is not None
        if self.position >= self.stage.cursor:
            raise ValueError(
                f"a second backward gave {slot.name} a gradient after the first one's were on their way; "
                "enter `with engine.micro_batch(last=...)` anew for every backward."
            )
        if buffer.cell.grad:
            target, first = buffer.begin_reduction(), slot.name not in self.written
        else:
            target, first = buffer.grad, slot.name not in buffer.written
        view = target[slot.start : slot.stop]
        if first:
            view.copy_(gradient.reshape(-1))
        else:
            view.add_(gradient.reshape(-1))
        self.written.add(slot.name)
        buffer.written.add(slot.name)

    def size(self) -> UnitSize:
        numel = {trainable: sum(b.layout.numel for b in self.buffers if b.trainable is trainable) for trainable in (True, False)}
        return UnitSize(cell=self.cell, trainable=numel[True], frozen=numel[False])


@dataclass(kw_only=True, eq=False)
class Stage:
    """Units that one forward runs through, in order, and the passes that are under way. Without pipelines there is one."""

    units: list[RuntimeUnit] = field(default_factory=list)
    in_forward: bool = False
    """Whether a forward of a training step runs; others (evaluation) begin with the first unit."""
    forward_of: int | None = None
    """Micro-batch of the running forward."""
    furthest: int = -1
    """Last position up to which the running forward has called units."""
    backward_of: int | None = None
    is_last_backward: bool | None = None
    """Whether the running backward is the step's last of this stage; None outside of a backward."""
    cursor: int = 0
    """Units from this position on have had their reduction issued in the running backward."""

    def begin_forward(self, micro_batch: int | None) -> None:
        self.in_forward, self.forward_of, self.furthest = True, micro_batch, -1

    def end_forward(self) -> None:
        self.check_complete()
        self.in_forward = False

    def enter(self, unit: RuntimeUnit) -> None:
        """Forward calls a unit. Raises ValueError when sharded ones before it were left out."""
        if unit.position == 0 and not self.in_forward:
            self.furthest = -1
        if unit.position > self.furthest + 1:
            _refuse_skipped(self.units[self.furthest + 1 : unit.position])
        self.furthest = max(self.furthest, unit.position)

    def check_complete(self) -> None:
        """The running forward is over. Raises ValueError when it left out sharded units at the end."""
        if self.in_forward and self.furthest >= 0:
            _refuse_skipped(self.units[self.furthest + 1 :])


def _refuse_skipped(units: Sequence[RuntimeUnit]) -> None:
    # Ranks gather in the order of units: one that a rank leaves out would make the others wait for ever.
    skipped = [unit.name for unit in units if unit.is_sharded]
    if skipped:
        raise ValueError(
            f"forward did not use {', '.join(skipped)}, whose parameters are sharded: the other ranks gather them and would wait "
            f"for ever. Use every unit in every forward, or give these units a cell with p = N (parallel.sharding_overrides)."
        )


@dataclass(frozen=True, kw_only=True)
class UnitBuilder:
    """Puts parameters of the model into flat buffers and replaces them by views.

    A unit has one buffer for trainable, one for frozen, and one for `shared` parameters (those that another stage holds too, whose
    layout must not depend on what else the unit holds).
    """

    model: nn.Module
    cell_of: Callable[[str], Cell]
    dtypes: Dtypes
    mesh: ParallelMesh
    specs: Mapping[str, ParameterSpec] | None = None
    shared: frozenset[str] = frozenset()

    def build(self, units: Sequence[Unit] | Sequence[Sequence[Unit]], value_of: Callable[[str], torch.Tensor] | None) -> list[Stage]:
        """Units of one stage or of several, with their first values: from `value_of(name)`, or those that the parameters have.

        A parameter belongs to the first unit that lists it.
        """
        alone = [unit for unit in units if isinstance(unit, Unit)]
        stages = [alone] if alone else [list(stage) for stage in units if not isinstance(stage, Unit)]
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        owned: set[int] = set()
        result = []
        for members in stages:
            stage = Stage()
            for position, unit in enumerate(members):
                parameters = {names[id(p)]: p for p in unit.parameters() if id(p) not in owned}
                owned.update(map(id, parameters.values()))
                buffers, installed = self._install(unit.name, parameters, value_of)
                stage.units.append(
                    RuntimeUnit(
                        name=unit.name,
                        modules=unit.modules,
                        cell=self.cell_of(unit.name),
                        stage=stage,
                        position=position,
                        buffers=buffers,
                        parameters=installed,
                    )
                )
            result.append(stage)
        left = sorted(name for key, name in names.items() if key not in owned)
        assert not left, f"parameters outside all units: {left}"
        return result

    def rebuild(self, unit: RuntimeUnit, trainable: Callable[[str], bool], values: Mapping[str, torch.Tensor]) -> None:
        """Give a unit new buffers with these values, where `trainable(name)` says which parameters get gradients."""
        for name, parameter in unit.parameters.items():
            parameter.requires_grad_(trainable(name))
        unit.hold(*self._install(unit.name, unit.parameters, values.__getitem__))

    def _install(
        self, unit: str, parameters: dict[str, nn.Parameter], value_of: Callable[[str], torch.Tensor] | None
    ) -> tuple[list[UnitBuffer], dict[str, nn.Parameter]]:
        homes = _homes(self.model)
        buffers, installed = [], {}
        for chosen in _split(parameters, self.shared):
            layout = FlatLayout.build([_box(name, p, self.specs) for name, p in chosen.items()], self.mesh.shape)
            trainable = next(iter(chosen.values())).requires_grad
            buffer = UnitBuffer(layout, self.cell_of(unit), self.dtypes, self.mesh, trainable=trainable)
            buffer.load(value_of or (lambda name, parameters=chosen: parameters[name].detach()))  # type: ignore[misc]
            buffer.allocate_full()
            for name, view in zip(chosen, buffer.views(), strict=True):
                installed[name] = _replace(homes[id(chosen[name])], nn.Parameter(view, requires_grad=trainable))
            buffer.free_full()
            buffers.append(buffer)
        return buffers, {name: installed[name] for name in parameters}


def _split(parameters: dict[str, nn.Parameter], shared: frozenset[str]) -> list[dict[str, nn.Parameter]]:
    kinds: dict[tuple[bool, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((not parameter.requires_grad, name in shared), {})[name] = parameter
    return [kinds[kind] for kind in sorted(kinds)]


def _box(
    name: str, parameter: nn.Parameter, specs: Mapping[str, ParameterSpec] | None
) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    local = tuple(parameter.shape)
    if specs is None:
        return name, local, (0,) * len(local), local
    return name, specs[name].shape, specs[name].offset, local


def _homes(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Per parameter (by identity) every module attribute that holds it; tied parameters have several."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, attribute))
    return homes


def _replace(homes: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> nn.Parameter:
    for module, attribute in homes:
        setattr(module, attribute, parameter)
    return parameter
