"""Which rank this is."""

from __future__ import annotations

import torch.distributed as dist


def rank() -> int:
    """Of the default process group; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
