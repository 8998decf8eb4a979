"""The path to import intervals from; they are in torch_ckpt/manager/intervals.py."""

from torch_ckpt.manager.intervals import AutoInterval

__all__ = ["AutoInterval"]
