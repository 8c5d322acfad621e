"""Cross entropy against torch's and against worked examples, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paro_lm.model.loss import vocab_parallel_cross_entropy


def test_worked_example() -> None:
    logits = (torch.arange(8, dtype=torch.float32) / 2).unsqueeze(0).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([6]), vocab_size=8)
    loss.backward()
    assert loss.item() == pytest.approx(1.41426671, abs=1e-6)
    expected = torch.tensor([[0.012103, 0.019955, 0.032901, 0.054244, 0.089433, 0.147450, -0.756896, 0.400810]])
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=0)
    assert torch.equal(logits.detach(), before)


def test_padding_takes_no_part() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([2]), vocab_size=5)
    loss.backward()
    assert loss.item() == pytest.approx(2.451914, abs=1e-6)
    assert (logits.grad[0, 5:] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 5, 11), (1, 1, 1), (2, 7, 70000)])
def test_equals_torch(shape: tuple[int, int, int], smoothing: float) -> None:
    """70 000 columns: several blocks of rows. 1e-12 in float64, of the sum and of every gradient."""
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:2], generator=generator)
    labels.view(-1)[::3] = -100
    if (labels == -100).all():
        labels[...] = 0
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad(expected * 1.7, logits)
    loss = vocab_parallel_cross_entropy(logits, labels, vocab_size=shape[-1], label_smoothing=smoothing)
    for _ in range(2):  # backward may run twice
        (grad,) = torch.autograd.grad(loss * 1.7, logits, retain_graph=True)
        torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(loss, expected, atol=1e-15, rtol=1e-12)


def test_z_loss() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 8, -100, 0])
    counted = logits[labels >= 0]
    expected = F.cross_entropy(logits, labels, reduction="sum") + 0.01 * counted.logsumexp(1).square().sum()
    (expected_grad,) = torch.autograd.grad(expected, logits)
    loss = vocab_parallel_cross_entropy(logits, labels, vocab_size=9, z_loss=0.01)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-12)
    torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    logits = (torch.randn(65, 999) * 2).to(dtype).requires_grad_()
    labels = torch.randint(0, 999, (65,))
    loss = vocab_parallel_cross_entropy(logits, labels, vocab_size=999)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=2**-8)


def test_no_label_gives_zero() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.full((3,), -100), vocab_size=4)
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()
