"""torch_ckpt: a storage engine for PyTorch checkpoints.

``FileSystemWriter`` and ``FileSystemReader`` replace torch's classes of the same names in
``torch.distributed.checkpoint``; ``save`` and ``load`` do the same with less Python per tensor, and
``async_save`` saves while training goes on. ``CheckpointManager`` is what a training loop needs.
"""

import atexit

import torch  # noqa: F401  (its libraries must be there before the extension is loaded)

from torch_ckpt._C import trim_pool
from torch_ckpt.api import async_save, estimate_read_memory, load, preflight, save
from torch_ckpt.app_state import AppState, PerRank, RNGState
from torch_ckpt.async_checkpoint import AsyncCheckpoint
from torch_ckpt.background import Background
from torch_ckpt.comparing import DiffReport, TensorDifference, diff
from torch_ckpt.converting import ConvertReport, convert
from torch_ckpt.errors import (
    CheckpointError,
    Corrupt,
    DurabilityUncertain,
    LoadMismatch,
    NotCommitted,
    OnCommitFailed,
    RootInUse,
    SourceChanged,
    Unsafe,
)
from torch_ckpt.generations import remove_leftovers
from torch_ckpt.host_memory import reserve_pool
from torch_ckpt.loading import LoadReport, ReadMemory
from torch_ckpt.manager import CheckpointManager
from torch_ckpt.metrics import SaveMetrics
from torch_ckpt.reader import FileSystemReader
from torch_ckpt.showing import ShownObject, ShownTensor, ShowReport, show
from torch_ckpt.snapshot import AsyncSave, check_for_errors, leave_at_exit
from torch_ckpt.verifying import Damage, VerifyReport, verify
from torch_ckpt.writer import FileSystemWriter

__version__ = "0.1.0"

__all__ = [
    "AppState",
    "AsyncCheckpoint",
    "AsyncSave",
    "Background",
    "CheckpointError",
    "CheckpointManager",
    "ConvertReport",
    "Corrupt",
    "Damage",
    "DiffReport",
    "DurabilityUncertain",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadMismatch",
    "LoadReport",
    "NotCommitted",
    "OnCommitFailed",
    "PerRank",
    "RNGState",
    "ReadMemory",
    "RootInUse",
    "SaveMetrics",
    "ShowReport",
    "ShownObject",
    "ShownTensor",
    "SourceChanged",
    "TensorDifference",
    "Unsafe",
    "VerifyReport",
    "__version__",
    "async_save",
    "check_for_errors",
    "convert",
    "diff",
    "estimate_read_memory",
    "load",
    "preflight",
    "remove_leftovers",
    "reserve_pool",
    "save",
    "show",
    "trim_pool",
    "verify",
]

# While the interpreter still stands: a save under way ends, and the engine's threads with it.
atexit.register(leave_at_exit)
