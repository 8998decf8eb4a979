"""Runs the command line: ``python -m torch_ckpt``."""

import sys

from torch_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
