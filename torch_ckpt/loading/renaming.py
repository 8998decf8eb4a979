"""New names for the values of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torch_ckpt._base.formatting import some_of

#: A function that returns the new name for an old one; or pairs of old and new names, as a mapping
#: or a sequence. Each ``*`` in an old name matches any text, which replaces the ``*`` in the same
#: position of the new name. The first pair that matches the complete name applies.
Rename = Mapping[str, str] | Iterable[tuple[str, str]] | Callable[[str], str] | None


def new_names(names: Iterable[str], rename: Rename, title: str = "rename") -> dict[str, str]:
    """Maps each old name to its new one, in their order.

    Args:
        names: all old names.
        rename: gives new names; a name that it does not match is kept.
        title: the name of the caller's option, for errors.

    Raises:
        ValueError: ``rename`` matches nothing, gives two names the same new name, or has the wrong
            form.
    """
    names = list(names)
    if rename is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    if callable(rename):
        found = {name: _checked(rename(name), name, title) for name in names}
        if names and all(old == new for old, new in found.items()):
            raise ValueError(f"{title} changes no name; the names are {some_of(names)}")
    else:
        pairs = list(rename.items() if isinstance(rename, Mapping) else rename)
        patterns = [(_pattern(old, new, title), new) for old, new in pairs]
        unmatched = dict.fromkeys(range(len(pairs)))
        for name in names:
            found[name] = name
            is_first = True
            for number, (pattern, new) in enumerate(patterns):
                match = pattern.fullmatch(name)
                if match is not None:
                    unmatched.pop(number, None)
                    if is_first:
                        parts = iter(match.groups())
                        found[name] = re.sub(r"\*", lambda _: next(parts), new)  # noqa: B023
                        is_first = False
        if unmatched:
            nothing = ", ".join(repr(pairs[number][0]) for number in unmatched)
            raise ValueError(
                f"{title}: no name matches {nothing}; the names are {some_of(names) or 'none'}"
            )
    olds: dict[str, str] = {}
    for old, new in found.items():
        other = olds.setdefault(new, old)
        if other != old:
            raise ValueError(f"{title}: both {other} and {old} would become {new}")
    return found


def rename_in(metadata: Metadata, rename: Rename) -> None:
    """Renames all values of a checkpoint in its metadata.

    Raises:
        ValueError: see :func:`new_names`.
    """
    if rename is None:
        return
    new = new_names(metadata.state_dict_metadata, rename)
    metadata.state_dict_metadata = {
        new[name]: stored for name, stored in metadata.state_dict_metadata.items()
    }
    if isinstance(metadata.storage_data, dict):
        metadata.storage_data = {
            MetadataIndex(new.get(index.fqn, index.fqn), index.offset, index.index): place
            for index, place in metadata.storage_data.items()
        }
    if isinstance(metadata.planner_data, dict):
        metadata.planner_data = {
            new[name]: new_path(path, name, new[name])
            for name, path in metadata.planner_data.items()
            if name in new
        }


def new_path(path: Any, old: str, name: str) -> tuple[str | int, ...]:
    """Returns the path of a renamed value in nested dicts and lists.

    The parts of the old path in which the new name still ends are kept; the text before them
    becomes one part.
    """
    # Without this check, a path that does not spell the old name could make a long list for each
    # new name.
    is_spelled = isinstance(path, tuple) and ".".join(map(str, path)) == old
    parts = tuple(path) if is_spelled else (name,)
    for begin in range(len(parts)):
        end = ".".join(map(str, parts[begin:]))
        if name == end:
            return parts[begin:] if isinstance(parts[begin], str) else (name,)
        if name.endswith(f".{end}") and begin:
            return name[: -len(end) - 1], *parts[begin:]
    return (name,)


def _checked(new: Any, old: str, title: str) -> str:
    if not isinstance(new, str):
        raise ValueError(f"{title} must return a str for each name, got {new!r} for {old}")
    return new


def _pattern(old: Any, new: Any, title: str) -> re.Pattern[str]:
    if not isinstance(old, str) or not isinstance(new, str):
        raise ValueError(f"{title} must have pairs of str, got {old!r} and {new!r}")
    if old.count("*") != new.count("*"):
        raise ValueError(
            f"{title}: {old!r} has {old.count('*')} '*' and {new!r} has {new.count('*')}; each '*' "
            "in the new name needs one in the old name"
        )
    return re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL)
