"""CUDA events, which make other streams wait for the work of the current stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raises RuntimeError if a CUDA graph is being captured on the current stream of a device.

    Waiting for the stream, or for an event on it, would fail and invalidate the capture.
    """
    for device in devices:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"a CUDA graph is being captured on the current stream of {device}, whose "
                    "tensors have no values before the graph is replayed; save or load before or "
                    "after the capture"
                )


def record_events(
    devices: Iterable[torch.device],
) -> list[tuple[torch.cuda.Event, torch.device]]:
    """Records an event on the current stream of each device, after the work submitted so far.

    Raises RuntimeError during the capture of a CUDA graph.
    """
    devices = list(devices)
    refuse_capture(devices)
    return [(torch.cuda.current_stream(device).record_event(), device) for device in devices]
