# PYTHON_ARGCOMPLETE_OK: see main.py
"""The command line ``torch-ckpt``."""

from torch_ckpt.cli.main import main

__all__ = ["main"]
