"""torch_ckpt: a storage engine for PyTorch checkpoints.

``FileSystemWriter`` and ``FileSystemReader`` replace torch's classes of the same names in
``torch.distributed.checkpoint``; ``save`` and ``load`` do the same with less Python per tensor.
"""

import atexit

import torch  # noqa: F401  (its libraries must be there before the extension is loaded)

from torch_ckpt import _C
from torch_ckpt.api import load, save
from torch_ckpt.errors import CheckpointError, Corrupt, DurabilityUncertain, NotCommitted, Unsafe
from torch_ckpt.reader import FileSystemReader
from torch_ckpt.writer import FileSystemWriter

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Corrupt",
    "DurabilityUncertain",
    "FileSystemReader",
    "FileSystemWriter",
    "NotCommitted",
    "Unsafe",
    "__version__",
    "load",
    "save",
]

# While the interpreter still stands: the engine's threads must not outlive it.
atexit.register(_C.join_executor)
