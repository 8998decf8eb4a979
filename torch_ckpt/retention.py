"""Public import path for the rules that keep steps (torch_ckpt/manager/retention.py)."""

from torch_ckpt.manager.retention import Retention

__all__ = ["Retention"]
