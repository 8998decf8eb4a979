"""From a state dict to a committed checkpoint, in the foreground or background."""

import torch_ckpt._base.supported_torch  # noqa: F401
