"""Detects values that have a ``state_dict``."""

from __future__ import annotations

from typing import Any


def is_stateful(value: Any) -> bool:
    """Returns the same as isinstance(value, Stateful), which takes 20 µs before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
