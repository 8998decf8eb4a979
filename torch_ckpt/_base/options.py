"""Options that are refused, named for who was called and not for who was to get them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any


def refuse_unknown(caller: Callable[..., Any], kind: type, options: Iterable[str]) -> None:
    """Refuses options that neither the caller nor what it passes them to has.

    Args:
        caller: a function or class that takes options of its own by name.
        kind: of ours, derived from torch's class of the same name; it gets the others.

    Raises:
        TypeError: one is unknown; names the nearest.
    """
    passed_on = options_of(kind)
    for option in options:
        if option not in passed_on:
            hint = _hint(option, passed_on | names_of(caller))
            raise TypeError(
                f"{caller.__name__}() got an unexpected keyword argument {option!r}{hint}"
            )


def given_options(title: str, options: Any, known: Collection[str]) -> dict[str, Any]:
    """Receives a mapping of options; refuses unknown names, and makes the values reusable.

    Args:
        title: the name of the mapping, for errors.
        options: the mapping that the caller passed; None for no options.
        known: the names that it may have.

    Returns:
        A dict of its own. See :func:`reusable` for the values.

    Raises:
        TypeError: it is not a mapping, or a name is unknown; names the nearest.
    """
    options = options or {}
    if not isinstance(options, Mapping):
        raise TypeError(f"{title} must be a dict of options, got {options!r}")
    for option in options:
        if option not in known:
            raise TypeError(f"{title} has an unknown option {option!r}{_hint(option, known)}")
    return reusable_options(options)


def _hint(option: object, known: Collection[str]) -> str:
    near = get_close_matches(str(option), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def reusable(option: Any) -> Any:
    """Makes a tuple of an iterator, such as a generator or ``zip()``, which can be read only once.

    Everything else is returned unchanged. Call it where a public function receives the option.
    """
    return tuple(option) if isinstance(option, Iterator) else option


def reusable_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a mapping of options with :func:`reusable` values."""
    return {name: reusable(option) for name, option in options.items()}


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a value of the option ``name`` that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@functools.cache
def options_of(kind: type) -> frozenset[str]:
    """What a class of ours takes, and torch's of the same name, but for the path."""
    return (names_of(kind) | names_of(kind.__mro__[1])) - {"path"}


@functools.cache
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(one.name for one in parameters if one.kind not in variable)
