"""The path to import events from; they are in torch_ckpt/saving/events.py."""

from torch_ckpt.saving.events import Event

__all__ = ["Event"]
