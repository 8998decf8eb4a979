"""Attributes of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(
    package: str, modules: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions ``__getattr__`` and ``__dir__`` for a package (PEP 562).

    Args:
        package: ``__name__`` of the package.
        modules: the names that each module defines, by module name relative to the package.
        submodules: modules and subpackages that are attributes of the package themselves.
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    own = frozenset(submodules)
    namespace = vars(sys.modules[package])

    def get_attribute(name: str) -> Any:
        if name in own:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        namespace[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of, *own})

    return get_attribute, list_names
