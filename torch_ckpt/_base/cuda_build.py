"""The warning of a build without CUDA that meets CUDA tensors."""

from __future__ import annotations

import functools

import torch

from torch_ckpt._base.log import warn


@functools.cache
def warn_without_cuda() -> None:
    """Warns once per process that CUDA tensors take the slow way through torch.save."""
    version = (torch.version.cuda or "").split(".")[0]
    warn(
        "This build of torch_ckpt has no CUDA support, so CUDA tensors are copied to the host and "
        "written by torch.save, which is slow and blocks the caller. Build torch_ckpt again with "
        f"the toolkit of CUDA {version or 'that torch was built for'} (nvcc on the PATH).",
        stacklevel=3,
    )
