"""Exchanges between ranks through the process group's store, with heartbeats; failures of ranks."""

import torch_ckpt._base.supported_torch  # noqa: F401
