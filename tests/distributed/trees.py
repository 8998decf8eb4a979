"""Helpers of cases of torch_ckpt.multihost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.cases import Launch
from torch_ckpt.multihost import RanksDisagree

# Limit of waits that should not block, in seconds.
PATIENCE = 60.0


def disagreement(launch: Launch, work: Callable[[], Any]) -> str:
    """Returns the error that ``work`` must raise on every rank."""
    with pytest.raises(RanksDisagree) as caught:
        work()
    everywhere: list[Any] = [None] * launch.size
    dist.all_gather_object(everywhere, str(caught.value))
    assert everywhere == [everywhere[0]] * launch.size
    return str(caught.value)


def others(launch: Launch) -> str:
    """Formats all ranks but the last one as errors do."""
    return {1: "rank 0", 3: "ranks 0-2"}[launch.size - 1]
