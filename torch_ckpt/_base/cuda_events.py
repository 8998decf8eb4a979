"""CUDA events, which make other streams wait for the work of the current stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def refuse_capture() -> None:
    """Raises RuntimeError if the current stream captures a CUDA graph.

    Call this function before any other work on a device: waits for the stream, and copies to the
    host, would fail and invalidate the capture.
    """
    if torch.cuda.is_initialized() and _is_capturing():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "torch_ckpt cannot save or load while the current stream captures a CUDA graph, "
            "because tensors have no new values before the graph is replayed. Save or load before "
            "or after the capture"
        )


def _is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        # After an error of the device, every call fails. Tensors on the host can still be saved.
        return False


def record_events(
    devices: Iterable[torch.device],
) -> list[tuple[torch.cuda.Event, torch.device]]:
    """Records an event on the current stream of each device, after the work submitted so far."""
    return [(torch.cuda.current_stream(device).record_event(), device) for device in devices]
