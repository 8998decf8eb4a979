"""The replacements for Megatron-core's classes and functions."""

from torch_ckpt.megatron.cached_reader import CachedMetadataFileSystemReader
from torch_ckpt.megatron.calls_queue import AsyncCallsQueue
from torch_ckpt.megatron.plan import save_state_dict_async_finalize, save_state_dict_async_plan
from torch_ckpt.megatron.request import AsyncRequest
from torch_ckpt.megatron.results_queue import get_write_results_queue
from torch_ckpt.megatron.writer import FileSystemWriterAsync

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "FileSystemWriterAsync",
    "get_write_results_queue",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]
