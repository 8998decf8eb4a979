"""Replaces the classes and functions of Megatron-core and nvidia-resiliency-ext with ours.

Neither package has a plug-in point. Both look up their writer, reader, queue and functions by name,
some on import and some at each save. Therefore, ``install`` replaces

1. the names in the modules that define them, for later lookups;
2. the names in every module of these packages that has already imported them;
3. idle queues that are globals of these modules.

Names that other packages have imported, and queues with saves in progress, are not replaced, but
listed in the log. Our writer also works in their queues.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch_ckpt._base.checks import names_of
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.file_system import ReaderArguments, WriterArguments
from torch_ckpt.megatron.plan import originals

_QUEUE = "AsyncCallsQueue"
_WRITER = "FileSystemWriterAsync"


@dataclass(frozen=True)
class _Package:
    """A package whose names are replaced by our public names. Not every version defines all names.

    Attributes:
        title: name of the package in messages.
        package: the Python package that contains ``modules``.
        modules: modules that define the names, relative to ``package``.
        ours: the module that users import our names from.
    """

    title: str
    package: str
    modules: tuple[str, ...]
    ours: str


_PACKAGES = (
    _Package(
        "Megatron-core",
        "megatron.core.dist_checkpointing.strategies",
        (
            "filesystem_async",
            "async_utils",
            "state_dict_saver",
            "cached_metadata_filesystem_reader",
        ),
        "torch_ckpt.megatron",
    ),
    _Package(
        "nvidia-resiliency-ext",
        "nvidia_resiliency_ext.checkpointing.async_ckpt",
        (
            "filesystem_async",
            "core",
            "state_dict_saver",
            "torch_ckpt",
            "cached_metadata_filesystem_reader",
        ),
        "torch_ckpt.nvrx",
    ),
)

# Top-level packages. "megatron" includes megatron.training, which imports from both packages.
_TOP_LEVEL = {package.package.partition(".")[0] for package in _PACKAGES}


@dataclass(frozen=True)
class _Replacement:
    """An object of a replaced package, and the object that replaces it.

    Attributes:
        title: name of our object in messages.
    """

    theirs: Any
    ours: Any
    title: str


# The current replacements, and the replacement of each name that now refers to our object.
_replacements: list[_Replacement] = []
_replaced_names: dict[tuple[ModuleType, str], _Replacement] = {}


def install(
    *, writer: WriterArguments | None = None, reader: ReaderArguments | None = None
) -> list[str]:
    """Makes Megatron-core and nvidia-resiliency-ext use torch_ckpt's classes, if these packages can
    be imported.

    Call this function on every rank before the first save or load, preferably before Megatron is
    initialized. Classes that other packages have already imported by name, and queues with saves in
    progress, are not replaced, but listed in the log. The writer of torch_ckpt also works in such
    queues. For a writer with ``use_msc``, ``open_file`` or ``_extensions``, an object of the
    original class is created. A second call replaces the options of the first call.

    Args:
        writer: options of ``FileSystemWriterAsync`` for all saves. These options override the
            options that Megatron passes, such as ``thread_count``.
        reader: options of ``CachedMetadataFileSystemReader`` for all loads, such as
            ``allow_pickle``.

    Returns:
        A line for each replaced name, "module.name -> our.name". If neither package can be
        imported, the list is empty and a warning is logged.

    Raises:
        TypeError: a class does not have one of the given options. Nothing is replaced.
        ValueError: a class does not accept the value of an option. Nothing is replaced.

    Examples:
        ```python
        for line in torch_ckpt.megatron.install(writer={"thread_count": 4}):
            print(line)
        ```
    """
    uninstall()
    found: list[_Replacement] = []
    missing: list[str] = []
    for package in _PACKAGES:
        try:
            modules = _import_modules(package)
        except Exception as error:
            missing.append(_describe_failure(package, error))
        else:
            found += _find_replacements(package, modules, writer or {}, reader or {})
    _set_originals(found)
    by_identity = {id(replacement.theirs): replacement for replacement in found}
    names = {}
    for module, name, value in _iterate_globals():
        queue_class = by_identity.get(id(type(value))) if type(value).__name__ == _QUEUE else None
        if queue_class is not None and _is_replaced(module) and _is_idle(value):
            ours = queue_class.ours(persistent=value.persistent)
            found.append(_Replacement(value, ours, f"a {queue_class.title}"))
            by_identity[id(value)] = found[-1]
        replacement = by_identity.get(id(value))
        if replacement is not None and _is_replaced(module):
            names[module, name] = replacement
        elif replacement is not None or queue_class is not None:
            LOGGER.warning(
                "%s.%s existed before install() and was not replaced; call install() earlier to "
                "replace it",
                module.__name__,
                name,
            )
    for (module, name), replacement in names.items():
        setattr(module, name, replacement.ours)
    _replacements.extend(found)
    _replaced_names.update(names)
    lines = _log_lines("replaced", names)
    if not lines:
        LOGGER.warning("install() replaced nothing: %s", "; ".join(missing))
    else:
        for reason in missing:
            LOGGER.info("not replaced: %s", reason)
    return lines


def uninstall() -> list[str]:
    """Restores the names that ``install`` replaced, also in modules that have imported them since
    then.

    Names that other code has replaced again, and queues with saves in progress, are not restored.
    The log lists these names and queues. To restore the queues, finalize their saves, and then call
    this function again.

    Returns:
        A line for each restored name, in the format of ``install``; empty if nothing was replaced.

    Examples:
        ```python
        torch_ckpt.megatron.install()
        torch_ckpt.megatron.uninstall()
        ```
    """
    _set_originals([])
    ours = {id(replacement.ours): replacement for replacement in _replacements}
    # The same object of ours may replace one object in each package.
    ours_by_package = {
        (id(each.ours), _top_level(getattr(each.theirs, "__module__", ""))): each
        for each in _replacements
    }
    restored = {}
    busy = {}
    for module, name, value in _iterate_globals():
        if not _is_replaced(module):
            continue
        replacement = _replaced_names.get((module, name))
        if replacement is None:
            # The module has imported the name since then.
            key = id(value), _top_level(module.__name__)
            replacement = ours_by_package.get(key, ours.get(id(value)))
        if replacement is None:
            continue
        line = _describe(module, name, replacement)
        if value is not replacement.ours:
            LOGGER.warning("not restored, because other code has replaced it: %s", line)
        elif type(value).__name__ == _QUEUE and value.get_num_unfinalized_calls() > 0:
            LOGGER.warning(
                "not restored, because it has saves in progress: %s; finalize them and call "
                "uninstall() again",
                line,
            )
            busy[module, name] = replacement
        else:
            setattr(module, name, replacement.theirs)
            restored[module, name] = replacement
    _replaced_names.clear()
    _replaced_names.update(busy)
    _replacements[:] = busy.values()
    return _log_lines("restored", restored)


def _describe(module: ModuleType, name: str, replacement: _Replacement) -> str:
    return f"{module.__name__}.{name} -> {replacement.title}"


def _log_lines(verb: str, names: Mapping[tuple[ModuleType, str], _Replacement]) -> list[str]:
    """Logs a line for each name, and returns the lines."""
    lines = sorted(_describe(module, name, each) for (module, name), each in names.items())
    for line in lines:
        LOGGER.info("%s %s", verb, line)
    return lines


def _set_originals(found: Collection[_Replacement]) -> None:
    """Makes our writers and functions delegate to the originals what the engine cannot write."""
    for package in _PACKAGES:
        theirs = {
            each.title.rpartition(".")[2]: each.theirs
            for each in found
            if each.title.startswith(f"{package.ours}.")
        }
        ours = getattr(importlib.import_module(package.ours), _WRITER)
        ours.original = None
        if _WRITER in theirs:
            module = theirs[_WRITER].__module__
            ours.original = functools.cache(functools.partial(_load_original, module))
            # Also after uninstall(), because a save may still have to be finalized.
            originals[module] = theirs


def _load_original(module: str) -> Any:
    """Returns the writer class of a second copy of a module.

    The class looks up its functions by the names in its module. In the copy, no name is replaced.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return getattr(copied, _WRITER)


