"""Which layers each pipeline stage holds, and which stages each rank holds. Pure functions of numbers, without torch."""

from __future__ import annotations

from collections.abc import Sequence

ONE_STAGE = ("gpipe", "1f1b")
LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")
V_SHAPED = ("zbv",)
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv")
SCHEDULES = ONE_STAGE + LOOPED + V_SHAPED


def stages_of_rank(schedule: str, pp: int, virtual_stages: int, rank: int) -> list[int]:
    """Global stage indices of one pipeline rank: one, every pp-th (looped), or one from each end (zbv)."""
    if schedule in ONE_STAGE:
        return [rank]
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + chunk * pp for chunk in range(virtual_stages)]


def num_stages(schedule: str, pp: int, virtual_stages: int) -> int:
    """Stages of the whole pipeline."""
    return pp * (1 if schedule in ONE_STAGE else 2 if schedule in V_SHAPED else virtual_stages)


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Contiguous layers per stage, none lost, earlier stages one more where they do not divide: 30 over 4 = 8, 8, 7, 7."""
    base, extra = divmod(num_layers, stages)
    return _ranges([base + (stage < extra) for stage in range(stages)])


def split_by_cost(costs: Sequence[float], stages: int, *, first: float, last: float) -> list[range]:
    """Contiguous layers per stage, at least one each, so that the costliest stage is as cheap as can be.

    `first` and `last` are costs of the embedding and the head, on top of the first and last stage. Exact, by dynamic programming;
    among equals the earlier stages hold more.
    """
    layers = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        return prefix[stop] - prefix[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[stop] = (worst stage so far, sizes) over the first `stage + 1` stages that hold layers [0, stop)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = [
                (max(worst, cost_of(stage, start, stop)), [*sizes, stop - start]) for start, (worst, sizes) in best.items() if start < stop
            ]
            following[stop] = min(options, key=lambda option: (option[0], [-size for size in option[1]]))
        best = following
    return _ranges(best[layers][1])


def _ranges(sizes: Sequence[int]) -> list[range]:
    result, start = [], 0
    for size in sizes:
        result.append(range(start, start + size))
        start += size
    return result


def layout_problems(
    *, schedule: str, pp: int, virtual_stages: int, num_layers: int, num_micro_batches: int | None, layers_per_stage: Sequence[int] = ()
) -> list[str]:
    """What is wrong with a pipeline, each with its remedy; `num_micro_batches` None = not known because the batch does not divide."""
    if pp == 1:
        return [
            f"{name}={value} needs parallel.pp > 1"
            for name, value in (
                ("parallel.virtual_stages", virtual_stages if virtual_stages > 1 else None),
                ("parallel.layers_per_stage", list(layers_per_stage) or None),
            )
            if value is not None
        ]
    problems = []
    stages = num_stages(schedule, pp, virtual_stages)
    if schedule in ONE_STAGE and virtual_stages != 1:
        problems.append(
            f"parallel.virtual_stages={virtual_stages}: schedule {schedule} has one stage per rank; use 1, or one of {', '.join(LOOPED)}"
        )
    if schedule in LOOPED and virtual_stages < 2:
        problems.append(f"parallel.schedule={schedule} needs parallel.virtual_stages >= 2, got {virtual_stages}; use 2, or schedule=1f1b")
    if schedule in V_SHAPED and virtual_stages not in (1, 2):
        problems.append(f"parallel.virtual_stages={virtual_stages}: schedule zbv has two stages per rank; leave it out")
    if layers_per_stage:
        if len(layers_per_stage) != stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
            problems.append(
                f"parallel.layers_per_stage={list(layers_per_stage)} must be {stages} numbers >= 1 "
                f"with the sum model.num_layers={num_layers}"
            )
    elif num_layers < stages:
        problems.append(f"model.num_layers={num_layers} do not fill {stages} pipeline stages; use fewer stages or more layers")
    if num_micro_batches is not None:
        problems += _micro_batch_problems(schedule, pp, num_micro_batches)
    return problems


def _micro_batch_problems(schedule: str, pp: int, num_micro_batches: int) -> list[str]:
    if schedule == "gpipe" or schedule == "looped_bfs":
        return []
    if num_micro_batches < pp:
        return [
            f"parallel.schedule={schedule} needs at least parallel.pp={pp} micro-batches per step, got {num_micro_batches}: "
            "use a larger global_batch_size, a smaller micro_batch_size, or schedule=gpipe"
        ]
    rounds = max(1, num_micro_batches // pp)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and num_micro_batches % rounds:
        return [
            f"parallel.schedule={schedule} needs micro-batches per step that divide by {rounds} (= {num_micro_batches} // pp), "
            f"got {num_micro_batches}; use a multiple of pp={pp}"
        ]
    return []
