"""Memory, bytes on the wire and time of a cell, as pure functions of sizes; nothing here communicates.

What a cell does in one step is derived once, in `operations`, from the transitions of `sharding.py`. It is then counted two ways:
`engine` (bytes that every rank sends, per axis, with padded sizes and real dtypes: what the byte ledger of a run must equal) and
`paper` (seconds, with the simplifications of PaRO's guideline: flat rings for global collectives, no latency).
Words: n data ranks, m of them in a group, g = n / m groups; Psi parameters, Psi' of them trainable; s micro-batches per step.
Source: PaRO, arXiv 2310.06003, sections 3 and 4, tables reconstructed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from paro_lm.parallel.axes import DATA_AXES, MeshShape
from paro_lm.parallel.sharding import Cell, Placement, Step, accumulate_steps, finish_steps, publish_steps, unshard_steps

NOWHERE: Placement = frozenset()


# ---------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Bytes per rank of resting state. `shared` is what `param` and `main` both count because they are one buffer."""

    param: float
    grad: float
    main: float
    shared: float = 0

    @property
    def total(self) -> float:
        """Bytes that are really held."""
        return self.param + self.grad + self.main - self.shared

    def __add__(self, other: MemoryBytes) -> MemoryBytes:
        return MemoryBytes(
            param=self.param + other.param, grad=self.grad + other.grad, main=self.main + other.main, shared=self.shared + other.shared
        )


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """Bytes per element of each kind of buffer; the default is bf16 with fp32 accumulation. Moments have the size of main."""

    param: int = 2
    grad: int = 4
    reduce: int = 4
    main: int = 4


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """One unit as a rank sees it: padded elements of its trainable and its frozen buffer (this rank's tp box, all data shards).

    `gathers` counts how often a micro-batch needs the whole parameters: forward and backward, 1 where no backward passes through
    (a frozen prefix), more where recomputation gathers on its own.
    """

    cell: Cell
    trainable: int
    frozen: int = 0
    gathers: int = 2


def ideal_memory(
    cell: Cell,
    *,
    num_params: float,
    num_trainable: float | None = None,
    shape: MeshShape,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    main_bytes: float = 12,
) -> MemoryBytes:
    """The formula of the paper: 2 Psi / d(p) + 2 Psi' / d(g) + 12 Psi' / d(os), with d(N) = 1, d(I) = m, d(G) = n."""
    num_trainable = num_params if num_trainable is None else num_trainable
    return MemoryBytes(
        param=param_bytes * num_params / shape.size(*cell.param),
        grad=grad_bytes * num_trainable / shape.size(*cell.grad),
        main=main_bytes * num_trainable / shape.size(*cell.main),
    )


def unit_memory(unit: UnitSize, shape: MeshShape, element: ElementBytes, *, num_moments: int = 2) -> MemoryBytes:
    """Exact bytes of one unit's buffers: main parameters with their moments, padding included.

    Where main and parameters have one element size and one placement (over the axes that have more than one rank) they are one
    buffer, counted in both `param` and `main` and once in `total`; equal sizes must mean equal dtypes.
    """
    param = element.param * (unit.trainable + unit.frozen) // shape.size(*unit.cell.param)
    main = element.main * unit.trainable // shape.size(*unit.cell.main)
    grad = element.grad * unit.trainable // shape.size(*unit.cell.grad)
    same_placement = _live(unit.cell.main, shape) == _live(unit.cell.param, shape)
    shared = main if element.main == element.param and same_placement else 0
    return MemoryBytes(param=param, grad=grad, main=main * (1 + num_moments), shared=shared)


def memory(units: Iterable[UnitSize], shape: MeshShape, element: ElementBytes) -> MemoryBytes:
    """Exact bytes per rank of all units; units may have different cells."""
    return sum((unit_memory(unit, shape, element) for unit in units), MemoryBytes(param=0, grad=0, main=0))


def _live(placement: Placement, shape: MeshShape) -> Placement:
    return frozenset(axis for axis in placement if shape.size(axis) > 1)


