"""The fresh process in which queue_saves measures: `python -m benchmarks.queue_process`.

A worker that this process spawns imports this module first, as it would import a training script.
So the module imports almost nothing, and replaces the functions of torch.cuda in a worker before
the worker's own code runs.
"""

from __future__ import annotations

import multiprocessing


def _is_manager() -> bool:
    """True if this process is the server of a queue, which does not need torch."""
    return multiprocessing.current_process().name.startswith("SyncManager")


if __name__ == "__mp_main__" and not _is_manager():
    from . import no_cuda

    no_cuda.pretend()

if __name__ == "__main__":
    from . import queue_saves

    queue_saves.main()
