"""Hooks at the fault points of the product (csrc/os/fault.h): to look, to wait, or to fail a call.

A point has an operation and a path. The operation is that of a system call (``rename``, ``fsync``),
or a moment in words that Python reaches; docs/testing.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch_ckpt import _C

#: Gets operation and path. Returns None or 0, or the errno that the call fails with.
Hook = Callable[[str, str], "int | None"]


@contextmanager
def at_fault_points(hook: Hook) -> Iterator[None]:
    """Calls ``hook`` at each point, from any thread.

    What the hook raises is raised at the end of the ``with``, if nothing else is.
    """
    raised: list[BaseException] = []

    def careful(operation: str, path: str) -> int:
        try:
            return hook(operation, path) or 0
        except BaseException as error:
            raised.append(error)
            return 0

    with _C.FaultHook(careful):
        yield
    if raised:
        raise raised[0]


@contextmanager
def before(operation: str, act: Callable[[], object], path: str | Path = "") -> Iterator[None]:
    """Calls ``act`` before the first such operation on ``path``, or on any path; it must come."""
    has_come: list[bool] = []

    def hook(at: str, where: str) -> None:
        if not has_come and at == operation and os.fspath(path) in ("", where):
            has_come.append(True)
            act()

    with at_fault_points(hook):
        yield
    assert has_come, f"{operation} was not reached"


@contextmanager
def calling(actions: Mapping[str, Callable[[], object]]) -> Iterator[None]:
    """Calls the action of an operation each time before it, on any path."""

    def hook(operation: str, _path: str) -> None:
        if operation in actions:
            actions[operation]()

    with at_fault_points(hook):
        yield


@contextmanager
def failing(operation: str, error: int, path: str | Path = "") -> Iterator[None]:
    """Every such operation on ``path``, or on any path, fails with the errno; one must come."""
    has_come: list[bool] = []

    def hook(at: str, where: str) -> int:
        if at != operation or os.fspath(path) not in ("", where):
            return 0
        has_come.append(True)
        return error

    with at_fault_points(hook):
        yield
    assert has_come, f"{operation} was not reached"