def _import_modules(package: _Package) -> list[ModuleType]:
    """Returns the modules that define the names of a package."""
    importlib.import_module(package.package)
    paths = [f"{package.package}.{name}" for name in package.modules]
    # Older versions lack some of these modules. A module that exists must be importable.
    return [importlib.import_module(path) for path in paths if importlib.util.find_spec(path)]


def _describe_failure(package: _Package, error: Exception) -> str:
    """Returns the reason why a package is not replaced."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and package.package.startswith(missing):
        return f"{package.title} is not installed: {error}"
    return f"{package.title} cannot be imported: {type(error).__name__}: {error}"


def _find_replacements(
    package: _Package,
    modules: Iterable[ModuleType],
    writer: Mapping[str, Any],
    reader: Mapping[str, Any],
) -> list[_Replacement]:
    public = importlib.import_module(package.ours)
    ours = {name: getattr(public, name) for name in public.__all__}
    for name, options in (
        (_WRITER, writer),
        ("CachedMetadataFileSystemReader", reader),
    ):
        ours[name] = _bind_options(ours[name], options)
    replacements = []
    for module in modules:
        for name, theirs in vars(module).items():
            our_name = name.removeprefix("_")  # get_write_results_queue was private
            # Skip names that the module only imports, from this package or the other one.
            if our_name in ours and getattr(theirs, "__module__", None) == module.__name__:
                title = f"{package.ours}.{our_name}"
                replacements.append(_Replacement(theirs, ours[our_name], title))
    return replacements


def _bind_options(cls: type, options: Mapping[str, Any]) -> type:
    """Returns a subclass whose ``__init__`` always receives ``options``."""
    if not options:
        return cls
    known = set().union(*map(names_of, cls.__mro__[:-1]))
    for name in options:
        # torch's classes silently ignore unknown keywords.
        if name not in known - {"path"}:
            raise TypeError(f"{cls.__name__} has no option {name!r}; remove it from install()")
    initialize: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(initialize)  # keeps the signature, which Megatron inspects for options
    def init(self: Any, *args: object, **kwargs: object) -> None:
        initialize(self, *args, **{**kwargs, **options})

    bound = type(cls.__name__, (cls,), {"__init__": init, "__doc__": cls.__doc__})
    bound.__module__ = cls.__module__
    bound("")  # reject invalid values now instead of at the first save
    return bound


def _is_idle(queue: Any) -> bool:
    """Returns True if a queue of theirs has no calls to finalize and no worker process."""
    return (
        queue.get_num_unfinalized_calls() == 0 and getattr(queue, "persistent_caller", None) is None
    )


def _iterate_globals() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields the module, name and value of each global in all imported modules."""
    for module in list(sys.modules.values()):
        # sys.modules may contain other objects, such as None.
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _is_replaced(module: ModuleType) -> bool:
    """Returns True if ``install`` replaces names in a module."""
    return _top_level(module.__name__) in _TOP_LEVEL
