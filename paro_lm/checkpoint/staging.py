"""A copy of the state in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from paro_lm.parallel.buffer import FlatShard


class Stager:
    """Copies tensors to host memory that it keeps, page-locked where the device gains from it, from one save to the next.

    The copies of one `stage` are valid until the next: a save must have been written before another one is staged.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Mapping[str, FlatShard | torch.Tensor]) -> dict[str, FlatShard | torch.Tensor]:
        """The same tensors with their present values on the CPU. Costs host memory of the size of this rank's tensors."""
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in tensors}
        staged: dict[str, FlatShard | torch.Tensor] = {}
        devices = set()
        for name, tensor in tensors.items():
            source = (tensor.data if isinstance(tensor, FlatShard) else tensor).detach()
            copy = self._buffer(name, source).copy_(source, non_blocking=True)
            staged[name] = replace(tensor, data=copy) if isinstance(tensor, FlatShard) else copy
            if source.device.type != "cpu":
                devices.add(source.device)
        for device in devices:
            torch.accelerator.synchronize(device)
        return staged

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer
