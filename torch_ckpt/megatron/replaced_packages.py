"""The packages whose names ``install`` replaces, and the modules that define these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WRITER = "FileSystemWriterAsync"
READER = "CachedMetadataFileSystemReader"
QUEUE = "AsyncCallsQueue"

# Maps their names to ours. Not every version of a package defines all of them.
_NAMES = {
    name: name
    for name in (
        WRITER,
        READER,
        QUEUE,
        "AsyncRequest",
        "get_write_results_queue",
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
    )
} | {"_get_write_results_queue": "get_write_results_queue"}

_NVRX_NAMES = _NAMES | {
    name: name
    for name in (
        "CheckpointMetadataCache",
        "TorchAsyncCheckpoint",
        "abort_nvrx_checkpoint",
        "get_metadata_caching_status",
        "init_checkpoint_metadata_cache",
    )
}


@dataclass(frozen=True)
class ReplacedPackage:
    """A package whose names are replaced.

    Attributes:
        title: name of the package in messages.
        package: the Python package that contains ``modules``.
        modules: modules that define the names, relative to ``package``.
        names: maps their names to ours.
        ours: the module that users import our names from.
    """

    title: str
    package: str
    modules: tuple[str, ...]
    names: Mapping[str, str]
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
        _NAMES,
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
        _NVRX_NAMES,
        "torch_ckpt.nvrx",
    ),
)
