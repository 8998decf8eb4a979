"""Cases that end in every way, and a program, for tests of the launcher.

    python -m tests.distributed.launched PATH (hang|environment|fail)

``hang`` writes its process id to PATH, a pipe, and does not end. ``environment`` writes the
variables to PATH-{rank}.json. ``fail`` hangs on all ranks but the last, which fails when the others
hang.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.cases import Launch


def case_passes(launch: Launch) -> None:
    """Writes its process ids to files."""
    path = launch.path(str(launch.rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(os.getpid()))
    dist.barrier()


def case_all_fail(launch: Launch) -> None:
    raise AssertionError(f"on purpose on {launch.rank}")


def case_one_fails(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    assert launch.rank == 0, "on purpose"
    signal.pause()


def case_one_dies(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    if launch.rank == 1:
        os._exit(7)
    signal.pause()


def case_one_hangs(launch: Launch) -> None:
    print(f"{launch.rank} has begun")
    dist.barrier()
    if launch.rank == 1:
        signal.pause()


def case_one_exits_with_code_3(launch: Launch) -> None:
    if launch.rank == 1:
        atexit.register(os._exit, 3)


def main() -> None:
    path, what = sys.argv[1:]
    if what == "environment":
        Path(f"{path}-{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
        return
    print("said before the hang", flush=True)
    if what == "fail":
        dist.init_process_group("gloo")
        dist.barrier()
        assert dist.get_rank() < dist.get_world_size() - 1, "on purpose"
    else:
        with open(path, "w") as pipe:
            pipe.write(f"{os.getpid()}\n")
    signal.pause()


if __name__ == "__main__":
    main()
