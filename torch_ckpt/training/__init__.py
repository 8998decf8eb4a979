"""Helpers for training loops: logging, profiling, peak rates, graph drawings and simple steps.

Every rank calls the same functions, and rank 0 writes. Ranks wait for each other only in
:func:`log`, for the values of DTensors, and in :func:`save_checkpoint` and
:func:`load_checkpoint_if_it_exists`, which use all ranks. Without ``torch.distributed``, the
process is rank 0. Paths are local paths or fsspec URLs.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.training.checkpoints import load_checkpoint_if_it_exists, save_checkpoint
from torch_ckpt.training.file_operations import mkdir
from torch_ckpt.training.graphs import GraphRecorder, save_graph
from torch_ckpt.training.logs import SummaryLogger, log
from torch_ckpt.training.peaks import flops_per_device
from torch_ckpt.training.profiles import start_profile, stop_profile

__all__ = [
    "GraphRecorder",
    "SummaryLogger",
    "flops_per_device",
    "load_checkpoint_if_it_exists",
    "log",
    "mkdir",
    "save_checkpoint",
    "save_graph",
    "start_profile",
    "stop_profile",
]
