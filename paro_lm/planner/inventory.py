"""What one rank holds and computes, unit by unit, from options alone: no parameters, no ranks, no torch.

A stage of the pipeline is a list of `UnitProfile`, one per unit that the sharding engine moves. Blocks are all alike, so profiles
carry a `count` and a stage of any depth has at most three kinds. The planner, the report of memory and the fake world read the same
list; a test holds it against the units of the model itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from paro_lm.config import Config, FinetuneConfig, ModelConfig
from paro_lm.model.flops import layer_costs
from paro_lm.model.sizes import ModelSizes
from paro_lm.model.trainable import trainable_in
from paro_lm.parallel.axes import MeshShape
from paro_lm.parallel.cost import ElementBytes, UnitSize
from paro_lm.parallel.sharding import Cell, cell_of_unit
from paro_lm.parallel.stages import num_stages, split_by_cost, split_layers, stages_of_rank

ALIGNMENT = 16
"""Elements to which the flat buffers align every parameter and shard (`parallel.buffer.ALIGNMENT`)."""

BYTES_VOCAB = 257
"""Tokens of `data.tokenizer=bytes`: 256 and the end of a document."""

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

Trainable = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """`count` equal units, of which `name` is the first: elements of each parameter in this rank's tp box.

    `gathers` is how often a micro-batch needs the whole parameters: 2 (forward, backward), 1 where no backward passes.
    """

    name: str
    kind: str  # embedding | block | head
    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    gathers: int = 2
    count: int = 1
    first_layer: int = 0

    def padded(self, dp: int) -> tuple[int, int]:
        """Elements of the trainable and of the frozen flat buffer over `dp` data ranks."""
        return padded_numel(self.trainable, dp), padded_numel(self.frozen, dp)

    def expand(self) -> list[UnitProfile]:
        """The units one by one, with their own names."""
        if self.kind != "block":
            return [self]
        return [replace(self, name=f"layers.{self.first_layer + i}", count=1, first_layer=self.first_layer + i) for i in range(self.count)]


@functools.lru_cache(maxsize=4096)
def padded_numel(numels: tuple[int, ...], dp: int) -> int:
    """Length of a flat buffer: every parameter starts at a multiple of ALIGNMENT, the whole is a multiple of dp * ALIGNMENT."""
    end = sum(math.ceil(numel / ALIGNMENT) * ALIGNMENT for numel in numels)
    return math.ceil(end / (dp * ALIGNMENT)) * dp * ALIGNMENT


def stage_layers(cfg: Config, *, pp: int, vocab_size: int) -> list[range]:
    """The blocks of every pipeline stage (a rank may hold several): as listed, by number, or by cost. Raises ValueError for too few."""
    parallel, num_layers = cfg.parallel, cfg.model.num_layers
    count = num_stages(parallel.schedule, pp, parallel.virtual_stages) if pp > 1 else 1
    if count > num_layers:
        raise ValueError(f"model.num_layers={num_layers} do not fill {count} pipeline stages; use fewer stages or more layers.")
    if len(parallel.layers_per_stage) == count > 1:
        starts = [sum(parallel.layers_per_stage[:stage]) for stage in range(count)]
        return [range(start, start + size) for start, size in zip(starts, parallel.layers_per_stage, strict=True)]
    if parallel.balance == "layers" or count == 1:
        return split_layers(num_layers, count)
    costs = layer_costs(cfg.model, vocab_size=vocab_size, seq_length=cfg.seq_length)
    return split_by_cost([costs.block] * num_layers, count, first=costs.embedding, last=costs.head)


def stage_profiles(
    cfg: ModelConfig, *, vocab_size: int, tp: int = 1, layers: range | None = None, first: bool = True, last: bool = True,
    is_trainable: Trainable | None = None, finetune: FinetuneConfig | None = None,
) -> list[UnitProfile]:  # fmt: skip
    """Units of one stage in the order of the forward; `layers` are its blocks (default all of them).

    `is_trainable(name of a parameter)` says what is trained (by default what `finetune` does); blocks whose parameters differ in it
    become profiles of their own. `finetune` also adds its adapters.
    """
    sizes = ModelSizes.of(cfg, vocab_size)
    finetune = finetune or FinetuneConfig()
    is_trainable = is_trainable or trainable_in(finetune, cfg.num_layers)
    chosen = range(cfg.num_layers) if layers is None else layers
    units: list[tuple[str, str, int, dict[str, int]]] = []
    if first:
        units.append(("embedding", "embedding", 0, _embedding(cfg, sizes, tp, with_positions=True)))
    block = _block(cfg, sizes, tp, finetune)
    units += [(f"layers.{layer}", "block", layer, block) for layer in chosen]
    if last:
        units.append(("head", "head", 0, _head(cfg, sizes, tp)))
    if last and not first and cfg.tie_embeddings:  # the last stage's copy of the matrix
        units.append(("embedding", "embedding", 0, _embedding(cfg, sizes, tp, with_positions=False)))
    result: list[UnitProfile] = []
    backward_passes = not first  # a later stage always hands a gradient on
    for name, kind, layer, parameters in units:
        trained = {key: is_trainable(f"{name}.{key}") for key in parameters}
        backward_passes = backward_passes or any(trained.values())
        is_output = name == "embedding" and last and cfg.tie_embeddings  # the head's projection: a backward always passes
        profile = UnitProfile(
            name=name,
            kind=kind,
            trainable=tuple(numel for key, numel in parameters.items() if trained[key]),
            frozen=tuple(numel for key, numel in parameters.items() if not trained[key]),
            gathers=2 if backward_passes or is_output else 1,
            first_layer=layer,
        )
        if result and kind == "block" and replace(result[-1], name=name, count=1, first_layer=layer) == profile:
            result[-1] = replace(result[-1], count=result[-1].count + 1)
        else:
            result.append(profile)
    return result


def unit_sizes(
    cfg: Config, shape: MeshShape, *, pp_rank: int = 0, vocab_size: int | None = None, is_trainable: Trainable | None = None
) -> list[UnitSize]:
    """The padded units of a rank at pipeline position `pp_rank`, each with the cell that the config gives it, in forward order.

    `vocab_size` defaults to the config's; raises ValueError when neither is known.
    """
    default = Cell.parse(cfg.parallel.sharding)
    result = []
    for profile in rank_profiles(cfg, shape, pp_rank=pp_rank, vocab_size=vocab_size, is_trainable=is_trainable):
        for unit in profile.expand():
            trainable, frozen = unit.padded(shape.dp)
            cell = cell_of_unit(unit.name, default, cfg.parallel.sharding_overrides)
            result.append(UnitSize(cell=cell, trainable=trainable, frozen=frozen, gathers=unit.gathers))
    return result


def rank_profiles(
    cfg: Config, shape: MeshShape, *, pp_rank: int = 0, vocab_size: int | None = None, is_trainable: Trainable | None = None
) -> list[UnitProfile]:
    """Profiles of all stages of the config's model that a rank holds under a mesh, in the order of the stages."""
    vocab = vocab_of(cfg, vocab_size)
    layers = stage_layers(cfg, pp=shape.pp, vocab_size=vocab)
    mine = stages_of_rank(cfg.parallel.schedule, shape.pp, cfg.parallel.virtual_stages, pp_rank) if shape.pp > 1 else [0]
    return [
        profile
        for stage in mine
        for profile in stage_profiles(
            cfg.model,
            vocab_size=vocab,
            tp=shape.tp,
            layers=layers[stage],
            first=stage == 0,
            last=stage == len(layers) - 1,
            is_trainable=is_trainable,
            finetune=cfg.finetune,
        )
    ]


