"""paro-train of which a part is killed in the middle of step 4, the first time that torchrun starts it: with KILLED=rank rank 1, with
KILLED=node every rank started with that and its torchrun before it, as when a node is lost.
"""

from __future__ import annotations

import os
import signal

from paro_lm import train, trainer


class KilledTrainer(trainer.Trainer):
    def _forward_backward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        killed = os.environ.get("KILLED")
        if self.step + 1 == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if killed == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            if killed == "node" or (killed == "rank" and self.world.rank == 1):
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._forward_backward(*args, **kwargs)


if __name__ == "__main__":
    trainer.Trainer = KilledTrainer  # type: ignore[misc]
    train.main()
