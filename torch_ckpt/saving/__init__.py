"""From a state dict to a committed checkpoint, at once or beside training."""

import torch_ckpt._base.supported_torch  # noqa: F401
