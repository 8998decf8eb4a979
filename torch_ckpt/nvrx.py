"""Asynchronous saves in the shapes of nvidia-resiliency-ext: the path to import them from.

They are in torch_ckpt/megatron/nvrx.py.
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

# Names that sites look up here, besides the public ones.
_results_queue = None
_get_write_results_queue = get_write_results_queue
