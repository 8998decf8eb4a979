"""The packages whose names ``install`` replaces, and the modules that define these names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplacedPackage:
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


REPLACED_PACKAGES = (
    ReplacedPackage(
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
    ReplacedPackage(
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
