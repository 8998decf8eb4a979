"""Loads a checkpoint into the tensors of a state dict."""

import torch_ckpt._base.supported_torch  # noqa: F401
