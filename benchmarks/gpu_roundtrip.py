"""Saves a small state from a device and loads it back: ``python -m benchmarks.gpu_roundtrip``.

compute-sanitizer runs it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch_ckpt

from . import states

_BYTES = 20_000_000
_TENSORS = 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Saves, loads, and raises if what was loaded differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    state = states.training_state(_BYTES, _TENSORS, device=options.device)
    found = states.blank_copy(state)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        torch_ckpt.async_save(state, path, staging="overlapped").result()
        torch_ckpt.load(found, path)
    differing = states.first_difference(state, found)
    if differing is not None:
        raise AssertionError(f"{differing} is not what was saved")


if __name__ == "__main__":
    main()
