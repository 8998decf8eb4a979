"""CUDA events, which make other streams wait for the work of the current stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def record_events(
    devices: Iterable[torch.device],
) -> list[tuple[torch.cuda.Event, torch.device]]:
    """Records an event on the current stream of each device, after the work submitted so far."""
    return [(torch.cuda.current_stream(device).record_event(), device) for device in devices]
