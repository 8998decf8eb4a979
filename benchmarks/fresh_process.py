"""Calls functions in fresh processes, in which nothing is warmed up.

``python -m benchmarks.fresh_process MODULE:FUNCTION ARGUMENTS`` is such a process. It prints the
returned value as JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

_REPOSITORY = Path(__file__).resolve().parents[1]
_ADDRESS = "127.0.0.1"
#: The workers of a process with this variable find no GPU missing.
PRETENDS = "TORCH_CKPT_BENCHMARK_PRETENDS"


class FreshProcessError(RuntimeError):
    """The process failed. The message contains its stderr."""


def run(function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
    """Calls a function of a module in a fresh process. Arguments and result pass as JSON.

    After `timeout` seconds the process and the processes that it started are killed.
    """
    process = _start(function, arguments, os.environ)
    try:
        return _outcome(process, timeout)
    except subprocess.TimeoutExpired as error:
        name = f"{function.__module__}.{function.__name__}"
        raise FreshProcessError(f"{name} exceeded {timeout:.0f} s") from error
    finally:
        _kill(process)


def start_store() -> dist.TCPStore:  # type: ignore[name-defined]
    """Starts a store for ranks. As under torchrun, it must outlive every rank."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        _ADDRESS, 0, is_master=True, wait_for_workers=False
    )


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns the variables of a rank, with which `env://` makes a process group.

    Args:
        port: the port of the ranks' store.
    """
    return {
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world: int,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls a function on `world` ranks at once; returns the results by rank.

    `env://` makes a process group in each rank. If a rank fails, all ranks and the processes that
    they started are killed.
    """
    store = start_store()
    common = os.environ | (variables or {})
    ranks = [
        _start(function, arguments, common | environment_of(rank, world, store.port))
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        outcomes = [pool.submit(_outcome, rank) for rank in ranks]
        try:
            for outcome in as_completed(outcomes):
                outcome.result()
        except BaseException:
            # The other ranks would wait for the failed rank for minutes, its workers for ever.
            for rank in ranks:
                _kill(rank)
            raise
    return [outcome.result() for outcome in outcomes]


def _start(
    function: Callable[..., Any], arguments: Sequence[Any], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    name = f"{function.__module__}:{function.__name__}"
    return subprocess.Popen(
        [sys.executable, "-m", __name__, name, json.dumps(arguments, default=str)],
        cwd=_REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and the processes that it started, if any still run."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(process: subprocess.Popen[str], timeout: float | None = None) -> Any:
    output, errors = process.communicate(timeout=timeout)
    if process.returncode != 0:
        assert isinstance(process.args, list)
        raise FreshProcessError(f"{' '.join(process.args[2:])} failed:\n{errors}")
    return json.loads(output.splitlines()[-1])


def _call(name: str, arguments: str) -> None:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # A normal exit would wait for workers, which do not end after a failure.
        os.killpg(0, signal.SIGKILL)
    print("\n" + json.dumps(found), flush=True)


# A worker that this process spawns imports this module first, as it would import a training script.
# The server of a queue does not need torch.
if (
    __name__ == "__mp_main__"
    and PRETENDS in os.environ
    and not multiprocessing.current_process().name.startswith("SyncManager")
):
    from benchmarks import no_cuda

    no_cuda.pretend()

if __name__ == "__main__":
    _call(*sys.argv[1:])
