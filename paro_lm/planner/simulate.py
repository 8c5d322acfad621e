"""Event simulation of one global step as the engine runs it, and of ring collectives message by message.

It shares durations with the closed formulas and nothing else: queues, prefetching, waiting and the sharing of links happen event by
event, so that it checks `timing` and `links`, and draws a timeline. All data ranks do the same at the same time, so a step is that of
one rank; a collective is simulated on all ranks.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paro_lm.parallel.axes import DATA_AXES
from paro_lm.parallel.sharding import Cell
from paro_lm.planner.links import Busy, Links
from paro_lm.planner.memory import PENDING_REDUCTIONS
from paro_lm.planner.timing import StageCosts, UnitCosts, UnitWork

STREAMS = ("compute", "gather", "reduce")


@dataclass(frozen=True)
class Event:
    """Something that one stream did: seconds from the start of the step."""

    name: str
    stream: str
    start: float
    end: float


@dataclass
class _Job:
    name: str
    busy: Busy
    remaining: float
    started: float | None = None
    done: bool = False


@dataclass(frozen=True)
class _Run:
    """The compute stream works for this long; with `alone` nothing slows it down (it communicates itself)."""

    name: str
    seconds: float
    alone: bool = False


Program = Generator["_Run | _Job", None, None]


@dataclass
class _Step:
    """The compute stream's program, its two queues, and the clock."""

    overlap: float
    now: float = 0.0
    queues: dict[str, deque[_Job]] = field(default_factory=lambda: {"gather": deque(), "reduce": deque()})
    events: list[Event] = field(default_factory=list)

    def submit(self, queue: str, name: str, busy: Busy) -> _Job:
        job = _Job(name, busy, busy.seconds)
        if busy.seconds:
            self.queues[queue].append(job)
        else:
            job.done = True
        return job

    def run(self, program: Program) -> float:
        """Seconds until the program ends; what is still queued then belongs to the next step."""
        for item in program:
            if isinstance(item, _Job):
                while not item.done:
                    self._advance(None)
                continue
            start, left = self.now, item.seconds
            while left > 1e-12:
                left -= self._advance(left, alone=item.alone)
            if item.seconds:
                self.events.append(Event(item.name, "compute", start, self.now))
        return self.now

    def _advance(self, computing: float | None, *, alone: bool = False) -> float:
        """To the next end of anything; the seconds of computation done until then."""
        active = {name: queue[0] for name, queue in self.queues.items() if queue}
        assert active or computing is not None, "the program waits for nothing"
        # Side by side, computation and communication both run at 1 / (2 - overlap): equal ones then take 2 - overlap together.
        slowed = 1.0 if computing is None or not active or alone else 1 / (2 - self.overlap)
        speed = slowed / _contention(list(active.values()))
        ends = [job.remaining / speed for job in active.values()]
        if computing is not None:
            ends.append(computing / slowed)
        step = min(ends)
        for name, job in active.items():
            job.started = self.now if job.started is None else job.started
            job.remaining -= step * speed
            if job.remaining <= 1e-12:
                job.done = True
                self.queues[name].popleft()
                self.events.append(Event(job.name, name, job.started, self.now + step))
        self.now += step
        return step * slowed if computing is not None else 0.0


def _contention(jobs: Sequence[_Job]) -> float:
    """How much jobs that run at once slow each other down: the load of the fuller of their links, at least 1."""
    loads = [sum(getattr(job.busy, link) / job.busy.seconds for job in jobs) for link in ("inter", "intra")]
    return max(1.0, *loads)


def simulate_step(
    units: Sequence[UnitWork], cells: Sequence[Cell], costs: StageCosts, *, accumulation: int, optimizer: float = 0.0
) -> tuple[float, list[Event]]:
    """(seconds, events) of a step in steady state: it begins with the updated parameters of the step before on their way.

    Without pipeline stages. Control messages are not simulated.
    """
    flat = [
        (f"{unit.name}+{i}" if unit.count > 1 else unit.name, unit, costs.of(unit, cell))
        for unit, cell in zip(units, cells, strict=True)
        for i in range(unit.count)
    ]
    step = _Step(overlap=costs.links.cluster.overlap)
    seconds = step.run(_program(step, flat, accumulation, optimizer))
    return seconds, sorted(step.events, key=lambda event: (event.start, event.stream))


def _program(step: _Step, units: Sequence[tuple[str, UnitWork, UnitCosts]], accumulation: int, optimizer: float) -> Program:
    """What the engine does, unit by unit (see `parallel.engine`)."""
    published = [step.submit("gather", f"publish {name}", cost.sync_p) for name, _, cost in units]
    pending: deque[_Job] = deque()
    for micro_batch in range(accumulation):
        gathered: dict[int, _Job] = {}

        def gather(index: int, gathered: dict[int, _Job] = gathered) -> _Job:
            if index not in gathered:
                name, _, cost = units[index]
                gathered[index] = step.submit("gather", f"gather {name}", cost.gather)
            return gathered[index]

        for index, (name, unit, _) in enumerate(units):
            if micro_batch == 0:
                yield published[index]
            yield gather(index)
            if index + 1 < len(units):
                gather(index + 1)
            yield _Run(f"forward {name}", unit.forward)
            yield _Run(f"tp {name}", unit.tp_forward, alone=True)
        gathered.clear()
        last = micro_batch == accumulation - 1
        for index in range(len(units) - 1, -1, -1):
            name, unit, cost = units[index]
            if unit.gathers < 2:
                break
            yield gather(index)
            if index and units[index - 1][1].gathers > 1:
                gather(index - 1)
            yield _Run(f"backward {name}", unit.backward)
            yield _Run(f"tp {name}", unit.tp_backward, alone=True)
            pending.append(step.submit("reduce", f"reduce {name}", cost.gradient + cost.sync_g if last else cost.gradient))
            while len(pending) > PENDING_REDUCTIONS:
                yield pending.popleft()
    yield from pending
    yield _Run("optimizer", optimizer, alone=True)


