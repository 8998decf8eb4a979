"""The packages whose shapes we have, and the modules in which they define their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WRITER = "FileSystemWriterAsync"
READER = "CachedMetadataFileSystemReader"
QUEUE = "AsyncCallsQueue"

# By their name, ours. Not every version has all of them; those that one lacks are left out.
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
class Peer:
    """A package whose names are replaced.

    Attributes:
        title: for messages.
        package: holds the modules that define the names.
        modules: relative to the package.
        names: theirs, and ours.
        ours: the module that users import ours from.
    """

    title: str
    package: str
    modules: tuple[str, ...]
    names: Mapping[str, str]
    ours: str


PEERS = (
    Peer(
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
    Peer(
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
