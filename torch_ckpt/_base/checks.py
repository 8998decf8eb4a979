"""Checks options. Errors name the function that the user called, not the function that an option
is passed on to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn


def refuse_keyword(
    caller: Callable[..., Any],
    given: Iterable[str],
    groups: Mapping[str, Mapping[str, str] | Collection[str]],
) -> NoReturn:
    """Raises TypeError for the first of the keywords that a function does not accept. The message
    names each object that has the option, or suggests the nearest name.

    Args:
        caller: the function or class that the user called.
        given: the keywords.
        groups: the options of each typed argument, by a text such as "options=WriteOptions(...)".
            A mapping gives the name of the field for each keyword; "" if the keyword stood for all
            fields.
    """
    keyword = next(iter(given))
    name = caller.__name__
    if keyword == "staging_dir":
        raise TypeError(
            f"{name}() has no option staging_dir: no file is staged on a local disk any more. Omit "
            "it"
        )
    places = []
    for argument, options in groups.items():
        if keyword in options:
            field = options[keyword] if isinstance(options, Mapping) else keyword
            places.append(argument.replace("...", f"{field}=...") if field else argument)
    if places:
        raise TypeError(
            f"{name}() does not accept {keyword!r} as a keyword. Pass it in an object: "
            f"{' or '.join(places)}"
        )
    known = names_of(caller).union(*groups.values())
    raise TypeError(
        f"{name}() got an unexpected keyword argument {keyword!r}{_hint(keyword, known)}"
    )


def _hint(option: object, known: Collection[str]) -> str:
    near = get_close_matches(str(option), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def reusable(option: Any) -> Any:
    """Converts an iterator, such as a generator or ``zip()``, to a tuple that can be read again.

    Returns other values unchanged. Public functions use it for options that they read repeatedly.
    """
    return tuple(option) if isinstance(option, Iterator) else option


def require_instance(name: str, value: object, kind: type, module: str = "torch_ckpt") -> None:
    """Raises TypeError if the value of an option is no object of its type.

    Args:
        module: the module in which the type is public.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {module}.{kind.__name__}, got {value!r}")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError if the value of an option is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def require_at_least(name: str, value: int, least: int) -> None:
    """Raises ValueError if the value of an option is too small."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def require_io_options(thread_count: int | None, direct_io: bool | str) -> None:
    """Raises ValueError if an option that reads and writes share is invalid."""
    if thread_count is not None:
        require_at_least("thread_count", thread_count, 1)
    if direct_io not in (True, False, "auto"):
        raise ValueError(f'direct_io must be True, False or "auto", got {direct_io!r}')


@functools.cache
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a function's parameters, without ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(one.name for one in parameters if one.kind not in variable)
