"""Converts the state of a training program into a state dict, and back."""

import torch_ckpt._base.supported_torch  # noqa: F401
