"""Saves a state dict as a committed checkpoint, in the foreground or in the background."""

import torch_ckpt._base.supported_torch  # noqa: F401