# ------------------------------------------------------------------------------------------------- operations of one step


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective that a unit issues `count` times per step.

    phase: "param" (whole parameters for forward and backward), "gradient" (reduction of each micro-batch), "sync_g" (g -> os),
    "sync_p" (os -> p). `within` are the axes that shard both its input and output: it runs on 1 / size(within) of the unit.
    """

    phase: str
    operation: str
    axes: tuple[str, ...]
    within: Placement
    count: int


def operations(cell: Cell, *, accumulation: int, gathers: int = 2) -> tuple[Operation, ...]:
    """Every collective of one step of a unit with this cell, with `accumulation` micro-batches."""
    return (
        *_walk("param", cell.param, unshard_steps(cell), accumulation * gathers),
        *_walk("gradient", NOWHERE, accumulate_steps(cell), accumulation),
        *_walk("sync_g", cell.grad, finish_steps(cell), 1),
        *_walk("sync_p", cell.main, publish_steps(cell), 1),
    )


def _walk(phase: str, at: Placement, steps: Iterable[Step], count: int) -> list[Operation]:
    result = []
    for step in steps:
        after = {"all_gather": at - set(step.axes), "all_reduce": at}.get(step.operation, at | set(step.axes))
        if step.operation != "slice":
            result.append(Operation(phase=phase, operation=step.operation, axes=step.axes, within=at & after, count=count))
        at = after
    return result


# ------------------------------------------------------------------------------------------------------ bytes, `engine`

Algorithm = str | Callable[[str, tuple[str, ...], int], str]
"""hierarchical | ho_ring | ring | gloo, or a function (operation, axes, bytes of the whole) -> one of these."""


def wire_algorithm(collectives: str, *, gloo: bool, auto_bytes: Mapping[str, int]) -> Algorithm:
    """What `parallel.collectives` sends like on Gloo or on NCCL; `auto_bytes` is the smallest message, per operation, that auto
    gives to HO-Ring on Gloo. NCCL's own collectives send as a ring does, and auto stays with them.
    """
    native = "gloo" if gloo else "ring"
    if collectives == "auto" and gloo:
        return lambda operation, axes, num_bytes: "ho_ring" if num_bytes >= auto_bytes[operation] else native
    return native if collectives in ("native", "auto") else collectives


def bytes_sent(
    operation: str, axes: Iterable[str], num_bytes: int, shape: MeshShape, *, algorithm: str, last_of_group: bool = False
) -> dict[str, int]:
    """Bytes that one rank sends in one collective, per axis of the link they cross.

    `num_bytes` is the whole: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce; divisible by the
    number of ranks. hierarchical and ho_ring send (m-1)/m V inside the group and (g-1)/g V/m between groups, all-reduce twice that.
    ring: one ring of all ranks in rank order; its next rank is in another group only for the last rank of a group
    (`last_of_group`). gloo: the ring, with a reduce-scatter that sends as much as an all-reduce, as Gloo implements it.
    """
    live = [axis for axis in DATA_AXES if axis in axes and shape.size(axis) > 1]
    ranks = shape.size(*live)
    assert num_bytes % ranks == 0, f"{num_bytes} bytes over {ranks} ranks"
    passes = 2 if operation == "all_reduce" or (algorithm == "gloo" and operation == "reduce_scatter") else 1
    if len(live) == 2 and algorithm in ("ring", "gloo"):
        return {"dp_inter" if last_of_group else "dp_intra": passes * (ranks - 1) * (num_bytes // ranks)}
    assert algorithm in ("ring", "gloo", "hierarchical", "ho_ring"), algorithm
    result = {}
    for axis in live:
        extent = num_bytes // shape.dp_intra if len(live) == 2 and axis == "dp_inter" else num_bytes
        result[axis] = passes * (extent - extent // shape.size(axis))
    return result


def step_bytes(
    units: Iterable[UnitSize],
    shape: MeshShape,
    element: ElementBytes,
    *,
    accumulation: int,
    algorithm: Algorithm = "ho_ring",
    last_of_group: bool = False,
) -> dict[str, int]:
    """Bytes that one rank sends in one training step, per data axis (0 where nothing crosses it): what the byte ledger must show.

    Parameters travel in their dtype, trainable and frozen buffers as collectives of their own; gradients in the reduce dtype.
    """
    total: Counter[str] = Counter(dict.fromkeys(DATA_AXES, 0))
    for unit in units:
        for op in operations(unit.cell, accumulation=accumulation, gathers=unit.gathers):
            for numel in (unit.trainable, unit.frozen if op.phase == "param" else 0):
                width = element.reduce if op.phase in ("gradient", "sync_g") else element.param
                whole = numel * width // shape.size(*op.within)
                name = algorithm if isinstance(algorithm, str) else algorithm(op.operation, op.axes, whole)
                sent = bytes_sent(op.operation, op.axes, whole, shape, algorithm=name, last_of_group=last_of_group)
                total.update({axis: op.count * value for axis, value in sent.items()})
    return dict(total)


# ------------------------------------------------------------------------------------------------------- time, `paper`


@dataclass(frozen=True, kw_only=True)
class CommunicationTime:
    """Seconds of communication: `param` and `gradient` per micro-batch, `sync_g` and `sync_p` per step."""

    param: float
    gradient: float
    sync_g: float
    sync_p: float
    accumulation: int

    @property
    def total(self) -> float:
        """Seconds per step: s (param + gradient) + sync_g + sync_p."""
        return self.accumulation * (self.param + self.gradient) + self.sync_g + self.sync_p


@dataclass(frozen=True, kw_only=True)
class PaperCluster:
    """Ranks and links of the paper's guideline: bandwidths in bits per second, between groups and inside one."""

    shape: MeshShape
    inter_bandwidth: float = 80e9
    intra_bandwidth: float = 2000e9

    def seconds(self, operation: str, axes: Iterable[str], num_bits: float) -> float:
        """Time of one collective whose whole has `num_bits`: a flat ring over the axes at the bandwidth of the slowest link."""
        live = [axis for axis in axes if self.shape.size(axis) > 1]
        bandwidth = self.inter_bandwidth if "dp_inter" in live else self.intra_bandwidth
        share = 1 - Fraction(1, self.shape.size(*live))
        return (2 if operation == "all_reduce" else 1) * float(share) * num_bits / bandwidth


