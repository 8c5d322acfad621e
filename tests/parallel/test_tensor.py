"""Tensor parallelism against one process: losses, gathered gradients and logits to 1e-10 in float64."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro_lm.config import LossConfig, ModelConfig
from paro_lm.model.dropout import DropoutState, dropout
from paro_lm.model.generate import generate
from paro_lm.model.loss import vocab_parallel_cross_entropy
from paro_lm.model.transformer import Transformer
from paro_lm.parallel.activation import apply_activation_checkpointing
from paro_lm.parallel.tensor import ColumnParallelLinear, TensorParallel
from paro_lm.testing import run_distributed

LLAMA = ModelConfig(hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=40, vocab_divisor=16, init_std=0.3)
GPT2 = dataclasses.replace(
    LLAMA,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    max_positions=32,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
CASES = {
    "llama": LLAMA,
    "grouped": dataclasses.replace(LLAMA, num_kv_heads=2, head_dim=8, qk_norm=True, tie_embeddings=True),
    "multi_query_biases": dataclasses.replace(LLAMA, num_kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True),
    "gpt2": GPT2,
}
VOCAB = 21  # padded to 32: with tp 4 the third rank has padding columns, the last has nothing else
SEED = 5


def batch(length: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB, (3, length), generator=generator) for _ in range(2))
    labels[0, 2] = labels[2, 5] = -100
    return tokens, labels


def randomise(model: Transformer) -> None:
    """Values for norms and biases too, the same for every layout."""
    specs = model.parameter_specs()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = specs[name]
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
                whole = torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.5 + (spec.init == "ones")
                parameter.copy_(whole[spec.offset[0] : spec.offset[0] + spec.local_shape[0]])


def gather(value: Tensor, model: Transformer, name: str, tensor: TensorParallel, *, is_gradient: bool) -> Tensor:
    """The global tensor from all ranks' boxes; replicas must be bitwise equal, partial gradients are summed."""
    spec = model.parameter_specs()[name]
    if is_gradient and "tp" in spec.partial_axes:
        value = value.clone()
        dist.all_reduce(value)
    boxes: list[Any] = [None] * tensor.size
    dist.all_gather_object(boxes, (spec.offset, spec.local_shape, value))
    whole = torch.full(spec.shape, float("nan"), dtype=value.dtype)
    if "tp" in spec.replicated_axes:
        assert all(torch.equal(box[2], value) for box in boxes), name
        assert tuple(value.shape) == spec.shape
    for offset, shape, part in boxes:
        assert tuple(part.shape) == shape
        whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))] = part
    assert not whole.isnan().any(), name
    return whole


