"""The checkpoint manager: when to save, which steps to keep, and how to restore."""

from typing import TYPE_CHECKING

from torch_ckpt._base.lazy_attributes import lazy_attributes

# Import the manager lazily: commands such as `torch-ckpt gc` use only manager/retention.py, which
# does not need torch.
if TYPE_CHECKING:
    from torch_ckpt.manager.manager import CheckpointManager
else:
    __getattr__, __dir__ = lazy_attributes(__name__, {"manager": ("CheckpointManager",)})

__all__ = ["CheckpointManager"]
