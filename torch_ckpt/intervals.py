"""Intervals between saves: the public import path of torch_ckpt/manager/intervals.py."""

from torch_ckpt.manager.intervals import AutoInterval

__all__ = ["AutoInterval"]
