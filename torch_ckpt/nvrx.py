"""Replacements for nvidia-resiliency-ext's asynchronous saves, with the same names.

This is the public import path of torch_ckpt/megatron/nvrx.py.
"""

from torch_ckpt.megatron.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    TorchAsyncCheckpoint,
    abort_nvrx_checkpoint,
    get_metadata_caching_status,
    get_write_results_queue,
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "TorchAsyncCheckpoint",
    "abort_nvrx_checkpoint",
    "get_metadata_caching_status",
    "get_write_results_queue",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

# Private names that callers of nvidia-resiliency-ext access as well.
_results_queue = None
_get_write_results_queue = get_write_results_queue
