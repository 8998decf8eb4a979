"""Work in a fresh process that has only imported torch."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.forked import server

P = ParamSpec("P")
R = TypeVar("R")

#: Time limit in seconds.
LIMIT = 120.0


def in_fresh_process(work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Runs a function of a module in a fresh process. Returns its result or raises its
    exception."""
    child = server().start(_answer, work, arguments, options)
    try:
        result, error = child.receive(LIMIT)
        assert error is not None or child.wait() == 0
    finally:
        child.kill()
    if error is not None:
        raise error
    return result


def _answer(
    connection: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    try:
        connection.send((work(*arguments, **options), None))
    except Exception as error:
        connection.send((None, error))


def process_memory(field: str) -> int:
    """Returns bytes of this process as the kernel counts them: "VmRSS" now, "VmHWM" at peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def reset_peak_memory() -> None:
    """Resets the peak that "VmHWM" reports."""
    Path("/proc/self/clear_refs").write_text("5")
