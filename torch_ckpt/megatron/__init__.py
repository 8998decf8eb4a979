"""Asynchronous saves in the shapes of Megatron-core, over the same engine.

A site that builds a writer for each save, hands ``(save function, preload function, arguments)`` to
an asynchronous queue and finalizes on all ranks later replaces its imports by these, or calls
:func:`install`. Nothing is forked, spawned or pickled: see docs/megatron.md.

torch_ckpt.nvrx has what nvidia-resiliency-ext does otherwise.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.megatron.replacement import install, uninstall
from torch_ckpt.megatron.shapes import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    get_write_results_queue,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

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

#: Where Megatron looks for a manager process to shut down; there is none.
_results_queue = None
