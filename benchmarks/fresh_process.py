"""Runs a module of this package in a fresh process, in which nothing is warmed up."""

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
    """The process failed. The message contains its stderr."""


def run(module: str, arguments: Sequence[str], timeout: float | None = None) -> Any:
    """Runs `python -m benchmarks.MODULE ARGUMENTS`; returns the JSON value of its last line.

    After `timeout` seconds the process and the processes that it started are killed.
    """
    process = _start(module, arguments, os.environ)
    try:
        return _outcome(process, timeout)
    except subprocess.TimeoutExpired as error:
        raise FreshProcessError(f"benchmarks.{module} exceeded {timeout:.0f} s") from error
    finally:
        _kill(process)


def start_store() -> dist.TCPStore:  # type: ignore[name-defined]
    """Starts a store for ranks. As under torchrun, it must outlive every rank."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        _ADDRESS, 0, is_master=True, wait_for_workers=False
    )


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, in which `env://` makes a process group.

    Args:
        port: the port of the ranks' store.
    """
    return {
        **os.environ,
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def run_ranks(module: str, arguments: Sequence[str], world: int) -> list[Any]:
    """Runs a module as `world` ranks at once; returns their JSON values by rank.

    `env://` makes a process group in each rank. If a rank fails, all ranks and the processes that
    they started are killed.
    """
    store = start_store()
    ranks = [
        _start(module, arguments, environment_of(rank, world, store.port)) for rank in range(world)
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
    """Kills a process and the processes that it started, if any still run."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(process: subprocess.Popen[str], timeout: float | None = None) -> Any:
    output, errors = process.communicate(timeout=timeout)
    if process.returncode != 0:
        assert isinstance(process.args, list)
        command = " ".join(process.args[1:])
        raise FreshProcessError(f"{command} failed:\n{errors}")
    return json.loads(output.splitlines()[-1])
