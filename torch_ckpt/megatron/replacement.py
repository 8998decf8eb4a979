"""Our classes instead of Megatron-core's and nvidia-resiliency-ext's.

Neither package has a plug-in point: both look their writer, reader, queue and functions up by name,
some when they are imported and some at each save. So the names are what is replaced:

1. In the modules that define them, for whoever looks there from now on.
2. In every module of these packages that has imported them by name already.

3. Their queues that are globals of these modules, made when they were imported, and idle.

Whatever else holds one of theirs (another package that has imported a class by name, a queue with
saves under way) keeps it, and is named in the log: theirs and ours work together.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from torch_ckpt._base.log import LOGGER
from torch_ckpt.megatron import nvrx, shapes
from torch_ckpt.megatron.peers import PEERS, QUEUE, READER, WRITER, Peer

#: By the module that users import them from, our classes and functions.
_OURS = {"torch_ckpt.megatron": shapes, "torch_ckpt.nvrx": nvrx}

# Of each peer, and so of megatron.training, which imports from both.
_TOPS = {peer.package.partition(".")[0] for peer in PEERS}


@dataclass(frozen=True)
class _Replacement:
    """One of theirs, and ours."""

    theirs: Any
    ours: Any
    title: str


@dataclass(frozen=True)
class _Place:
    """A name in a module that is ours now."""

    module: ModuleType
    name: str
    replacement: _Replacement

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name} -> {self.replacement.title}"


# What is in place, and where.
_replacements: list[_Replacement] = []
_places: list[_Place] = []


def install(
    *, writer: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None
) -> list[str]:
    """Lets Megatron-core and nvidia-resiliency-ext, those that can be imported, use our classes.

    Call it on every rank before a checkpoint is saved or loaded, best before Megatron is set up.
    Classes that other packages have imported by name before stay theirs, and so do queues with
    saves under way; both are named in the log, and work with ours. Calling it again begins anew,
    with the options of that call.

    Args:
        writer: options of ``FileSystemWriterAsync`` for every save. They win over what Megatron
            passes, ``thread_count`` for example.
        reader: options of ``CachedMetadataFileSystemReader`` for every load, ``allow_pickle`` for
            example.

    Returns:
        One line for each replaced name, "where.it.was -> which.of.ours"; empty where neither
        package can be imported, which is also a warning in the log.

    Raises:
        TypeError, ValueError: an option that the class does not have, or a value that it does not
            accept. Nothing is replaced then.
    """
    uninstall()
    found: list[_Replacement] = []
    missing: list[str] = []
    for peer in PEERS:
        try:
            modules = _import(peer)
        except _NotImportable as error:
            missing.append(str(error))
        else:
            found += _replacements_of(peer, modules, writer or {}, reader or {})
    by_identity = {id(of.theirs): of for of in found}
    places = []
    for module, name, value in _globals():
        of_queue = by_identity.get(id(type(value))) if type(value).__name__ == QUEUE else None
        if of_queue is not None and _is_of_peers(module) and _is_idle(value):
            ours = of_queue.ours(persistent=value.persistent)
            found.append(_Replacement(value, ours, f"a {of_queue.title}"))
            by_identity[id(value)] = found[-1]
        replacement = by_identity.get(id(value))
        if replacement is not None and _is_of_peers(module):
            places.append(_Place(module, name, replacement))
        elif replacement is not None or of_queue is not None:
            LOGGER.warning(
                "%s.%s was there before install(), and stays theirs", module.__name__, name
            )
    for place in places:
        setattr(place.module, place.name, place.replacement.ours)
    _replacements.extend(found)
    _places.extend(places)
    lines = sorted(map(str, places))
    for line in lines:
        LOGGER.info("replaced %s", line)
    if not lines:
        LOGGER.warning("nothing was replaced: %s", "; ".join(missing))
    else:
        for reason in missing:
            LOGGER.info("left alone: %s", reason)
    return lines


def uninstall() -> list[str]:
    """Puts back what ``install`` has replaced, also where ours was imported by name since.

    Names that somebody else has replaced meanwhile are left, and queues with saves under way until
    they are finalized and it is called again; both are named in the log.

    Returns:
        One line for each name that was put back, as ``install`` returns them; empty where nothing
        was replaced.
    """
    known = {(id(place.module), place.name): place for place in _places}
    ours = {id(replacement.ours): replacement for replacement in _replacements}
    # Both packages may have got the same one of ours.
    ours_by_package = {
        (id(of.ours), _top(getattr(of.theirs, "__module__", ""))): of for of in _replacements
    }
    lines = []
    busy = []
    for module, name, value in _globals():
        if not _is_of_peers(module):
            continue
        place = known.pop((id(module), name), None)
        if place is None:
            imported = ours_by_package.get((id(value), _top(module.__name__)), ours.get(id(value)))
            if imported is None:
                continue
            place = _Place(module, name, imported)
        replacement = place.replacement
        if value is not replacement.ours:
            LOGGER.warning("not put back, since it was replaced again: %s", place)
        elif type(value).__name__ == QUEUE and value.get_num_unfinalized_calls() > 0:
            LOGGER.warning("not put back, since it has saves under way: %s", place)
            busy.append(place)
        else:
            setattr(module, name, replacement.theirs)
            lines.append(str(place))
    _places[:] = busy
    _replacements[:] = [place.replacement for place in busy]
    lines.sort()
    for line in lines:
        LOGGER.info("put back what was replaced: %s", line)
    return lines


class _NotImportable(Exception):
    """Says of a peer why it is left alone."""


def _import(peer: Peer) -> list[ModuleType]:
    """The modules that define a peer's names.

    Raises:
        _NotImportable: it is not installed, or its import fails, for which anything may be raised.
    """
    modules = []
    try:
        importlib.import_module(peer.package)
        for name in peer.modules:
            full = f"{peer.package}.{name}"
            # Older versions lack some of the modules; what the others need must be there.
            if importlib.util.find_spec(full) is not None:
                modules.append(importlib.import_module(full))
    except ModuleNotFoundError as error:
        if error.name is not None and peer.package.startswith(error.name):
            raise _NotImportable(f"{peer.title} is not installed: {error}") from None
        raise _NotImportable(_refusal(peer, error)) from error
    except Exception as error:
        raise _NotImportable(_refusal(peer, error)) from error
    return modules


def _refusal(peer: Peer, error: Exception) -> str:
    return f"{peer.title} cannot be imported: {type(error).__name__}: {error}"


def _replacements_of(
    peer: Peer,
    modules: Iterable[ModuleType],
    writer: Mapping[str, Any],
    reader: Mapping[str, Any],
) -> list[_Replacement]:
    ours = vars(_OURS[peer.ours])
    with_options = {
        WRITER: _with_options(ours[WRITER], writer),
        READER: _with_options(ours[READER], reader),
    }
    replacements = []
    for module in modules:
        for name, our_name in peer.names.items():
            theirs = vars(module).get(name)
            # Modules of a peer import from each other, and from the other peer.
            if getattr(theirs, "__module__", None) == module.__name__:
                our = with_options.get(our_name, ours[our_name])
                replacements.append(_Replacement(theirs, our, f"{peer.ours}.{our_name}"))
    return replacements


def _with_options(cls: type, options: Mapping[str, Any]) -> type:
    """A class that is made with options, whatever else it is made with."""
    if not options:
        return cls
    known = {
        name
        for base in cls.__mro__
        if "__init__" in vars(base) and base is not object
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name in options:
        # torch's classes take any keyword, and drop those that they do not know.
        if name not in known - {"self", "path"}:
            raise TypeError(f"{cls.__name__} has no option {name!r}")
    of_class: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(of_class)  # with its signature, in which Megatron looks for options
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        of_class(self, *args, **{**kwargs, **options})

    made = type(cls.__name__, (cls,), {"__init__": init, "__doc__": cls.__doc__})
    made.__module__ = cls.__module__
    made("")  # so that what it refuses is refused here, and not at the first save
    return made


def _is_idle(queue: Any) -> bool:
    """Whether a queue of theirs has nothing to finish, and no process that waits for saves."""
    return (
        queue.get_num_unfinalized_calls() == 0 and getattr(queue, "persistent_caller", None) is None
    )


def _globals() -> Iterator[tuple[ModuleType, str, Any]]:
    """Names and values of all imported modules."""
    for module in list(sys.modules.values()):
        # Other things may stand there, None for example.
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_of_peers(module: ModuleType) -> bool:
    return _top(module.__name__) in _TOPS
