"""Public import path for the events of the checkpoint manager (torch_ckpt/saving/events.py)."""

from torch_ckpt.saving.events import Event

__all__ = ["Event"]
