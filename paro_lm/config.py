"""The typed schema of every config group, and the conversion of plain values into it.

A config is a tree of frozen dataclasses. hydra composes plain YAML values from `conf/`, `load_config` turns them into these classes
(unknown keys and wrong types are refused there, all at once), and `paro_lm.validation.validate` checks values and what spans groups.
This module imports nothing heavy, so that a mistyped option is refused in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARDING_NAMES = {"ddp": "NNN", "zero1": "NNG", "zero2": "NGG", "zero3": "GGG", "fsdp": "GGG", "mics": "III", "hsdp": "III"}
"""Names of well-known strategies and their letters (parameters, gradients, optimizer states)."""

AUTO_SHARDING = "auto"
"""`parallel.sharding` that leaves the cell to the planner."""


def option(default: Any, doc: str, *, choices: str | None = None, least: float | None = None, above: float | None = None) -> Any:
    """A dataclass field with the sentence that `docs/config.md` prints for it and the limits that `check_fields` enforces.

    `choices` lists the allowed strings as `a | b | c`; numbers must be >= `least` and > `above`.
    """
    metadata = {"doc": doc, "choices": tuple(choices.split(" | ")) if choices else (), "least": least, "above": above}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """How rotary frequencies are stretched beyond the length a model was trained on."""

    type: str = option("none", "How frequencies are scaled.", choices="none | linear | llama3 | yarn")
    factor: float = option(1.0, "How many times longer the context becomes.", above=0)
    low_freq_factor: float = option(1.0, "llama3: wavelengths above original/low are divided by factor.", above=0)
    high_freq_factor: float = option(4.0, "llama3: wavelengths below original/high stay as they are.", above=0)
    original_max_position: int = option(8192, "llama3, yarn: context length before scaling.", least=1)
    beta_fast: float = option(32.0, "yarn: dimensions that turn more often than this over the original length stay as they are.", above=0)
    beta_slow: float = option(1.0, "yarn: dimensions that turn less often than this over the original length are divided.", above=0)
    truncate: bool = option(True, "yarn: the range between both begins and ends at whole dimensions.")
    attention_factor: float | None = option(None, "yarn: factor on queries and keys; null = 0.1 ln(factor) + 1.", above=0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer; the values choose Llama, GPT-2 and their relatives."""

    name: str = option("tiny", "Name of the preset, for logs only.")
    init_from: str | None = option(
        None, "Hugging Face folder, or hf://owner/name: options and first weights are those of this model (choose it with model=hf)."
    )
    vocab_size: int | None = option(None, "Rows of the vocabulary; null takes the tokenizer's.", least=1)
    vocab_divisor: int = option(128, "The embedding is padded to a multiple of this; independent of tp, which must divide it.", least=1)
    hidden_size: int = option(256, "Width of the residual stream.", least=1)
    num_layers: int = option(4, "Transformer blocks.", least=1)
    num_heads: int = option(4, "Query heads.", least=1)
    num_kv_heads: int | None = option(None, "Key and value heads; null = num_heads (no grouping).")
    head_dim: int | None = option(None, "Width of a head; null = hidden_size / num_heads.", least=1)
    ffn_size: int | None = option(None, "Width inside the MLP; null = 4 hidden (gelu) or 8/3 hidden rounded up to 64 (swiglu).", least=1)
    max_positions: int = option(2048, "Longest sequence; rows of the table when positions are learned.", least=1)
    norm: str = option("rmsnorm", "Kind of norm.", choices="rmsnorm | layernorm")
    norm_eps: float = option(1e-5, "Epsilon inside the root of the norm.", least=0)
    activation: str = option("swiglu", "Nonlinearity of the MLP.", choices="swiglu | gelu | gelu_tanh")
    positions: str = option("rope", "How positions enter: rotary, or a learned table.", choices="rope | learned")
    sliding_window: int | None = option(None, "Tokens that a token attends to, itself included; null = all before it.", least=1)
    rope_theta: float = option(10000.0, "Base of the rotary frequencies.", above=0)
    rope_scaling: RopeScalingConfig = option(RopeScalingConfig(), "Scaling of the rotary frequencies.")
    qk_norm: bool = option(False, "RMSNorm on each head of q and k before the rotation (Qwen3).")
    qkv_bias: bool = option(False, "Biases on q, k and v.")
    out_bias: bool = option(False, "Bias on the attention output projection.")
    mlp_bias: bool = option(False, "Biases in the MLP.")
    tie_embeddings: bool = option(False, "The head uses the embedding's matrix.")
    dropout: float = option(0.0, "Dropout on embeddings, attention weights and both residual branches.", least=0)
    init_std: float = option(0.02, "Standard deviation of initial matrices; output projections are scaled by 1/sqrt(2 layers).", least=0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    train: list[str] = option(
        [],
        "Files or globs (text, jsonl, parquet) to prepare, or prefixes of prepared .bin/.idx; empty = the text that `make train` prepared.",
    )
    valid: list[str] = option([], "The same for validation; empty holds out `valid_fraction` of the training documents.")
    weights: list[float] = option([], "Blend weights, one per entry of `train`; empty = by size.")
    valid_fraction: float = option(0.02, "Held-out share of the documents when `valid` is empty.", least=0)
    tokenizer: str | None = option(None, "HF directory or tokenizer.json, sentencepiece .model, or `bytes`; null trains one on the text.")
    vocab_size: int = option(4096, "Size of a tokenizer that is trained here.", least=1)
    format: str = option(
        "text",
        "What rows hold: text; messages (a chat, put into text by the tokenizer's template, loss on what the assistant says); "
        "completion (a prompt and its completion, loss on the completion).",
        choices="text | messages | completion",
    )
    text_key: str = option("text", "Field of jsonl and parquet rows that holds the text.")
    messages_key: str = option("messages", "format=messages: field that holds a list of {role, content}.")
    prompt_key: str = option("prompt", "format=completion: field of the prompt.")
    completion_key: str = option("completion", "format=completion: field of the completion.")
    packing: str = option(
        "stream",
        "How samples are cut: stream = windows over all documents one after the other; documents = whole documents packed into each "
        "sample, longer ones truncated.",
        choices="stream | documents",
    )
    append_eod: bool = option(True, "Append the end-of-document token to every document.")
    document_mask: bool = option(False, "Attention and positions restart at every document; tokens that cross documents carry no loss.")
    cache_dir: str = option("data_cache", "Folder of prepared tokens and index caches.")
    num_workers: int = option(2, "Worker processes of the preparation.", least=1)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data types of the four kinds of buffers."""

    name: str = option("fp32", "Name of the preset, the type of the parameters.", choices="fp64 | fp32 | bf16 | fp16")
    param_dtype: str = option("fp32", "Parameters in forward and backward.", choices="fp64 | fp32 | bf16 | fp16")
    grad_dtype: str = option("fp32", "Accumulated gradients.", choices="fp64 | fp32 | bf16 | fp16")
    reduce_dtype: str = option("fp32", "Gradients on the wire.", choices="fp64 | fp32 | bf16 | fp16")
    main_dtype: str = option("fp32", "Main parameters and moments.", choices="fp64 | fp32")
    loss_scale: float | None = option(None, "fp16: fixed loss scale; null = dynamic.", above=0)
    initial_loss_scale: float = option(65536.0, "fp16: first dynamic loss scale.", above=0)
    loss_scale_window: int = option(2000, "fp16: good steps before the scale doubles.", least=1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How work and state are spread over ranks."""

    sharding: str = option(
        "NNN",
        "Three letters of N, I, G for parameters, gradients, optimizer states; ddp, zero1, zero2, zero3, fsdp, mics, hsdp; or auto: the "
        "planner chooses the fastest that fits the machines of the group `cluster`.",
    )
    sharding_overrides: dict[str, str] = option({}, "Cells of single units: name pattern (fnmatch on unit names) to three letters.")
    group_size: int | None = option(None, "Data-parallel ranks in a group; null = those of a node.", least=1)
    tp: int = option(1, "Tensor-parallel ranks.", least=1)
    sequence_parallel: bool = option(False, "With tp > 1: norms and residuals are sharded over the sequence.")
    tp_collectives: str = option(
        "native",
        "Algorithm of the sums and gathers of tensor parallelism: the backend's own, or one that sees its ranks as groups, for tp across "
        "nodes.",
        choices="native | ho_ring | hierarchical",
    )
    tp_group_size: int | None = option(None, "tp_collectives: tensor-parallel ranks in a group; null = those of a node.", least=1)
    pp: int = option(1, "Pipeline stages.", least=1)
    schedule: str = option(
        "1f1b", "Pipeline schedule.", choices="gpipe | 1f1b | looped_bfs | interleaved_1f1b | interleaved_zero_bubble | zbv"
    )
    virtual_stages: int = option(1, "Stages per pipeline rank, for the looped and interleaved schedules (zbv always has 2).", least=1)
    balance: str = option(
        "layers", "How layers are split over stages: by their number, or by cost with the head counted.", choices="layers | cost"
    )
    layers_per_stage: list[int] = option([], "Layers of each stage, in order; empty = as `balance` says.")
    collectives: str = option("auto", "Algorithm of data-parallel collectives.", choices="auto | native | hierarchical | ho_ring | ring")
    chunk_bytes: int | None = option(None, "HO-Ring: bytes of a chunk; null = from the message size.", least=1)
    overlap: bool = option(True, "Communicate beside computation; off gives the same numbers.")
    activation_checkpointing: str = option(
        "none", "What the backward pass recomputes (selective: attention only).", choices="none | full | selective"
    )
    check_replicas_every: int = option(0, "Every k steps compare replicas bitwise over the axes that replicate them; 0 = off.", least=0)


@dataclass(frozen=True, kw_only=True)
class BatchRampConfig:
    """Batch-size ramp: `start` samples per step, growing by `increment` to the global batch over `samples` samples."""

    start: int = option(0, "Samples of the first steps; 0 = no ramp.", least=0)
    increment: int = option(0, "Samples added at each stage of the ramp.", least=0)
    samples: int = option(0, "Samples over which the ramp runs.", least=0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-3, "Peak learning rate.", least=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", least=0)
    schedule: str = option(
        "cosine", "Shape of the learning rate after the warm-up.", choices="constant | linear | cosine | wsd | inverse_sqrt"
    )
    warmup_steps: int = option(0, "Steps of linear warm-up; step k uses (k+1)/warmup of the peak.", least=0)
    decay_steps: int | None = option(
        None, "Steps of decay after the warm-up (wsd: at the end); null = what remains (wsd: a tenth).", least=0
    )
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices; norms and biases have none.", least=0)
    beta1: float = option(0.9, "Decay of the first moment.", least=0)
    beta2: float = option(0.95, "Decay of the second moment.", least=0)
    eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    max_norm: float = option(1.0, "Gradients are clipped to this global norm; 0 = off.", least=0)
    max_skipped_steps: int = option(10, "Abort after this many non-finite steps in a row.", least=1)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What training minimises besides the cross entropy of the next token; validation losses stay plain cross entropies."""

    label_smoothing: float = option(0.0, "Share of every label that is spread evenly over the vocabulary; below 1.", least=0)
    z_loss: float = option(0.0, "Weight of log(sum(exp(logits)))^2 of every token, which keeps logits small (1e-4 is usual).", least=0)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which parameters are trained; with nothing set all of them. Frozen ones cost their parameters only, no gradients or states."""

    trainable: list[str] = option([], "Train only parameters whose name matches one of these patterns (fnmatch), such as layers.3.*.")
    last_blocks: int | None = option(None, "Train only the last k blocks.", least=1)
    lora_rank: int = option(0, "Rank of LoRA adapters, which alone are trained; 0 = none.", least=0)
    lora_alpha: float = option(16.0, "LoRA: adapters are scaled by alpha / rank.", above=0)
    lora_dropout: float = option(0.0, "LoRA: dropout in front of the adapters.", least=0)
    lora_targets: list[str] = option(
        ["q", "k", "v", "o"], "LoRA: linears of the blocks that get an adapter, of q, k, v, o, gate, up, down."
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation while training."""

    every: int = option(100, "Steps between validations (also at step 0 and at the end); 0 = off.", least=0)
    batches: int = option(8, "Global batches of a validation; 0 = the whole set.", least=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = option(0, "Steps between checkpoints; 0 = only at the end and when stopped.", least=0)
    keep_last: int = option(2, "Complete checkpoints that are kept; 0 = all.", least=0)
    resume: str = option("auto", "auto (continue this run if it exists), never, or the path of a run or checkpoint folder.")
    async_save: bool = option(False, "Write in the background from a copy.")
    keep_best: str = option(
        "none", "Also keep, in the run's folder `best`, the checkpoint with the lowest validation loss.", choices="none | val_loss"
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl."""

    every: int = option(1, "Steps between console lines.", least=1)
    tensorboard: bool = option(False, "Write tensorboard events into the run folder.")
    wandb: str = option("off", "Weights & Biases: nothing is sent unless online.", choices="off | offline | online")
    wandb_project: str = option("paro_lm", "Project of a wandb run.")
    peak_tflops: float | None = option(
        None, "Dense peak of one device in the compute type, for MFU; null = known devices, off on CPU.", above=0
    )
    profile_steps: list[int] = option([], "First and last step of a torch profiler trace; empty = off.")
    sample_prompt: str | None = option(None, "Text that is continued at the end of training; null = no sample.")
    sample_tokens: int = option(64, "Tokens of that sample.", least=1)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """The process and its device."""

    device: str = option(
        "auto", "Device; auto takes the first of cuda, mps (one process), cpu that exists.", choices="auto | cuda | mps | cpu"
    )
    backend: str = option(
        "auto",
        "Backend of the process group; auto fits the device; fake trains nothing and prints what every kind of rank would hold.",
        choices="auto | nccl | gloo | fake",
    )
    world_size: int | None = option(None, "Ranks of a fake world (backend=fake); null = from the launcher.", least=1)
    timeout_minutes: float = option(10.0, "A collective that takes longer ends the run.", above=0)
    max_minutes: float = option(0.0, "Save and stop after this many minutes; 0 = no limit.", least=0)
    compile: bool = option(False, "torch.compile each block.")
    deterministic: bool = option(False, "Deterministic algorithms only.")
    num_threads: int | None = option(None, "CPU threads per rank; null = cores / local ranks.", least=1)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines a plan is made for; figures are what one rank or card sustains, `paro-calibrate` measures them."""

    name: str = option("laptop", "Name of the cluster, for tables only.")
    nodes: int = option(1, "Nodes; a plan's world is nodes x ranks_per_node.", least=1)
    ranks_per_node: int = option(1, "Ranks, one per device, of a node.", least=1)
    backend: str = option("gloo", "What carries the backend's own collectives.", choices="nccl | gloo")
    memory_gb: float = option(16.0, "Device memory that one rank may fill, 1e9 bytes.", above=0)
    reserved_gb: float = option(0.5, "Part of it that is no tensor: contexts, libraries, fragments.", least=0)
    peak_tflops: float = option(0.1, "Dense peak of one rank in the parameter type.", above=0)
    efficiency: float = option(0.7, "Share of the peak that blocks reach, beside memory traffic and unit_us.", above=0)
    memory_gbytes: float = option(10.0, "Bytes per second between a rank and its memory, 1e9.", above=0)
    unit_us: float = option(100.0, "Time that one unit takes whatever its size (launches, hooks), microseconds.", least=0)
    intra_gbps: float = option(20.0, "Bits per second that one rank sends inside a node, 1e9.", above=0)
    intra_latency_us: float = option(100.0, "Latency of a message inside a node, microseconds.", least=0)
    inter_gbps: float = option(1.0, "Bits per second that one network card sends, 1e9.", above=0)
    cards_per_node: int = option(1, "Network cards of a node, which its ranks share.", least=1)
    inter_latency_us: float = option(100.0, "Latency of a message between nodes, microseconds.", least=0)
    overlap: float = option(0.8, "Share of the shorter of computation and communication that hides behind the longer; 1 = all.", least=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run_name: str = option("default", "Name of the run and of its folder.")
    output_dir: str = option("outputs", "Parent of run folders.")
    seed: int = option(1234, "Initial weights, data order and dropout follow from it.", least=0)
    steps: int = option(100, "Optimizer steps (attempts) of the run.", least=1)
    epochs: float | None = option(None, "Passes over the training data; `steps` then follows from it.", above=0)
    seq_length: int = option(256, "Tokens per sample.", least=1)
    global_batch_size: int = option(16, "Samples per step over all ranks.", least=1)
    micro_batch_size: int = option(4, "Samples per forward of one data rank.", least=1)
    batch_ramp: BatchRampConfig = option(BatchRampConfig(), "Growth of the global batch.")
    model: ModelConfig = option(ModelConfig(), "Group: the model.")
    data: DataConfig = option(DataConfig(), "Group: the data.")
    precision: PrecisionConfig = option(PrecisionConfig(), "Group: data types.")
    parallel: ParallelConfig = option(ParallelConfig(), "Group: parallelism.")
    optim: OptimConfig = option(OptimConfig(), "Group: optimizer and schedule.")
    loss: LossConfig = option(LossConfig(), "What training minimises.")
    finetune: FinetuneConfig = option(FinetuneConfig(), "Group: which parameters are trained.")
    eval: EvalConfig = option(EvalConfig(), "Group: validation.")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "Group: checkpoints.")
    logging: LoggingConfig = option(LoggingConfig(), "Group: metrics.")
    runtime: RuntimeConfig = option(RuntimeConfig(), "Group: process and device.")
    cluster: ClusterConfig = option(
        ClusterConfig(), "Group: the machines that a plan is made for; training reads it for sharding=auto and advice on memory only."
    )


class ConfigError(ValueError):
    """The configuration is refused; `problems` holds every reason, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The resolved annotation of every field of a schema class."""
    hints = typing.get_type_hints(schema)
    return {item.name: hints[item.name] for item in dataclasses.fields(schema)}


def is_section(kind: Any) -> bool:
    """Whether a field's annotation is a config dataclass."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def optional_inner(kind: Any) -> tuple[Any, bool]:
    """(`T`, True) for `T | None`, else (the type itself, False)."""
    if isinstance(kind, types.UnionType):
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return inner[0], True
    return kind, False


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """(full name, annotation, field) of every value in a schema, in order of declaration."""
    kinds = field_types(schema)
    for item in dataclasses.fields(schema):
        name = prefix + item.name
        if is_section(kinds[item.name]):
            yield from leaves(kinds[item.name], name + ".")
        else:
            yield name, kinds[item.name], item


def lookup(schema: type, key: str) -> Any | None:
    """The annotation of a dotted key, or None when there is none; keys inside a `dict` field have its value type."""
    head, _, rest = key.partition(".")
    kind = field_types(schema).get(head)
    if kind is None or not rest:
        return kind
    if is_section(kind):
        return lookup(kind, rest)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


def unknown_key(schema: type, key: str) -> str:
    """The sentence that refuses a key, with the known keys that look like it."""
    known = [name for name, _, _ in leaves(schema)]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    close += [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2] and name not in close]
    hint = f"did you mean {' or '.join(close[:3])}?" if close else "docs/config.md lists all keys."
    return f"{key}: there is no such option; {hint}"


def convert(values: Mapping[str, Any], schema: type, prefix: str = "", root: type | None = None) -> tuple[Any, dict[str, str]]:
    """(config, problems by key) from plain values. A missing or refused key has its default in the config that is returned."""
    kinds, result, problems = field_types(schema), {}, {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in kinds:
            inside = _flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
            problems.update({full: unknown_key(root or schema, full) for full in inside or {key: value}})
        elif is_section(kinds[name]):
            if not isinstance(value, Mapping):
                problems[key] = f"{key}: is a section, got {value!r}; set its keys, such as {key}.{next(iter(field_types(kinds[name])))}"
                continue
            result[name], below = convert(value, kinds[name], f"{key}.", root or schema)
            problems.update(below)
        else:
            try:
                result[name] = _convert_value(value, kinds[name])
            except ValueError as error:
                problems[key] = f"{key}: {error}"
    return schema(**result), problems


def _convert_value(value: Any, kind: Any) -> Any:
    inner, is_optional = optional_inner(kind)
    if value is None and is_optional:
        return None
    origin = typing.get_origin(inner)
    if origin is list:
        items = value if isinstance(value, (list, tuple)) else [value]
        return [_convert_value(item, typing.get_args(inner)[0]) for item in items]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping of names to values, got {value!r}")
        return {name: _convert_value(item, typing.get_args(inner)[1]) for name, item in _flatten(value).items()}
    return _convert_scalar(value, inner, " or null" if is_optional else "")


def _convert_scalar(value: Any, kind: type, or_null: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        if is_number and math.isfinite(value):
            return float(value)
        raise ValueError(f"must be a finite number{or_null}, got {value!r}")
    if kind is int:
        if is_number and math.isfinite(value) and value == int(value):
            return int(value)
        raise ValueError(f"must be a whole number{or_null}, got {value!r}")
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"must be true or false{or_null}, got {value!r}")
    assert kind is str, kind
    if isinstance(value, str):
        return value
    remedy = "; put it in quotes" if isinstance(value, (int, float)) else ""
    raise ValueError(f"must be a string{or_null}, got {value!r}{remedy}")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(_flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def load_config(values: Mapping[str, Any], schema: type = Config) -> Any:
    """The typed config from plain composed values; missing keys have their defaults. Raises ConfigError with all problems."""
    cfg, problems = convert(values, schema)
    if problems:
        raise ConfigError(list(problems.values()))
    return cfg


def read_config(path: Path | str) -> Config:
    """The config of a run from its `config.yaml`. Raises ConfigError with all problems, FileNotFoundError."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: must hold a mapping of options, got {type(values).__name__}"])
    return load_config(typing.cast(dict[str, Any], values))


def resolved_yaml(cfg: Any) -> str:
    """The whole config as YAML that `read_config` reads back to an equal object."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))


def config_hash(cfg: Any) -> str:
    """16 hex digits that depend on every value of the config and on nothing else (not on the process, order or platform)."""
    text = json.dumps(dataclasses.asdict(cfg), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """{full key: (old value, new value)} of every option that differs between two configs; None stands for a key that one lacks."""
    before, after = (_flatten(dataclasses.asdict(cfg)) for cfg in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
