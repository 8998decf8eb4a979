"""Replacements for Megatron-core's asynchronous saves, with the same names.

They fit training code that creates a writer for each save, passes ``(save function, preload
function, arguments)`` to an asynchronous queue, and later finalizes the save on all ranks. Import
these names instead of Megatron's, or call :func:`install`. Nothing is forked, spawned or pickled:
see docs/megatron.md.

torch_ckpt.nvrx has the equivalents for nvidia-resiliency-ext.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.megatron.async_writer import FileSystemWriterAsync
from torch_ckpt.megatron.cached_reader import CachedMetadataFileSystemReader
from torch_ckpt.megatron.calls_queue import AsyncCallsQueue
from torch_ckpt.megatron.plan import save_state_dict_async_finalize, save_state_dict_async_plan
from torch_ckpt.megatron.replacement import install, uninstall
from torch_ckpt.megatron.request import AsyncRequest
from torch_ckpt.megatron.results_queue import get_write_results_queue

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "FileSystemWriterAsync",
    "get_write_results_queue",
    "install",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "uninstall",
]

#: Megatron shuts down this queue's manager process. None, because there is no such process.
_results_queue = None
