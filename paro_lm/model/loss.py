"""Cross entropy, summed over tokens, of logits whose columns may be sliced over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paro_lm.parallel.tensor import TensorParallel

IGNORED_LABEL = -100


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tensor: TensorParallel | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum over tokens of -log softmax(logits)[label], a scalar in fp32 (fp64 for fp64 logits), equal on all ranks.

    `logits` [..., columns] are this rank's columns of a vocabulary padded to columns x ranks; those from `vocab_size` on take no part.
    `labels` [...] with -100 where there is no loss. `label_smoothing` as in torch's cross_entropy; `z_loss` adds z log(sum exp)^2.
    The logits are kept for backward and never overwritten; temporary memory is a few rows.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropy.apply(flat, labels.reshape(-1), tensor, vocab_size, label_smoothing, z_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tensor: TensorParallel | None, vocab_size: int, smoothing: float, z: float
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        first = 0 if tensor is None else tensor.rank * logits.shape[1]
        width = min(max(vocab_size - first, 0), logits.shape[1])
        targets = labels - first
        targets = targets.masked_fill((targets < 0) | (targets >= width), -1)

        log_sum = logits.new_full((len(labels),), float("-inf"), dtype=dtype)
        target_logit, logit_sum = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
        for rows in _row_blocks(logits) if width else ():
            block = logits[rows, :width].to(dtype)
            log_sum[rows] = torch.logsumexp(block, dim=1)
            if smoothing:
                logit_sum[rows] = block.sum(dim=1)
        if width:
            picked = logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1).to(dtype)
            target_logit = picked.masked_fill(targets < 0, 0.0)
        if tensor is not None:
            log_sum, target_logit, logit_sum = _combine(tensor, log_sum, target_logit, logit_sum)

        loss = log_sum - (1 - smoothing) * target_logit - (smoothing / vocab_size) * logit_sum
        if z:
            loss = loss + z * log_sum.square()
        counted = labels != IGNORED_LABEL
        ctx.save_for_backward(logits, targets, log_sum, counted)
        ctx.settings = (width, vocab_size, smoothing, z)
        return loss.masked_fill_(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum, counted = ctx.saved_tensors
        width, vocab_size, smoothing, z = ctx.settings
        scale = (counted * grad).unsqueeze(1)
        on_target = torch.where(targets.unsqueeze(1) >= 0, scale * (smoothing - 1), 0.0)
        weight = scale * (1 + 2 * z * log_sum.unsqueeze(1)) if z else scale
        output = torch.empty_like(logits)
        output[:, width:] = 0.0
        in_place = logits.dtype == log_sum.dtype
        for rows in _row_blocks(logits) if width else ():
            block = torch.sub(logits[rows, :width], log_sum[rows].unsqueeze(1), out=output[rows, :width] if in_place else None)
            block.exp_().mul_(weight[rows])
            if smoothing:
                block.sub_(scale[rows], alpha=smoothing / vocab_size)
            block.scatter_add_(1, targets[rows].clamp(min=0).unsqueeze(1), on_target[rows])
            if not in_place:
                output[rows, :width] = block
        return output, None, None, None, None, None


def _row_blocks(logits: Tensor) -> list[slice]:
    """Blocks of rows that stay in a CPU's cache, or that bound the temporary memory of an accelerator."""
    elements = 1 << 18 if logits.device.type == "cpu" else 1 << 25
    step = max(1, elements // max(1, logits.shape[1]))
    return [slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step)]


def _combine(tensor: TensorParallel, log_sum: Tensor, target_logit: Tensor, logit_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three per-token quantities over the whole vocabulary from those of each rank's columns."""
    largest = tensor.all_reduce(log_sum.clone(), op=dist.ReduceOp.MAX)
    total, target_logit, logit_sum = tensor.all_reduce(torch.stack([(log_sum - largest).exp(), target_logit, logit_sum])).unbind()
    return total.log() + largest, target_logit, logit_sum
