"""Which of a planner's hooks are torch's own, so that calling them may be spared."""

from __future__ import annotations


def keeps_methods(planner: object, kind: type, names: tuple[str, ...]) -> bool:
    """Whether a planner's methods are all those of ``kind``, overridden nowhere."""
    return isinstance(planner, kind) and all(
        getattr(getattr(planner, name), "__func__", None) is getattr(kind, name) for name in names
    )