def vocab_of(cfg: Config, vocab_size: int | None = None) -> int:
    """Rows of the vocabulary: as given, else the model's, else those of the tokenizer that the run would train, or of bytes."""
    of_tokenizer = {None: cfg.data.vocab_size, "bytes": BYTES_VOCAB}.get(cfg.data.tokenizer)
    vocab = vocab_size or cfg.model.vocab_size or of_tokenizer
    if vocab is None:
        raise ValueError(f"model.vocab_size: must be given for a plan, data.tokenizer={cfg.data.tokenizer} is not opened for it.")
    return vocab


def element_bytes(cfg: Config) -> ElementBytes:
    """Bytes per element of the four kinds of buffers."""
    types = cfg.precision
    names = (types.param_dtype, types.grad_dtype, types.reduce_dtype, types.main_dtype)
    param, grad, reduce, main = (DTYPE_BYTES[name] for name in names)
    return ElementBytes(param=param, grad=grad, reduce=reduce, main=main)


def _embedding(cfg: ModelConfig, sizes: ModelSizes, tp: int, *, with_positions: bool) -> dict[str, int]:
    result = {"tokens.weight": sizes.padded_vocab // tp * cfg.hidden_size}
    if with_positions and cfg.positions == "learned":
        result["positions.weight"] = cfg.max_positions * cfg.hidden_size
    return result


def _head(cfg: ModelConfig, sizes: ModelSizes, tp: int) -> dict[str, int]:
    result = _norm("norm", cfg, cfg.hidden_size)
    if not cfg.tie_embeddings:
        result["output.weight"] = sizes.padded_vocab // tp * cfg.hidden_size
    return result


def _norm(name: str, cfg: ModelConfig, size: int) -> dict[str, int]:
    return {f"{name}.weight": size} | ({f"{name}.bias": size} if cfg.norm == "layernorm" else {})


def _block(cfg: ModelConfig, sizes: ModelSizes, tp: int, finetune: FinetuneConfig) -> dict[str, int]:
    hidden, ffn = cfg.hidden_size, sizes.ffn_size // tp
    query = sizes.query_size // tp
    key = sizes.kv_size if sizes.num_kv_heads < tp else sizes.kv_size // tp  # fewer heads than ranks: each rank holds them all
    result = _norm("attention_norm", cfg, hidden) | _norm("mlp_norm", cfg, hidden)
    if cfg.qk_norm:
        result |= {"attention.q_norm.weight": sizes.head_dim, "attention.k_norm.weight": sizes.head_dim}
    linears = {
        "attention.q": (query, hidden, cfg.qkv_bias),
        "attention.k": (key, hidden, cfg.qkv_bias),
        "attention.v": (key, hidden, cfg.qkv_bias),
        "attention.o": (hidden, query, cfg.out_bias),
        "mlp.up": (ffn, hidden, cfg.mlp_bias),
        "mlp.down": (hidden, ffn, cfg.mlp_bias),
    }
    if cfg.activation == "swiglu":
        linears["mlp.gate"] = (ffn, hidden, cfg.mlp_bias)
    for name, (rows, columns, bias) in linears.items():
        result |= {f"{name}.weight": rows * columns} | ({f"{name}.bias": rows} if bias else {})
        if finetune.lora_rank and name.partition(".")[2] in finetune.lora_targets:
            result |= {f"{name}.lora.a": finetune.lora_rank * columns, f"{name}.lora.b": rows * finetune.lora_rank}
    return result
