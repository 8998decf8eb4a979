"""Copies of containers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def is_container(value: Any) -> bool:
    """Returns True for a dict, list or tuple, and for subclasses of dict.

    Subclasses of list and tuple, such as named tuples, are leaves, as for torch's planners.
    """
    return type(value) in (list, tuple) or isinstance(value, dict)


def map_children(container: Any, each: Callable[[Any, Any], Any]) -> Any:
    """Returns a copy of a container, with each value replaced by ``each(value, key)``.

    The copy has the type and the attributes of the container. The order of the calls is the order
    of the values.

    Args:
        container: see :func:`is_container`.
        each: called with a value and its key or index.
    """
    kind = type(container)
    if kind is dict:
        return {key: each(value, key) for key, value in container.items()}
    if kind in (list, tuple):
        return kind(each(value, index) for index, value in enumerate(container))
    copied = copy.copy(container)
    for key, value in container.items():
        copied[key] = each(value, key)  # update() would add to the counts of a Counter
    return copied