def paper_time(
    cell: Cell, cluster: PaperCluster, *, num_params: float, num_trainable: float | None = None, accumulation: int, gathers: int = 2
) -> CommunicationTime:
    """Communication of one step by the paper's guideline, 16 bits per element; defined for all 27 cells."""
    num_trainable = num_params if num_trainable is None else num_trainable
    seconds: dict[str, float] = {"param": 0.0, "gradient": 0.0, "sync_g": 0.0, "sync_p": 0.0}
    for op in operations(cell, accumulation=1, gathers=gathers):
        num_bits = 16 * (num_params if op.phase == "param" else num_trainable) / cluster.shape.size(*op.within)
        seconds[op.phase] += op.count * cluster.seconds(op.operation, op.axes, num_bits)
    return CommunicationTime(**seconds, accumulation=accumulation)


def paper_time_hpz(
    cluster: PaperCluster, *, num_params: float, num_trainable: float | None = None, accumulation: int, gathers: int = 2
) -> CommunicationTime:
    """ZeRO++ hpZ, which is no cell: GGG with a second copy inside the group, so only the first gather of a micro-batch is global."""
    whole, part = 16 * num_params, 16 * (num_params if num_trainable is None else num_trainable)
    return CommunicationTime(
        param=cluster.seconds("all_gather", DATA_AXES, whole) + (gathers - 1) * cluster.seconds("all_gather", ("dp_intra",), whole),
        gradient=cluster.seconds("reduce_scatter", DATA_AXES, part),
        sync_g=0.0,
        sync_p=0.0,
        accumulation=accumulation,
    )
