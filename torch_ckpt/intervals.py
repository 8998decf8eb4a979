"""Public import path for the intervals between saves (torch_ckpt/manager/intervals.py)."""

from torch_ckpt.manager.intervals import AutoInterval

__all__ = ["AutoInterval"]
