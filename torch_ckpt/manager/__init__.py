"""The checkpoint manager: when to save, which steps to keep, and how to restore."""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.intervals import AutoInterval
from torch_ckpt.manager.manager import CheckpointManager
from torch_ckpt.manager.policies import Preemption, SaveOptions
from torch_ckpt.steps.tier import LocalTier

__all__ = ["AutoInterval", "CheckpointManager", "LocalTier", "Preemption", "SaveOptions"]
