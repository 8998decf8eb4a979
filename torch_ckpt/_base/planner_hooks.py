"""Detects planner hooks that are not overridden and so need not be called."""

from __future__ import annotations


def keeps_methods(planner: object, kind: type, names: tuple[str, ...]) -> bool:
    """Returns True if a planner overrides none of these methods of ``kind``."""
    return isinstance(planner, kind) and all(
        getattr(getattr(planner, name), "__func__", None) is getattr(kind, name) for name in names
    )
