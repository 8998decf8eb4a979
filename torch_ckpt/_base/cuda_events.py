"""Events on CUDA devices, for work on other streams that comes after them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def events_of_now(
    devices: Iterable[torch.device],
) -> list[tuple[torch.cuda.Event, torch.device]]:
    """For each device an event after the work that its current stream has been given by now."""
    return [(torch.cuda.current_stream(device).record_event(), device) for device in devices]
