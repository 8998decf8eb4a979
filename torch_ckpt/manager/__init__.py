"""The checkpoints of a run: when they are saved, which are kept, and how a run goes on."""

from torch_ckpt.manager.manager import CheckpointManager

__all__ = ["CheckpointManager"]
