"""Exchanges of values between ranks through the process group's store, with heartbeats, and the
failures of ranks."""

import torch_ckpt._base.supported_torch  # noqa: F401
