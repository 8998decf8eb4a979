"""Hooks at the fault points of the product (csrc/os/fault.h), which observe, delay or fail a call.

A fault point has an operation and a path. The operation is the name of a system call (``rename``,
``fsync``), or words for a moment in Python code; docs/testing.md lists them. A ``path`` argument
may be a pattern (``*/.metadata``); an empty one matches any path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from tests.gates import Gate
from torch_ckpt import _core

#: Is called with operation and path. Returns None or 0, or the errno that the call fails with.
Hook = Callable[[str, str], "int | None"]

# The active hooks. The product calls the outermost one, which calls all of them.
_hooks: tuple[Hook, ...] = ()


@contextmanager
def at_fault_points(hook: Hook) -> Iterator[None]:
    """Calls ``hook`` at each point, from any thread. Hooks can be nested.

    An exception of the hook is raised at the end of the ``with``, unless another is raised. The
    outermost ``with`` waits for running calls of its hook.
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
    """Calls ``act`` before the first such operation. Fails if there is none."""
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
    """Calls an operation's action before each such operation on any path."""

    def hook(operation: str, _path: str) -> None:
        if operation in actions:
            actions[operation]()

    with at_fault_points(hook):
        yield


@contextmanager
def failing(operation: str, error: int, path: str | Path = "") -> Iterator[None]:
    """Fails every such operation with the errno. Fails if there is none."""
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
    """Blocks threads at such an operation until the gate is opened, or until the end of the
    block."""
    gate = Gate()
    with at_fault_points(lambda at, where: gate() if at == operation and _fits(where, path) else 0):
        try:
            yield gate
        finally:
            gate.open()


def _fits(path: str, wanted: str | Path) -> bool:
    pattern = os.fspath(wanted)
    return pattern in ("", path) or fnmatchcase(path, pattern)
