"""The command line ``torch-ckpt``."""

from torch_ckpt.cli.main import main

__all__ = ["main"]
