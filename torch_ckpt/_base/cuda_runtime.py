"""Warns about CUDA tensors if there is no CUDA runtime that the engine can use."""

from __future__ import annotations

import functools

from torch_ckpt._base.log import warn


@functools.cache
def warn_without_cuda(reason: str) -> None:
    """Warns, once per process, that torch.save writes CUDA tensors, which is slow."""
    warn(
        f"torch_ckpt found no CUDA runtime that it can use ({reason}), so CUDA tensors are "
        "copied to host memory and written by torch.save, which is slow and blocks the caller. "
        "Install torch for CUDA 12 or 13 from PyPI or pytorch.org.",
    )