def check_case(cfg: ModelConfig, tensor: TensorParallel, recompute: str, loss_options: LossConfig | None = None) -> None:
    reference = Transformer(cfg, vocab_size=VOCAB, loss=loss_options).double().initialize(SEED)
    model = Transformer(cfg, vocab_size=VOCAB, tensor=tensor, loss=loss_options).double().initialize(SEED)
    for either in (reference, model):
        randomise(either)
    apply_activation_checkpointing(model, recompute)
    tokens, labels = batch()
    documents = torch.tensor([[0] * 3 + [1] * 5]).expand(3, -1)
    expected = reference(tokens, labels=labels, documents=documents)
    expected.backward()
    loss = model(tokens, labels=labels, documents=documents)
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-12)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == model.parameter_specs().keys()
    for name, parameter in reference.named_parameters():
        assert parameters[name].grad is not None, name
        value = gather(parameters[name].detach(), model, name, tensor, is_gradient=False)
        assert torch.equal(value, parameter), name
        grad = gather(parameters[name].grad, model, name, tensor, is_gradient=True)  # type: ignore[arg-type]
        torch.testing.assert_close(grad, parameter.grad, atol=1e-10, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(model(tokens), reference(tokens), atol=1e-10, rtol=0)
    prompts = [[3, 1, 4], [5]]
    assert generate(model, prompts, max_new_tokens=4) == generate(reference, prompts, max_new_tokens=4)


def check_stages(cfg: ModelConfig, tensor: TensorParallel) -> None:
    """Between pipeline stages the hidden states are this rank's sequence shard."""
    tokens, labels = batch()
    whole = Transformer(cfg, vocab_size=VOCAB, tensor=tensor).double().initialize(SEED)
    first = Transformer(cfg, vocab_size=VOCAB, tensor=tensor, layers=range(1), has_head=False).double().initialize(SEED)
    last = Transformer(cfg, vocab_size=VOCAB, tensor=tensor, layers=range(1, 2), has_embedding=False).double().initialize(SEED)
    hidden = first(tokens)
    assert hidden.shape == (3, 8 // tensor.size if tensor.sequence_parallel else 8, 24)
    assert torch.equal(last(hidden, labels=labels), whole(tokens, labels=labels))


def check_loss(tensor: TensorParallel) -> None:
    logits = torch.arange(8, dtype=torch.float32) / 2
    local = logits.chunk(tensor.size)[tensor.rank].unsqueeze(0).clone().requires_grad_()
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, torch.tensor([6]), vocab_size=8, tensor=tensor)
    loss.backward()
    expected = torch.tensor([0.012103, 0.019955, 0.032901, 0.054244, 0.089433, 0.147450, -0.756896, 0.400810])
    assert loss.item() == pytest.approx(1.41426671, abs=1e-6)
    torch.testing.assert_close(local.grad[0], expected.chunk(tensor.size)[tensor.rank], atol=1e-6, rtol=0)  # type: ignore[index]
    assert torch.equal(local.detach(), before)

    padded = torch.zeros(16).index_copy(0, torch.arange(5), torch.arange(1.0, 6.0)).unsqueeze(0)
    part = padded.chunk(tensor.size, dim=1)[tensor.rank]
    loss = vocab_parallel_cross_entropy(part, torch.tensor([2]), vocab_size=5, tensor=tensor)
    assert loss.item() == pytest.approx(2.451914, abs=1e-6)

    wide = torch.randn(7, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 20, -100, 15, 16, 8, 7])
    options: dict[str, Any] = {"vocab_size": VOCAB, "label_smoothing": 0.1, "z_loss": 0.01}
    expected_loss = vocab_parallel_cross_entropy(wide, labels, **options)
    (expected,) = torch.autograd.grad(expected_loss, wide)
    mine = wide.detach().chunk(tensor.size, dim=1)[tensor.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, labels, tensor=tensor, **options)
    (grad,) = torch.autograd.grad(loss, mine)
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-12)
    torch.testing.assert_close(grad, expected.chunk(tensor.size, dim=1)[tensor.rank], atol=1e-12, rtol=0)


def check_dropout(tensor: TensorParallel) -> None:
    """Masks: equal over tp where activations are replicated, different over sequence shards; training repeats for its seed."""
    state = DropoutState(probability=0.5, seed=3)
    mask = dropout(torch.ones(64), state, "layers.0.mlp_residual", tensor)
    masks = [torch.empty(64) for _ in range(tensor.size)]
    dist.all_gather(masks, mask)
    distinct = {tuple(m.tolist()) for m in masks}
    assert len(distinct) == (tensor.size if tensor.sequence_parallel else 1)

    tokens, labels = batch()
    model = Transformer(dataclasses.replace(GPT2, dropout=0.5), vocab_size=VOCAB, tensor=tensor).double().initialize(SEED)
    losses = []
    for seed in (1, 2, 1):
        model.set_dropout_seed(seed)
        losses.append(model(tokens, labels=labels).item())
    assert losses[0] == losses[2] != losses[1]
    agreed: list[Any] = [None] * tensor.size
    dist.all_gather_object(agreed, losses)
    assert all(other == losses for other in agreed)


def check_bytes(tensor: TensorParallel) -> None:
    """What is recorded is what each operation of one forward and backward sends."""
    counted: Counter[str] = Counter()

    def record(operation: str, num_bytes: int) -> None:
        counted[operation] += num_bytes

    check_counted(dataclasses.replace(tensor, record=record), counted)


