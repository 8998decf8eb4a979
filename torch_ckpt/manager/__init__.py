"""The checkpoint manager: when to save, which steps to keep, and how to restore."""

from typing import TYPE_CHECKING

from torch_ckpt._base.lazy_attributes import lazy_attributes

# Commands such as `torch-ckpt gc` use the rules of manager/retention.py, which need no torch.
if TYPE_CHECKING:
    from torch_ckpt.manager.manager import CheckpointManager
else:
    __getattr__, __dir__ = lazy_attributes(__name__, {"manager": ("CheckpointManager",)})

__all__ = ["CheckpointManager"]
