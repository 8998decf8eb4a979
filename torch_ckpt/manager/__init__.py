"""The checkpoint manager: when to save, which steps to keep, and how to restore."""

from torch_ckpt.manager.manager import CheckpointManager

__all__ = ["CheckpointManager"]
