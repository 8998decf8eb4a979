"""Hooks at the fault points of the product (csrc/os/fault.h): to look, to wait, or to fail a call.

A point has an operation and a path. The operation is that of a system call (``rename``, ``fsync``),
or a moment in words that Python reaches; docs/testing.md lists them. Where a path is asked for, it
may be a pattern (``*/.metadata``); an empty one is any path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from tests.gates import Gate
from torch_ckpt import _core

#: Gets operation and path. Returns None or 0, or the errno that the call fails with.
Hook = Callable[[str, str], "int | None"]

# Those that are in force; the outermost, which the product calls, calls them all.
_hooks: tuple[Hook, ...] = ()


@contextmanager
def at_fault_points(hook: Hook) -> Iterator[None]:
    """Calls ``hook`` at each point, from any thread; hooks can be nested.

    What the hook raises is raised at the end of the ``with``, if nothing else is. The outermost
    ``with`` waits for calls of its hook that are under way.
    """
    global _hooks
    raised: list[BaseException] = []

    def careful(operation: str, path: str) -> int:
        try:
            return hook(operation, path) or 0
        except BaseException as error:
            raised.append(error)
            return 0

    before = _hooks
    _hooks = (*before, careful)
    try:
        if before:
            yield
        else:
            with _core.FaultHook(
                lambda *point: next(filter(None, [one(*point) for one in _hooks]), 0)
            ):
                yield
    finally:
        _hooks = before
    if raised:
        raise raised[0]


@contextmanager
def before(operation: str, act: Callable[[], object], path: str | Path = "") -> Iterator[None]:
    """Calls ``act`` before the first such operation; it must come."""
    has_come: list[bool] = []

    def hook(at: str, where: str) -> None:
        if not has_come and at == operation and _fits(where, path):
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
    """Every such operation fails with the errno; one must come."""
    has_come: list[bool] = []

    def hook(at: str, where: str) -> int:
        if at != operation or not _fits(where, path):
            return 0
        has_come.append(True)
        return error

    with at_fault_points(hook):
        yield
    assert has_come, f"{operation} was not reached"


@contextmanager
def held(operation: str, path: str | Path = "") -> Iterator[Gate]:
    """Who comes to such an operation waits until the gate is opened, or until the end."""
    gate = Gate()
    with at_fault_points(lambda at, where: gate() if at == operation and _fits(where, path) else 0):
        try:
            yield gate
        finally:
            gate.open()


def _fits(path: str, wanted: str | Path) -> bool:
    pattern = os.fspath(wanted)
    return pattern in ("", path) or fnmatchcase(path, pattern)
