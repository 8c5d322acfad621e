"""What happens when a step is not finite: the loss scale of fp16, and the count of skipped steps."""

from __future__ import annotations

from typing import Any

from paro_lm.config import PrecisionConfig


class LossScaler:
    """The factor on the loss before backward; gradients are divided by it before clipping.

    Off (factor 1, for every type but fp16), static (a fixed factor), or dynamic: halved by an update that is not finite, doubled
    after `window` finite updates in a row. Updated once per optimizer step, not per micro-batch, with the same `finite` on every rank.
    """

    MINIMUM = 1.0
    MAXIMUM = 2.0**40

    def __init__(self, *, initial: float = 1.0, dynamic: bool = False, window: int = 2000) -> None:
        if initial <= 0:
            raise ValueError(f"The loss scale must be positive, got {initial}; a usual first value is 65536.")
        if dynamic and window < 1:
            raise ValueError(f"precision.loss_scale_window={window} must be at least 1.")
        self.scale = float(initial)
        self.dynamic = dynamic
        self.window = window
        self._good_updates = 0

    @classmethod
    def from_config(cls, cfg: PrecisionConfig) -> LossScaler:
        """The scaler of a precision: only fp16 has one. Raises ValueError for a loss scale where none is used."""
        if cfg.param_dtype != "fp16":
            if cfg.loss_scale is not None:
                raise ValueError(
                    f"precision.loss_scale={cfg.loss_scale} has no effect with precision.param_dtype={cfg.param_dtype}; "
                    "only fp16 needs a loss scale: leave it null or use precision=fp16."
                )
            return cls()
        if cfg.loss_scale is not None:
            return cls(initial=cfg.loss_scale)
        return cls(initial=cfg.initial_loss_scale, dynamic=True, window=cfg.loss_scale_window)

    def update(self, finite: bool) -> None:
        """Adapt the scale after one attempted update."""
        if not self.dynamic:
            return
        if not finite:
            self.scale = max(self.scale / 2, self.MINIMUM)
            self._good_updates = 0
            return
        self._good_updates += 1
        if self._good_updates == self.window:
            self.scale = min(self.scale * 2, self.MAXIMUM)
            self._good_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, as plain numbers."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; a scaler that is off or static keeps the scale of the present config."""
        if self.dynamic:
            self.scale, self._good_updates = float(state["scale"]), int(state["good_updates"])


class NonFiniteError(RuntimeError):
    """Training diverged: too many steps in a row were not finite."""


class SkipCounter:
    """Counts attempts that became updates and attempts that were skipped; gives up after `max_in_a_row` skips in a row.

    `updates` is the position of the learning-rate schedule. attempts = updates + skipped.
    """

    def __init__(self, *, max_in_a_row: int) -> None:
        if max_in_a_row < 1:
            raise ValueError(f"optim.max_skipped_steps={max_in_a_row} must be at least 1.")
        self.max_in_a_row = max_in_a_row
        self.updates = 0
        self.skipped = 0
        self.in_a_row = 0

    def record(self, finite: bool, *, step: int, loss: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Count one attempt; the values given are for the message. Raises NonFiniteError at the limit, on every rank alike."""
        if finite:
            self.updates += 1
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.max_in_a_row:
            raise NonFiniteError(
                f"Step {step}: loss {loss} and gradient norm {grad_norm} (loss scale {loss_scale:g}) make {self.in_a_row} steps in a row "
                f"that are not finite (optim.max_skipped_steps={self.max_in_a_row}). Resume from an earlier checkpoint with a lower "
                "optim.lr, a longer optim.warmup_steps, or precision=bf16 / fp32."
            )

    def state_dict(self) -> dict[str, int]:
        """What a resume needs."""
        return {"updates": self.updates, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state_dict`."""
        self.updates, self.skipped, self.in_a_row = state["updates"], state["skipped"], state["in_a_row"]
