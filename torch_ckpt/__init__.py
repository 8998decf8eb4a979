"""torch_ckpt: a storage engine for PyTorch checkpoints.

``FileSystemWriter`` and ``FileSystemReader`` replace torch's classes of the same names in
``torch.distributed.checkpoint``. ``save`` and ``load`` write and read the same files with less
Python per tensor, and ``async_save`` saves while training continues. ``CheckpointManager`` saves
and restores the steps of a training loop.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

from torch_ckpt._base.life_cycle import watch_exit

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

# Public names import their modules, and torch, on first use: importing torch takes seconds, and
# commands such as `torch-ckpt ls` need no tensors. The stub lists the names.
_MODULE_OF = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+) as ", Path(__file__).with_suffix(".pyi").read_text(), re.M
    )
}
__all__ = sorted(_MODULE_OF)

_PACKAGES = (
    *("_C", "api", "checkpoint", "conversion", "errors", "huggingface", "inspection", "loading"),
    *("manager", "publication", "ranks", "saving", "state", "steps"),
)
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
    module = _MODULE_OF.get(name)
    if name in ("_C", "api") or module == "torch_ckpt.api":
        # _C needs torch's libraries. All packages that need torch import this module, too.
        import torch_ckpt._base.supported_torch  # noqa: F401
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _REMOVED:
        raise AttributeError(f"{__name__}.{name} was removed; use {_REMOVED[name]}")
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_PACKAGES})


# Register now and not at the first save, so that functions that the program registers with atexit
# after this import run first.
watch_exit()
