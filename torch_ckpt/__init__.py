"""torch_ckpt: a storage engine for PyTorch checkpoints.

``FileSystemWriter`` and ``FileSystemReader`` replace torch's classes of the same names in
``torch.distributed.checkpoint``; ``save`` and ``load`` do the same with less Python per tensor, and
``async_save`` saves while training goes on. ``CheckpointManager`` is what a training loop needs.
"""

import torch  # Its libraries must be there before the extension is loaded.

from torch_ckpt._base.version import __version__, check_torch_version

try:
    check_torch_version(torch.__version__)
    import torch_ckpt._core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch_ckpt._C", "torch_ckpt._core"):
        raise
    raise ImportError(
        f"the extension of torch_ckpt is not built (there is no _core.so in {__path__[0]}): run "
        "`make build` in the clone, or `pip install .` and import it elsewhere"
    ) from None

from torch_ckpt._base.life_cycle import watch_exit
from torch_ckpt._core import trim_pool
from torch_ckpt.api import async_save, estimate_read_memory, load, preflight, save
from torch_ckpt.checkpoint.lease import remove_leftovers
from torch_ckpt.conversion.convert import ConvertReport, convert
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
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference
from torch_ckpt.inspection.show import ShownObject, ShownTensor, ShowReport, show
from torch_ckpt.inspection.verify import Damage, VerifyReport, verify
from torch_ckpt.loading.load_planner import LoadPlanner
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.report import LoadReport, ReadMemory
from torch_ckpt.manager import CheckpointManager
from torch_ckpt.manager.async_checkpoint import AsyncCheckpoint
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.host_memory import reserve_pool
from torch_ckpt.saving.metrics import SaveMetrics
from torch_ckpt.saving.running_saves import check_for_errors
from torch_ckpt.saving.save_planner import SavePlanner
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.app_state import AppState, PerRank, RNGState

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
    "LoadPlanner",
    "LoadReport",
    "NotCommitted",
    "OnCommitFailed",
    "PerRank",
    "RNGState",
    "ReadMemory",
    "RootInUse",
    "SaveMetrics",
    "SavePlanner",
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
watch_exit()
