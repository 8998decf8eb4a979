"""What a training loop needs beside the engine.

That is logs, profiles, peak rates, pictures of graphs, and steps saved and loaded in one call.
Separate from the engine: nothing in ``torch_ckpt`` imports it. Every rank calls the same functions;
rank 0 writes, and no rank waits for another except in :func:`log`, for the values of DTensors, and
for steps, which all ranks write and read. Without ``torch.distributed`` the process is rank 0.
Paths are local ones or URLs that fsspec knows.
"""

import torch_ckpt._base.supported_torch  # noqa: F401
from torch_ckpt.training.checkpoints import load_checkpoint_if_it_exists, save_checkpoint
from torch_ckpt.training.files import mkdir
from torch_ckpt.training.graphs import GraphRecorder, save_graph
from torch_ckpt.training.logs import ReportLogger, SummaryLogger, log
from torch_ckpt.training.peaks import flops_per_device
from torch_ckpt.training.profiles import start_profile, stop_profile

__all__ = [
    "GraphRecorder",
    "ReportLogger",
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
