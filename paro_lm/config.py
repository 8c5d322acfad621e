"""The typed schema of every config group.

A config is a tree of frozen dataclasses. hydra composes YAML values from `conf/`, `load_config` turns them into these classes
(unknown keys and wrong types are refused there), and `validate` checks what spans groups.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def option(default: Any, doc: str) -> Any:
    """A dataclass field with the sentence that `docs/config.md` prints for it."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return field(default_factory=lambda: default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """How rotary frequencies are stretched beyond the length a model was trained on."""

    type: str = option("none", "none | linear | llama3")
    factor: float = option(1.0, "How many times longer the context becomes.")
    low_freq_factor: float = option(1.0, "llama3: wavelengths above original/low are divided by factor.")
    high_freq_factor: float = option(4.0, "llama3: wavelengths below original/high stay as they are.")
    original_max_position: int = option(8192, "llama3: context length before scaling.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer; the values choose Llama, GPT-2 and their relatives."""

    name: str = option("tiny", "Name of the preset, for logs only.")
    vocab_size: int | None = option(None, "Rows of the vocabulary; null takes the tokenizer's.")
    vocab_divisor: int = option(128, "The embedding is padded to a multiple of this; independent of tp, which must divide it.")
    hidden_size: int = option(256, "Width of the residual stream.")
    num_layers: int = option(4, "Transformer blocks.")
    num_heads: int = option(4, "Query heads.")
    num_kv_heads: int | None = option(None, "Key and value heads; null = num_heads (no grouping).")
    head_dim: int | None = option(None, "Width of a head; null = hidden_size / num_heads.")
    ffn_size: int | None = option(None, "Width inside the MLP; null = 4 hidden (gelu) or 8/3 hidden rounded up to 64 (swiglu).")
    max_positions: int = option(2048, "Longest sequence; rows of the table when positions are learned.")
    norm: str = option("rmsnorm", "rmsnorm | layernorm")
    norm_eps: float = option(1e-5, "Epsilon inside the root of the norm.")
    activation: str = option("swiglu", "swiglu | gelu | gelu_tanh")
    positions: str = option("rope", "rope | learned")
    rope_theta: float = option(10000.0, "Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig = option(RopeScalingConfig(), "Scaling of the rotary frequencies.")
    qk_norm: bool = option(False, "RMSNorm on each head of q and k before the rotation (Qwen3).")
    qkv_bias: bool = option(False, "Biases on q, k and v.")
    out_bias: bool = option(False, "Bias on the attention output projection.")
    mlp_bias: bool = option(False, "Biases in the MLP.")
    tie_embeddings: bool = option(False, "The head uses the embedding's matrix.")
    dropout: float = option(0.0, "Dropout on embeddings, attention weights and both residual branches.")
    init_std: float = option(0.02, "Standard deviation of initial matrices; output projections are scaled by 1/sqrt(2 layers).")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    train: list[str] = option([], "Files or globs (text, jsonl, parquet) to prepare, or prefixes of prepared .bin/.idx; empty = the text that `make train` prepared.")
    valid: list[str] = option([], "The same for validation; empty holds out `valid_fraction` of the training documents.")
    weights: list[float] = option([], "Blend weights, one per entry of `train`; empty = by size.")
    valid_fraction: float = option(0.02, "Held-out share of the documents when `valid` is empty.")
    tokenizer: str | None = option(None, "HF directory or tokenizer.json, sentencepiece .model, or `bytes`; null trains one on the text.")
    vocab_size: int = option(4096, "Size of a tokenizer that is trained here.")
    text_key: str = option("text", "Field of jsonl and parquet rows that holds the text.")
    append_eod: bool = option(True, "Append the end-of-document token to every document.")
    document_mask: bool = option(False, "Attention and positions restart at every document; tokens that cross documents carry no loss.")
    cache_dir: str = option("data_cache", "Folder of prepared tokens and index caches.")
    num_workers: int = option(2, "Worker processes of the preparation.")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data types of the four kinds of buffers."""

    name: str = option("fp32", "fp64 | fp32 | bf16 | fp16")
    param_dtype: str = option("fp32", "Parameters in forward and backward.")
    grad_dtype: str = option("fp32", "Accumulated gradients.")
    reduce_dtype: str = option("fp32", "Gradients on the wire.")
    main_dtype: str = option("fp32", "Main parameters and moments.")
    loss_scale: float | None = option(None, "fp16: fixed loss scale; null = dynamic.")
    initial_loss_scale: float = option(65536.0, "fp16: first dynamic loss scale.")
    loss_scale_window: int = option(2000, "fp16: good steps before the scale doubles.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How work and state are spread over ranks."""

    sharding: str = option("NNN", "Three letters of N, I, G for parameters, gradients, optimizer states, or ddp, zero1, zero2, zero3, mics, hsdp.")
    sharding_overrides: dict[str, str] = option({}, "Cells of single units: name pattern (fnmatch on unit names) to three letters.")
    group_size: int | None = option(None, "Data-parallel ranks in a group; null = those of a node.")
    tp: int = option(1, "Tensor-parallel ranks.")
    sequence_parallel: bool = option(False, "With tp > 1: norms and residuals are sharded over the sequence.")
    pp: int = option(1, "Pipeline stages.")
    schedule: str = option("1f1b", "Pipeline schedule: gpipe | 1f1b | interleaved_1f1b | zbv")
    virtual_stages: int = option(1, "Model chunks per pipeline rank.")
    balance: str = option("layers", "How layers are split over stages: layers | cost")
    collectives: str = option("auto", "native | hierarchical | ho_ring | ring | auto")
    chunk_bytes: int | None = option(None, "HO-Ring: bytes of a chunk; null = from the message size.")
    overlap: bool = option(True, "Communicate beside computation; off gives the same numbers.")
    activation_checkpointing: str = option("none", "none | full | selective (attention only)")
    check_replicas_every: int = option(0, "Every k steps compare replicas bitwise over the axes that replicate them; 0 = off.")


@dataclass(frozen=True, kw_only=True)
class BatchRampConfig:
    """Batch-size ramp: `start` samples per step, growing by `increment` to the global batch over `samples` samples."""

    start: int = option(0, "Samples of the first steps; 0 = no ramp.")
    increment: int = option(0, "Samples added at each stage of the ramp.")
    samples: int = option(0, "Samples over which the ramp runs.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option(1e-3, "Peak learning rate.")
    min_lr: float = option(0.0, "Learning rate at the end of the decay.")
    schedule: str = option("cosine", "constant | linear | cosine | wsd | inverse_sqrt")
    warmup_steps: int = option(0, "Steps of linear warm-up; step k uses (k+1)/warmup of the peak.")
    decay_steps: int | None = option(None, "Steps of decay after the warm-up (wsd: at the end); null = what remains (wsd: a tenth).")
    weight_decay: float = option(0.1, "Decoupled weight decay of matrices; norms and biases have none.")
    beta1: float = option(0.9, "Decay of the first moment.")
    beta2: float = option(0.95, "Decay of the second moment.")
    eps: float = option(1e-8, "Added to the root of the second moment.")
    max_norm: float = option(1.0, "Gradients are clipped to this global norm; 0 = off.")
    max_skipped_steps: int = option(10, "Abort after this many non-finite steps in a row.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation while training."""

    every: int = option(100, "Steps between validations (also at step 0 and at the end); 0 = off.")
    batches: int = option(8, "Global batches of a validation; 0 = the whole set.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = option(0, "Steps between checkpoints; 0 = only at the end and when stopped.")
    keep_last: int = option(2, "Complete checkpoints that are kept; 0 = all.")
    resume: str = option("auto", "auto | never | path of a run or checkpoint folder")
    async_save: bool = option(False, "Write in the background from a copy.")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl."""

    every: int = option(1, "Steps between console lines.")
    tensorboard: bool = option(False, "Write tensorboard events into the run folder.")
    wandb: str = option("off", "off | offline | online")
    wandb_project: str = option("paro_lm", "Project of a wandb run.")
    peak_tflops: float | None = option(None, "Dense peak of one device in the compute type, for MFU; null = known devices, off on CPU.")
    profile_steps: list[int] = option([], "First and last step of a torch profiler trace; empty = off.")
    sample_prompt: str | None = option(None, "Text that is continued at the end of training; null = no sample.")
    sample_tokens: int = option(64, "Tokens of that sample.")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """The process and its device."""

    device: str = option("auto", "auto | cuda | mps | cpu")
    backend: str = option("auto", "auto | nccl | gloo | fake")
    world_size: int | None = option(None, "Ranks of a fake world (backend=fake); null = from the launcher.")
    timeout_minutes: float = option(10.0, "A collective that takes longer ends the run.")
    max_minutes: float = option(0.0, "Save and stop after this many minutes; 0 = no limit.")
    compile: bool = option(False, "torch.compile each block.")
    deterministic: bool = option(False, "Deterministic algorithms only.")
    num_threads: int | None = option(None, "CPU threads per rank; null = cores / local ranks.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run_name: str = option("default", "Name of the run and of its folder.")
    output_dir: str = option("outputs", "Parent of run folders.")
    seed: int = option(1234, "Initial weights, data order and dropout follow from it.")
    steps: int = option(100, "Optimizer steps (attempts) of the run.")
    seq_length: int = option(256, "Tokens per sample.")
    global_batch_size: int = option(16, "Samples per step over all ranks.")
    micro_batch_size: int = option(4, "Samples per forward of one data rank.")
    batch_ramp: BatchRampConfig = option(BatchRampConfig(), "Growth of the global batch.")
    model: ModelConfig = option(ModelConfig(), "Group: the model.")
    data: DataConfig = option(DataConfig(), "Group: the data.")
    precision: PrecisionConfig = option(PrecisionConfig(), "Group: data types.")
    parallel: ParallelConfig = option(ParallelConfig(), "Group: parallelism.")
    optim: OptimConfig = option(OptimConfig(), "Group: optimizer and schedule.")
    eval: EvalConfig = option(EvalConfig(), "Group: validation.")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "Group: checkpoints.")
    logging: LoggingConfig = option(LoggingConfig(), "Group: metrics.")
    runtime: RuntimeConfig = option(RuntimeConfig(), "Group: process and device.")
