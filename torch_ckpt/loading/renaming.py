"""New names for the values of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torch_ckpt._base.formatting import some_of

#: A function from old names to new names; or pairs of an old and a new name, as a mapping or a
#: sequence. Each ``*`` in an old name matches any text, which replaces the corresponding ``*`` in
#: the new name. The first pair whose old name matches the complete name applies.
Rename = Mapping[str, str] | Iterable[tuple[str, str]] | Callable[[str], str] | None


# Maximum number of pairs in a suggested renaming.
_MAX_SUGGESTED = 4

# Maximum number of stored names that are compared with a missing name.
_MAX_CANDIDATES = 64


def new_names(names: Iterable[str], rename: Rename, title: str = "rename") -> dict[str, str]:
    """Maps each old name to its new name, in the order of the old names.

    Args:
        names: all old names.
        rename: the function or pairs that rename them. Names without a match are kept.
        title: the name of the caller's option, for errors.

    Raises:
        ValueError: ``rename`` or one of its pairs matches no name, two names would become the same,
            or ``rename`` has the wrong form.
    """
    names = list(names)
    if rename is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    if callable(rename):
        found = {name: _checked(rename(name), name, title) for name in names}
        if names and all(old == new for old, new in found.items()):
            raise ValueError(f"{title} does not change any name; the names are {some_of(names)}")
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


def suggested_rename(
    names: Iterable[str], missing: Iterable[str], unexpected: Iterable[str]
) -> dict[str, str] | None:
    """Returns the pairs for ``rename`` that give every missing name a value of the checkpoint.

    Names that fit are kept. None if names differ by more than a few prefixes.

    Args:
        names: all names in the checkpoint.
        missing: names that the checkpoint lacks.
        unexpected: the names in the checkpoint that nothing needs.
    """
    available = set(unexpected)
    remaining = list(missing)
    pairs: dict[str, str] = {}
    while remaining:
        prefixes = _prefixes(remaining, available)
        if prefixes is None or len(pairs) == _MAX_SUGGESTED:
            return None
        old, new = prefixes
        pairs[f"{old}*"] = f"{new}*"
        remaining = [
            name
            for name in remaining
            if not (name.startswith(new) and old + name.removeprefix(new) in available)
        ]
    names = list(names)
    fitting = [name for name in names if name not in available]
    # A pattern such as "*" also matches names that fit, so name their keys first.
    keys = dict.fromkeys(name.partition(".")[0] for name in fitting)
    patterns = [key if key in fitting else f"{key}.*" for key in keys]
    kept = dict(zip(patterns, patterns, strict=True))
    for tried in (pairs, kept | pairs):
        try:
            found = new_names(names, tried)
        except ValueError:
            continue
        is_kept = all(found[name] == name for name in fitting)
        if is_kept and set(missing) <= set(found.values()) and len(tried) <= _MAX_SUGGESTED:
            return tried
    return None


def _prefixes(missing: list[str], available: set[str]) -> tuple[str, str] | None:
    """Returns the prefix of a stored name and the prefix that replaces it, so that the first
    missing name and as many others as possible fit."""
    first = missing[0]
    starts = [0, *(position + 1 for position, char in enumerate(first) if char == ".")]
    for start in starts:
        end = first[start:]
        ends = (name for name in sorted(available) if name == end or name.endswith(f".{end}"))
        candidates = [name.removesuffix(end) for name in ends if name != first]
        if len(candidates) > _MAX_CANDIDATES:
            return None
        if candidates:
            new = first[:start]
            beneath = [name.removeprefix(new) for name in missing if name.startswith(new)]
            old = max(candidates, key=lambda old: sum(old + name in available for name in beneath))
            return old, new
    return None


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

    Keeps the longest end of the old path in which the new name also ends. The text before it
    becomes a single key.
    """
    # Do not trust the stored path: if it does not spell the old name, loading it could create a
    # long list for each name.
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
        raise ValueError(f"{title} must consist of pairs of str, got {old!r} and {new!r}")
    if old.count("*") != new.count("*"):
        raise ValueError(
            f"{title}: {old!r} has {old.count('*')} '*', but {new!r} has {new.count('*')}; the old "
            "and the new name must have equally many"
        )
    return re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL)