# ------------------------------------------------------------------------------------------------- rings, message by message


@dataclass(frozen=True)
class _Message:
    """Bytes over one link (a resource that sends one message at a time), after the messages it depends on have arrived."""

    link: tuple[object, ...]
    after: tuple[object, ...]


def simulate_all_gather(links: Links, algorithm: str, num_bytes: float, *, pieces: int = 16) -> float:
    """Seconds of an all-gather over both data axes, as a flat `ring` or as `ho_ring`; the whole has `num_bytes`.

    Every rank owns 1/n of it, cut into `pieces`. A link sends at the rate that `Links.flow` gives to its communicator.
    """
    assert algorithm in ("ring", "ho_ring"), algorithm
    schedule = _flat_ring(links, pieces) if algorithm == "ring" else _ho_ring(links, pieces)
    size = num_bytes / links.shape.dp / pieces
    return _deliver(links, schedule, size)


def _flat_ring(links: Links, pieces: int) -> dict[object, _Message]:
    ranks = links.shape.dp
    return {
        (rank, step, p): _Message(("flat", rank), (((rank - 1) % ranks, step - 1, p),) if step else ())
        for step in range(ranks - 1)
        for p in range(pieces)
        for rank in range(ranks)
    }


def _ho_ring(links: Links, pieces: int) -> dict[object, _Message]:
    """Outer ring of every rail; the inner ring passes on in round k what the group received in outer step k."""
    g, m = links.shape.dp_inter, links.shape.dp_intra
    schedule: dict[object, _Message] = {}
    for k in range(g):
        for p in range(pieces):
            for i in range(g):
                for j in range(m):
                    arrived = (("outer", (i - 1) % g, j, k - 1, p),) if k else ()
                    if k < g - 1:
                        schedule["outer", i, j, k, p] = _Message(("outer", i, j), arrived)
                    for q in range(m - 1):
                        before = (("inner", i, (j - 1) % m, k, q - 1, p),) if q else arrived
                        schedule["inner", i, j, k, q, p] = _Message(("inner", i, j), before)
    return schedule


def _deliver(links: Links, schedule: dict[object, _Message], size: float) -> float:
    """Time until the last message arrives; a link takes messages in the order in which they become ready."""
    flows = {"flat": links.flow(DATA_AXES), "outer": links.flow(("dp_inter",)), "inner": links.flow(("dp_intra",))}
    waiting: dict[object, int] = {key: len(message.after) for key, message in schedule.items()}
    followers: dict[object, list[object]] = {}
    for key, message in schedule.items():
        for before in message.after:
            followers.setdefault(before, []).append(key)
    free: dict[tuple[object, ...], float] = {}
    order = {key: index for index, key in enumerate(schedule)}
    ready = [(0.0, order[key], key) for key, count in waiting.items() if not count]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        now, _, key = heapq.heappop(ready)
        link = schedule[key].link
        flow = flows[str(link[0])]
        free[link] = max(now, free.get(link, 0.0)) + size / flow.bandwidth
        arrival = free[link] + flow.latency
        last = max(last, arrival)
        for follower in followers.get(key, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (arrival, order[follower], follower))
    return last


# ------------------------------------------------------------------------------------------------------------------- output


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Chrome trace JSON (chrome://tracing, Perfetto): one row per stream, microseconds."""
    rows = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}} for tid, name in enumerate(STREAMS)]
    spans = [
        {
            "name": e.name,
            "cat": e.stream,
            "ph": "X",
            "pid": 0,
            "tid": STREAMS.index(e.stream),
            "ts": e.start * 1e6,
            "dur": (e.end - e.start) * 1e6,
        }
        for e in events
    ]
    path.write_text(json.dumps({"traceEvents": [*rows, *spans], "displayTimeUnit": "ms"}), encoding="utf-8")


def plot_timeline(events: Sequence[Event], path: Path, *, title: str) -> None:
    """The three streams of a step as bars, coloured by what they do."""
    from matplotlib.figure import Figure

    kinds = ("forward", "backward", "tp", "optimizer", "gather", "reduce", "publish")
    figure = Figure(figsize=(14, 3), layout="constrained")
    axes = figure.add_subplot()
    for kind, color in zip(kinds, ("tab:blue", "tab:cyan", "tab:purple", "black", "tab:orange", "tab:red", "tab:green"), strict=True):
        for row, stream in enumerate(STREAMS):
            spans = [(e.start, e.end - e.start) for e in events if e.stream == stream and e.name.split()[0] == kind]
            if spans:
                axes.broken_barh(spans, (len(STREAMS) - 1 - row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.1, label=kind)
    axes.set_yticks(range(len(STREAMS)), list(reversed(STREAMS)))
    axes.set(xlabel="seconds", title=title)
    axes.legend(fontsize=7, ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, dpi=130)
