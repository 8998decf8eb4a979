"""Rules for the steps to keep: the public import path of torch_ckpt/manager/retention.py."""

from torch_ckpt.manager.retention import Retention

__all__ = ["Retention"]
