"""How ranks meet in the process group's store, with signs of life, and what their failures are."""

import torch_ckpt._base.supported_torch  # noqa: F401