def check_counted(tensor: TensorParallel, counted: Counter[str]) -> None:
    counted.clear()
    model = Transformer(LLAMA, vocab_size=VOCAB, tensor=tensor).initialize(SEED)
    tokens, labels = batch()
    model(tokens, labels=labels).backward()
    hidden = 4 * tokens.numel() * 24
    statistics = 4 * tokens.numel() * 4  # of the loss: the maximum, then three sums
    # forward: embedding, two per layer; backward: two per layer and the head; with sequence parallelism each as a pair
    share = (tensor.size - 1) / tensor.size
    regions = 1 + 2 * LLAMA.num_layers
    expected = {"all_reduce": 2 * share * (statistics + (0 if tensor.sequence_parallel else 2 * regions * hidden))}
    if tensor.sequence_parallel:
        expected |= {"all_gather": share * 2 * regions * hidden, "reduce_scatter": share * 2 * regions * hidden}
    assert counted == expected


def check_refusals(tensor: TensorParallel) -> None:
    with pytest.raises(ValueError, match="num_heads=3"):
        Transformer(dataclasses.replace(LLAMA, num_heads=3, num_kv_heads=3), vocab_size=VOCAB, tensor=tensor)
    with pytest.raises(ValueError, match=f"tp={tensor.size}"):
        ColumnParallelLinear(4, 12, bias=False, std=1.0, tensor=tensor, num_blocks=3)
    if tensor.sequence_parallel:
        with pytest.raises(ValueError, match="got 7 tokens"):
            Transformer(LLAMA, vocab_size=VOCAB, tensor=tensor).initialize(SEED)(batch(7)[0])


def run_checks(rank: int, world_size: int) -> list[str]:
    done = []
    for sequence_parallel, split in ((False, False), (True, False), (True, True)):
        tensor = TensorParallel(
            group=dist.group.WORLD, rank=rank, size=world_size, sequence_parallel=sequence_parallel, split_backward=split
        )
        for name, cfg in CASES.items():
            if split and name != "grouped":
                continue
            options = LossConfig(label_smoothing=0.1, z_loss=0.01) if name in ("gpt2", "multi_query_biases") else None
            check_case(cfg, tensor, "full" if name == "gpt2" else "selective" if name == "grouped" else "none", options)
            done.append(name)
        for check in (check_loss, check_dropout, check_bytes, check_refusals):
            check(tensor)
        for cfg in (LLAMA, GPT2):
            check_stages(cfg, tensor)
    return done


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_one_process(tp: int) -> None:
    assert run_distributed(run_checks, tp) == [[*CASES, *CASES, "grouped"]] * tp


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [257, 50257])
def test_initial_values_do_not_depend_on_tp(tp: int, vocab: int) -> None:
    """Gathered parameters are bitwise those of one process; the padded vocabulary has one size."""
    cfg = dataclasses.replace(LLAMA, num_kv_heads=2, vocab_divisor=128, hidden_size=8, head_dim=2)
    whole = Transformer(cfg, vocab_size=vocab).initialize(SEED)
    ranks = [Transformer(cfg, vocab_size=vocab, tensor=TensorParallel(group=None, rank=r, size=tp)).initialize(SEED) for r in range(tp)]
    for name, expected in whole.named_parameters():
        gathered = torch.full_like(expected, float("nan"))
        for rank in ranks:
            spec, value = rank.parameter_specs()[name], rank.get_parameter(name)
            assert spec.shape == tuple(expected.shape)
            gathered[tuple(slice(o, o + s) for o, s in zip(spec.offset, spec.local_shape, strict=True))] = value.detach()
        assert torch.equal(gathered, expected), name
    assert len(whole.get_parameter("head.output.weight")) == -(-vocab // 128) * 128


def test_size_one_is_plain() -> None:
    tensor = TensorParallel(group=None, rank=0, size=1, sequence_parallel=True)
    model = Transformer(LLAMA, vocab_size=VOCAB, tensor=tensor).initialize(SEED)
    assert model.tensor is None
    assert all(not spec.partial_axes and not spec.replicated_axes for spec in model.parameter_specs().values())
    tokens, labels = batch(7)
    assert torch.equal(model(tokens, labels=labels), Transformer(LLAMA, vocab_size=VOCAB).initialize(SEED)(tokens, labels=labels))
