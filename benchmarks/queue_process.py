"""The fresh process in which queue_saves measures: `python -m benchmarks.queue_process`.

A worker that is spawned from it imports this module first, as it would a training script. So this
one imports next to nothing, and it is where the worker's torch.cuda is made harmless: before any
code of the worker's own has run.
"""

from __future__ import annotations

import multiprocessing


def _is_manager() -> bool:
    """Whether this is the server of a queue, which by itself has no need of torch."""
    return multiprocessing.current_process().name.startswith("SyncManager")


if __name__ == "__mp_main__" and not _is_manager():
    from . import no_cuda

    no_cuda.pretend()

if __name__ == "__main__":
    from . import queue_saves

    queue_saves.main()
