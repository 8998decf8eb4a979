"""Values that have state of their own."""

from __future__ import annotations

from typing import Any


def is_stateful(value: Any) -> bool:
    """Returns isinstance(value, Stateful), without its 20 microseconds before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
