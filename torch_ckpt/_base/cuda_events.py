"""Events on CUDA devices, for work on other streams that comes after them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def events_of_now(
    devices: Iterable[torch.device],
) -> list[tuple[torch.cuda.Event, torch.device]]:
    """For each device an event after the work that its current stream has been given by now."""
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append((event, device))
    return events
