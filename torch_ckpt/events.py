"""Events of the checkpoint manager: the public import path of torch_ckpt/saving/events.py."""

from torch_ckpt.saving.events import Event

__all__ = ["Event"]
