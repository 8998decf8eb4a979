"""Runs a module of this package in a process of its own, where nothing has been warmed up yet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

_REPOSITORY = Path(__file__).resolve().parents[1]
_ADDRESS = "127.0.0.1"


class FreshProcessError(RuntimeError):
    """The process failed. Holds what it wrote to stderr."""


def run(module: str, arguments: Sequence[str], timeout: float | None = None) -> Any:
    """The JSON value that `python -m benchmarks.MODULE ARGUMENTS` printed as its last line.

    After `timeout` seconds the process and those that it has started are killed.
    """
    process = _start(module, arguments, os.environ)
    try:
        return _outcome(process, timeout)
    except subprocess.TimeoutExpired as error:
        raise FreshProcessError(f"benchmarks.{module} took more than {timeout:.0f} s") from error
    finally:
        _kill(process)


def run_ranks(module: str, arguments: Sequence[str], world: int) -> list[Any]:
    """The same of `world` processes at once, in which `env://` makes a process group, by rank.

    Where one fails, all are killed, with the processes that they have started.
    """
    # As torchrun's agent does it: the store outlives every rank.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _ADDRESS, 0, is_master=True, wait_for_workers=False
    )
    common = {
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        _start(
            module, arguments, {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        outcomes = [pool.submit(_outcome, rank) for rank in ranks]
        try:
            for outcome in as_completed(outcomes):
                outcome.result()
        except BaseException:
            # The others would wait for it for minutes, and its workers for ever.
            for rank in ranks:
                _kill(rank)
            raise
    return [outcome.result() for outcome in outcomes]


def _start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=_REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills what is left of a process and of those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(process: subprocess.Popen[str], timeout: float | None = None) -> Any:
    output, errors = process.communicate(timeout=timeout)
    if process.returncode != 0:
        assert isinstance(process.args, list)
        command = " ".join(process.args[1:])
        raise FreshProcessError(f"{command} failed:\n{errors}")
    return json.loads(output.splitlines()[-1])
