"""Warns about CUDA tensors if torch_ckpt was built without CUDA support."""

from __future__ import annotations

import functools

import torch

from torch_ckpt._base.log import warn


@functools.cache
def warn_without_cuda() -> None:
    """Warns, once per process, that torch.save writes CUDA tensors, which is slow."""
    version = (torch.version.cuda or "").split(".")[0]
    warn(
        "this build of torch_ckpt has no CUDA support: CUDA tensors are copied to host memory and "
        "written by torch.save, which is slow and blocks the caller. Rebuild torch_ckpt with the "
        f"CUDA toolkit {version or 'that torch was built with'} (nvcc on the PATH).",
        stacklevel=3,
    )
