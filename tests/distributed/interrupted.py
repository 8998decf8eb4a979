"""Runs an example and interrupts one of its ranks.

    python -m tests.distributed.interrupted SIGNAL RANK STEP SCRIPT [ARGUMENT ...]

The rank sends itself the signal at the save of that step, so the signal always arrives at one point
of the training. A save of an earlier step may be running then.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

import torch_ckpt


def main() -> None:
    name, rank, at_step, script, *arguments = sys.argv[1:]
    save = torch_ckpt.CheckpointManager.save

    def interrupted(self: Any, step: int, *rest: Any, **options: Any) -> bool:
        if step == int(at_step) and os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.Signals[name])
        return save(self, step, *rest, **options)

    torch_ckpt.CheckpointManager.save = interrupted  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
