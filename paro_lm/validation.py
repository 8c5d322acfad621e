"""Checks of a whole configuration: every value, and what spans groups.

`validate` returns all problems, not the first, and needs no process group, no data file and no torch. Each problem is one sentence
that starts with the full key and says what is wrong, what was given, and what would be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any

from paro_lm.config import AUTO_SHARDING, SHARDING_NAMES, Config, FinetuneConfig, leaves
from paro_lm.model.trainable import LORA_TARGETS, trains_all
from paro_lm.model.validate import check_model
from paro_lm.optim.schedule import ramp_problems
from paro_lm.parallel.sharding import ALIASES, Cell
from paro_lm.parallel.stages import ZERO_BUBBLE, layout_problems
from paro_lm.trackers import tracker_problems

Check = Callable[[Config], Iterable[str]]


def validate(cfg: Config, world_size: int, local_world_size: int | None = None, *, complete: bool = True) -> list[str]:
    """All problems of a config that is to run on `world_size` ranks, `local_world_size` of them per node; empty = it is right.

    complete    whether the options that the folder `model.init_from` and the data decide are filled in; without them what depends
                on them is not checked
    """
    problems = check_fields(cfg)
    has_model, has_steps = complete or cfg.model.init_from is None, complete or cfg.epochs is None
    dividing: list[Check] = [] if problems else [_lengths, _world(world_size, local_world_size or world_size)]
    if not problems and has_model:
        dividing += [_model, _finetuned_model, _pipeline_of(world_size)]
    of_steps: list[Check] = [_schedule, _logging] if has_steps else []
    of_tokenizer: list[Check] = [_tokenizer] if has_model else []
    for check in (_names, _data, *of_tokenizer, _precision, _optimizer, *of_steps, _sharding, _tensor, _finetune, *dividing):
        problems.extend(check(cfg))
    return problems


def check_fields(cfg: Any) -> list[str]:
    """Values outside the choices and limits that their fields declare, for any schema."""
    return list(_field_problems(cfg))


def _field_problems(cfg: Any) -> Iterator[str]:
    for key, _, item in leaves(type(cfg)):
        value: Any = cfg
        for name in key.split("."):
            value = getattr(value, name)
        choices, least, above = (item.metadata.get(name) for name in ("choices", "least", "above"))
        if value is None:
            continue
        if choices and value not in choices:
            yield f"{key}: must be one of {', '.join(choices)}, got {value!r}"
        elif least is not None and value < least:
            yield f"{key}: must be at least {least}, got {value}"
        elif above is not None and value <= above:
            yield f"{key}: must be above {above}, got {value}"


def _names(cfg: Config) -> Iterator[str]:
    path = PurePath(cfg.run_name)
    if not cfg.run_name.strip() or path.is_absolute() or ".." in path.parts or path == PurePath():
        yield f"run_name: must name a folder inside output_dir, got {cfg.run_name!r}; use letters, digits, '-', '_' and '.'"
    if not cfg.output_dir.strip():
        yield "output_dir: must name a folder, got an empty string"
    if not cfg.checkpoint.resume.strip():
        yield "checkpoint.resume: must be auto, never or a path, got an empty string"


def _lengths(cfg: Config) -> Iterator[str]:
    if cfg.parallel.sequence_parallel and cfg.parallel.tp > 1 and cfg.seq_length % cfg.parallel.tp:
        yield f"seq_length: {cfg.seq_length} is not divisible by parallel.tp={cfg.parallel.tp}, which parallel.sequence_parallel=true needs"
    if cfg.parallel.sequence_parallel and cfg.parallel.tp == 1:
        yield "parallel.sequence_parallel: needs parallel.tp > 1, got parallel.tp=1; set it to false"


def _data(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if data.weights and len(data.weights) != len(data.train):
        yield f"data.weights: needs one weight per entry of data.train, got {len(data.weights)} weights and {len(data.train)} entries"
    if data.weights and (min(data.weights) < 0 or sum(data.weights) <= 0):
        yield f"data.weights: must be at least 0 and not all 0, got {data.weights}"
    if data.valid_fraction >= 1:
        yield f"data.valid_fraction: must be below 1, got {data.valid_fraction}"
    if cfg.eval.every and not data.valid and data.valid_fraction == 0:
        yield "eval.every: there is nothing to validate on with data.valid_fraction=0 and no data.valid; set one of them, or eval.every=0"

    if data.packing == "documents" and not data.document_mask:
        yield "data.packing: documents in one sample must not see each other, got data.document_mask=false; set it to true"
    if data.format != "text" and not data.train:
        yield f"data.train: data.format={data.format} needs files, the default text has no such rows; set data.train='my/*.jsonl'"
    if cfg.epochs is not None and cfg.batch_ramp.start:
        yield f"epochs: not supported with a batch ramp (batch_ramp.start={cfg.batch_ramp.start}); set steps instead"
    if cfg.checkpoint.keep_best != "none" and not cfg.eval.every:
        yield f"checkpoint.keep_best: {cfg.checkpoint.keep_best} needs validations, got eval.every=0; set eval.every"


def _tokenizer(cfg: Config) -> Iterator[str]:
    if cfg.data.format == "messages" and cfg.data.tokenizer in (None, "bytes"):
        yield (
            f"data.tokenizer: data.format=messages needs a tokenizer with a chat template, got {cfg.data.tokenizer}; "
            "set it to a Hugging Face folder"
        )
    if cfg.data.format == "completion" and cfg.data.tokenizer is None:
        yield "data.tokenizer: none is trained on data.format=completion; set it to a tokenizer, or to bytes"


def _finetune(cfg: Config) -> Iterator[str]:
    tune, default = cfg.finetune, FinetuneConfig()
    if cfg.model.name == "hf" and cfg.model.init_from is None:
        yield "model.init_from: model=hf needs a Hugging Face folder or hf://owner/name, got null"
    chosen = {"trainable": tune.trainable, "last_blocks": tune.last_blocks, "lora_rank": tune.lora_rank}
    several = [f"finetune.{name}={value}" for name, value in chosen.items() if value]
    if len(several) > 1:
        yield f"finetune: {' and '.join(several)} each say what is trained; give one of them"
    if not tune.lora_rank:
        idle = [name for name in ("lora_alpha", "lora_dropout", "lora_targets") if getattr(tune, name) != getattr(default, name)]
        if idle:
            yield f"finetune.{idle[0]}: has no effect with finetune.lora_rank=0, got {getattr(tune, idle[0])}; set finetune.lora_rank"
    unknown = [target for target in tune.lora_targets if target not in LORA_TARGETS]
    if unknown or not tune.lora_targets:
        yield f"finetune.lora_targets: must be some of {', '.join(LORA_TARGETS)}, got {', '.join(unknown) or 'none'}"
    if tune.lora_dropout >= 1:
        yield f"finetune.lora_dropout: must be below 1, got {tune.lora_dropout}"
    if cfg.parallel.pp > 1 and cfg.parallel.schedule in ZERO_BUBBLE and not trains_all(tune):
        yield (
            f"parallel.schedule: {cfg.parallel.schedule} splits the backward of weights, which is not supported with frozen parameters "
            "(finetune); use 1f1b or interleaved_1f1b"
        )


def _finetuned_model(cfg: Config) -> Iterator[str]:
    tune = cfg.finetune
    if tune.last_blocks is not None and tune.last_blocks > cfg.model.num_layers:
        yield f"finetune.last_blocks: the model has model.num_layers={cfg.model.num_layers} blocks, got {tune.last_blocks}"
    if tune.lora_rank and "gate" in tune.lora_targets and cfg.model.activation != "swiglu":
        yield f"finetune.lora_targets: the MLP of model.activation={cfg.model.activation} has no gate; leave it out"


def _precision(cfg: Config) -> Iterator[str]:
    types = cfg.precision
    if types.name != types.param_dtype:
        yield (
            f"precision.name: {types.name} does not fit precision.param_dtype={types.param_dtype}; "
            "choose both at once with precision=fp64, fp32, bf16 or fp16"
        )
    if "fp64" in (types.param_dtype, types.main_dtype):
        others = {name: getattr(types, name) for name in ("param_dtype", "grad_dtype", "reduce_dtype", "main_dtype")}
        if set(others.values()) != {"fp64"}:
            yield f"precision: fp64 must be the type of all four buffers, got {others}; use precision=fp64"
        if cfg.runtime.device == "mps":
            yield "runtime.device: mps has no fp64; use precision=fp32 or runtime.device=cpu"
    if types.param_dtype == "fp32" and types.main_dtype == "fp32" and "fp64" in (types.grad_dtype, types.reduce_dtype):
        yield f"precision.grad_dtype: fp64 gradients need precision=fp64, got grad {types.grad_dtype}, reduce {types.reduce_dtype}"
    if types.loss_scale is not None and types.param_dtype != "fp16":
        yield f"precision.loss_scale: only fp16 scales the loss, got {types.loss_scale} with {types.param_dtype}; set it to null"


def _optimizer(cfg: Config) -> Iterator[str]:
    optim = cfg.optim
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr: must not exceed optim.lr, got {optim.min_lr} > {optim.lr}"
    if optim.decay_steps and optim.schedule in ("constant", "inverse_sqrt"):
        yield f"optim.decay_steps: {optim.decay_steps} has no effect with optim.schedule={optim.schedule}; leave it null"
    for name in ("beta1", "beta2"):
        if getattr(optim, name) >= 1:
            yield f"optim.{name}: must be below 1, got {getattr(optim, name)}"
    if cfg.loss.label_smoothing >= 1:
        yield f"loss.label_smoothing: must be below 1, got {cfg.loss.label_smoothing}"


def _schedule(cfg: Config) -> Iterator[str]:
    optim = cfg.optim
    if optim.warmup_steps > cfg.steps:
        yield f"optim.warmup_steps: {optim.warmup_steps} steps of warm-up do not fit into steps={cfg.steps}"
    elif optim.schedule == "wsd" and optim.warmup_steps + (optim.decay_steps or 0) > cfg.steps:
        yield (
            f"optim.decay_steps: warm-up {optim.warmup_steps} + decay {optim.decay_steps} do not fit into steps={cfg.steps}; "
            "wsd decays at the end of the run"
        )


def _logging(cfg: Config) -> Iterator[str]:
    steps = cfg.logging.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= cfg.steps):
        yield f"logging.profile_steps: must be [first, last] with 1 <= first <= last <= steps={cfg.steps}, got {steps}"
    yield from tracker_problems(cfg.logging)


def _sharding(cfg: Config) -> Iterator[str]:
    is_auto = cfg.parallel.sharding.lower() == AUTO_SHARDING
    if is_auto and cfg.parallel.sharding_overrides:
        yield (
            f"parallel.sharding_overrides: the planner chooses one cell for all units with parallel.sharding=auto, got "
            f"{cfg.parallel.sharding_overrides}; leave them out, or name the cell"
        )
    cells = {} if is_auto else {"parallel.sharding": cfg.parallel.sharding}
    cells.update({f"parallel.sharding_overrides.{unit}": cell for unit, cell in cfg.parallel.sharding_overrides.items()})
    for key, cell in cells.items():
        is_cell = len(cell) == 3 and set(cell.upper()) <= set("NIG")
        if not is_cell and cell.lower() not in SHARDING_NAMES:
            yield f"{key}: must be three letters of N, I, G (parameters, gradients, states) or {', '.join(_names_for(key))}, got {cell!r}"


def _names_for(key: str) -> list[str]:
    return [*SHARDING_NAMES, *([AUTO_SHARDING] if key == "parallel.sharding" else [])]


def _model(cfg: Config) -> list[str]:
    return check_model(cfg.model, tp=cfg.parallel.tp, seq_length=cfg.seq_length)


def _world(world_size: int, local_world_size: int) -> Callable[[Config], Iterator[str]]:
    """The checks that need the number of ranks."""
    return lambda cfg: itertools.chain(_launch(cfg, world_size, local_world_size), _mesh(cfg, world_size))


def _launch(cfg: Config, world_size: int, local_world_size: int) -> Iterator[str]:
    tp = cfg.parallel.tp
    if local_world_size % tp and tp % local_world_size:
        yield f"parallel.tp: {tp} ranks would straddle nodes of {local_world_size} ranks; let one divide the other"
    if cfg.runtime.world_size is not None and cfg.runtime.backend != "fake":
        yield f"runtime.world_size: only a fake world has a size of its own, got {cfg.runtime.world_size}; start ranks with torchrun"
    if cfg.runtime.device == "mps" and world_size > 1:
        yield f"runtime.device: mps runs one process, got a world of {world_size}"


def _tensor(cfg: Config) -> Iterator[str]:
    tp, algorithm, group = cfg.parallel.tp, cfg.parallel.tp_collectives, cfg.parallel.tp_group_size
    if algorithm != "native" and tp == 1:
        yield f"parallel.tp_collectives: {algorithm} needs parallel.tp > 1, got parallel.tp=1; use native"
    if group is not None and algorithm == "native":
        yield f"parallel.tp_group_size: has no effect with parallel.tp_collectives=native, got {group}; leave it null, or use ho_ring"
    elif group is not None and tp % group:
        valid = ", ".join(str(size) for size in range(1, tp + 1) if tp % size == 0)
        yield f"parallel.tp_group_size: {group} does not divide parallel.tp={tp}; use one of {valid}"


def _mesh(cfg: Config, world_size: int) -> Iterator[str]:
    pp, tp, group_size = cfg.parallel.pp, cfg.parallel.tp, cfg.parallel.group_size
    if world_size % (pp * tp):
        yield (
            f"parallel.tp: {world_size} ranks cannot be split into parallel.pp={pp} x parallel.tp={tp} x dp; "
            f"the number of ranks must be a multiple of {pp * tp}"
        )
        return
    dp = world_size // (pp * tp)
    if group_size is not None and dp % group_size:
        valid = ", ".join(str(size) for size in range(1, dp + 1) if dp % size == 0)
        yield (
            f"parallel.group_size: {group_size} does not divide the {dp} data-parallel ranks "
            f"(world {world_size} / pp {pp} / tp {tp}); use one of {valid}"
        )
    yield from _batches(cfg, dp)


def _pipeline_of(world_size: int) -> Check:
    """The checks of stages against the model, for meshes that are possible at all."""
    return lambda cfg: () if world_size % (ranks := cfg.parallel.pp * cfg.parallel.tp) else _pipeline(cfg, world_size // ranks)


def _pipeline(cfg: Config, dp: int) -> Iterator[str]:
    parallel, micro = cfg.parallel, cfg.micro_batch_size * dp
    for size in _batch_sizes(cfg):
        problems = layout_problems(
            schedule=parallel.schedule,
            pp=parallel.pp,
            virtual_stages=parallel.virtual_stages,
            num_layers=cfg.model.num_layers,
            num_micro_batches=size // micro if size % micro == 0 else None,
            layers_per_stage=parallel.layers_per_stage,
        )
        yield from problems
        if problems:  # those of other batch sizes would say much the same
            break
    if parallel.pp == 1:
        return
    for key, cell in {"sharding": parallel.sharding, **parallel.sharding_overrides}.items():
        letters = ALIASES.get(cell.lower(), cell.upper())
        if len(letters) == 3 and set(letters) <= set("NIG") and not Cell.parse(letters).is_kept:
            yield (
                f"parallel.{key}: {letters} shards its optimizer states more coarsely than parameters or gradients, which is not supported "
                f"with parallel.pp={parallel.pp}; use {Cell.parse(letters).dominating}, which needs less memory"
            )
    if parallel.schedule in ZERO_BUBBLE and parallel.activation_checkpointing != "none":
        yield (
            f"parallel.activation_checkpointing: {parallel.activation_checkpointing} is not supported with the split backward of "
            f"parallel.schedule={parallel.schedule}; use none, or schedule=1f1b or interleaved_1f1b"
        )
    if parallel.schedule in ZERO_BUBBLE and cfg.runtime.compile:
        yield f"runtime.compile: not supported with the split backward of parallel.schedule={parallel.schedule}; use interleaved_1f1b"
    if parallel.schedule == "zbv" and cfg.model.tie_embeddings:
        yield (
            "model.tie_embeddings: with parallel.schedule=zbv one rank holds both ends of the model, for which tied embeddings are not "
            "supported; use schedule=interleaved_1f1b, or model.tie_embeddings=false"
        )


def _batch_sizes(cfg: Config) -> list[int]:
    """Every global batch size of a run, in the order of a ramp."""
    ramp = cfg.batch_ramp
    growing = range(ramp.start, cfg.global_batch_size, ramp.increment) if ramp.start > 0 and ramp.increment > 0 else ()
    return [*growing, cfg.global_batch_size]


def _batches(cfg: Config, dp: int) -> Iterator[str]:
    micro, size = cfg.micro_batch_size, cfg.global_batch_size
    unit = micro * dp
    if size % unit:
        lower = size // unit * unit
        near = f"{lower} or {lower + unit}" if lower else str(unit)
        yield f"global_batch_size: {size} is not divisible by micro_batch_size={micro} x {dp} data-parallel ranks = {unit}; use {near}"
    yield from ramp_problems(cfg.batch_ramp, size, unit)


def num_micro_batches(cfg: Config, world_size: int, global_batch_size: int | None = None) -> int:
    """Micro-batches of a step on each data rank: global batch / (micro-batch x dp); the batch defaults to the config's."""
    dp = world_size // (cfg.parallel.pp * cfg.parallel.tp)
    size = cfg.global_batch_size if global_batch_size is None else global_batch_size
    assert size % (cfg.micro_batch_size * dp) == 0, "validate() refuses this"
    return size // (cfg.micro_batch_size * dp)
