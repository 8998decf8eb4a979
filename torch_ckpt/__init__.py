"""torch_ckpt: a storage engine for PyTorch checkpoints.

``FileSystemWriter`` and ``FileSystemReader`` replace torch's classes of the same names in
``torch.distributed.checkpoint``. ``save`` and ``load`` write and read the same files with less
Python per tensor, and ``async_save`` saves while training continues. ``CheckpointManager`` saves
and restores the steps of a training loop.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from torch_ckpt._base.life_cycle import watch_exit
from torch_ckpt._base.version import __version__

if "torch" in sys.modules:
    import torch_ckpt._base.supported_torch

try:
    import torch_ckpt._core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch_ckpt._core":
        raise
    raise ImportError(
        "the extension module of torch_ckpt is not built for this Python (there is no _core*.so in "
        f"{__path__[0]}): run `make build` in the source tree, or run `pip install .` and import "
        "torch_ckpt from another directory"
    ) from None

from torch_ckpt.errors import (
    CheckpointError,
    Corrupt,
    LoadMismatch,
    OnCommitFailed,
    RootInUse,
    SourceChanged,
    Unsafe,
)

# All other public names import their modules, and torch, on first use: importing torch takes
# seconds, and commands such as `torch-ckpt ls` need no tensors.
if TYPE_CHECKING:
    from torch_ckpt.api import async_save, estimate_read_memory, load, open, preflight, save
    from torch_ckpt.checkpoint.metrics import SaveMetrics
    from torch_ckpt.checkpoint.opened import Checkpoint
    from torch_ckpt.conversion.convert import convert
    from torch_ckpt.huggingface.delta import apply_delta
    from torch_ckpt.huggingface.model_target import Safetensors
    from torch_ckpt.inspection.verify import verify
    from torch_ckpt.loading.reader import FileSystemReader
    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.manager import CheckpointManager
    from torch_ckpt.options import Background, ReadOptions, WriteOptions
    from torch_ckpt.publication.export import Export
    from torch_ckpt.publication.publish import publish
    from torch_ckpt.saving.handle import AsyncSave, check_for_errors
    from torch_ckpt.saving.host_memory import reserve_pool
    from torch_ckpt.saving.writer import FileSystemWriter
    from torch_ckpt.state.states import PerRank, RNGState
    from torch_ckpt.steps.retention import Retention
    from torch_ckpt.training.async_checkpoint import AsyncCheckpoint
else:
    _MODULES = {
        "api": ("async_save", "estimate_read_memory", "load", "open", "preflight", "save"),
        "checkpoint.metrics": ("SaveMetrics",),
        "checkpoint.opened": ("Checkpoint",),
        "conversion.convert": ("convert",),
        "huggingface.delta": ("apply_delta",),
        "huggingface.model_target": ("Safetensors",),
        "inspection.verify": ("verify",),
        "loading.reader": ("FileSystemReader",),
        "loading.report": ("LoadReport",),
        "manager": ("CheckpointManager",),
        "options": ("Background", "ReadOptions", "WriteOptions"),
        "publication.export": ("Export",),
        "publication.publish": ("publish",),
        "steps.retention": ("Retention",),
        "saving.handle": ("AsyncSave", "check_for_errors"),
        "saving.host_memory": ("reserve_pool",),
        "saving.writer": ("FileSystemWriter",),
        "state.states": ("PerRank", "RNGState"),
        "training.async_checkpoint": ("AsyncCheckpoint",),
    }
    _PACKAGES = (
        *("_C", "api", "checkpoint", "conversion", "huggingface", "inspection", "loading"),
        *("manager", "publication", "ranks", "saving", "state", "steps"),
    )
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
    #: Former names, and their replacements. CHANGELOG.md lists them, too.
    _REMOVED = {
        "AppState": "torch_ckpt.save and torch_ckpt.load, which accept the objects themselves",
        "ConvertReport": "torch_ckpt.conversion.convert.ConvertReport",
        "Damage": "torch_ckpt.inspection.verify.Damage",
        "DiffReport": "torch_ckpt.inspection.diff_report.DiffReport",
        "DurabilityUncertain": "torch_ckpt.errors.DurabilityUncertain",
        "LoadPlanner": "torch_ckpt.load, which plans with the engine",
        "NotCommitted": "torch_ckpt.errors.NotCommitted",
        "ReadMemory": "torch_ckpt.loading.report.ReadMemory",
        "SafetensorsWriter": "torch_ckpt.save(..., format=torch_ckpt.Safetensors(...))",
        "SavePlanner": "torch_ckpt.save, which plans with the engine",
        "ShowReport": "torch_ckpt.inspection.show.ShowReport",
        "ShownObject": "torch_ckpt.inspection.show.ShownObject",
        "ShownTensor": "torch_ckpt.inspection.show.ShownTensor",
        "TensorDifference": "torch_ckpt.inspection.diff_report.TensorDifference",
        "VerifyReport": "torch_ckpt.inspection.verify.VerifyReport",
        "Version": "torch_ckpt.publication.publish.Version",
        "async_publish": "torch_ckpt.publication.publish.async_publish",
        "diff": "torch_ckpt.inspection.diff.diff",
        "remove_leftovers": "torch_ckpt.checkpoint.lease.remove_leftovers",
        "show": "torch_ckpt.inspection.show.show",
        "trim_pool": "torch_ckpt.saving.host_memory.trim_pool",
    }

    def __getattr__(name: str) -> object:
        if name in ("_C", "api", *_MODULES["api"]):
            # _C needs torch's libraries. All packages that need torch import this module, too.
            import torch_ckpt._base.supported_torch  # noqa: F401
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        if name in _REMOVED:
            raise AttributeError(f"{__name__}.{name} was removed; use {_REMOVED[name]}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF, *_PACKAGES})


__all__ = [
    "AsyncCheckpoint",
    "AsyncSave",
    "Background",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Corrupt",
    "Export",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadMismatch",
    "LoadReport",
    "OnCommitFailed",
    "PerRank",
    "RNGState",
    "ReadOptions",
    "Retention",
    "RootInUse",
    "Safetensors",
    "SaveMetrics",
    "SourceChanged",
    "Unsafe",
    "WriteOptions",
    "__version__",
    "apply_delta",
    "async_save",
    "check_for_errors",
    "convert",
    "estimate_read_memory",
    "load",
    "open",
    "preflight",
    "publish",
    "reserve_pool",
    "save",
    "verify",
]

# Register now and not at the first save, so that functions that the program registers with atexit
# after this import run first.
watch_exit()
