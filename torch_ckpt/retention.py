"""The path to import retention from; it is in torch_ckpt/manager/retention.py."""

from torch_ckpt.manager.retention import Retention

__all__ = ["Retention"]
