"""A state whose checkpoints tests damage, and the locations of its records."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.metadata import read_metadata
from tests.support import StateDict, place_of, random_tensor

STATE: StateDict = {
    "small": random_tensor((40, 3), torch.float32),
    "blocks": random_tensor((400, 250), torch.float32, seed=1),
    "many blocks": random_tensor((700, 250), torch.int32, seed=2),
    "transposed": random_tensor((200, 300), torch.int16, seed=3).t(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "note": "the quick brown fox " * 20,
    "long note": "jumps over the lazy dog " * 6000,
    "nothing": None,
}


def place(path: Path, name: str) -> tuple[Path, int, int]:
    """Returns the file of a record, its offset and its length."""
    info = place_of(read_metadata(path), name)
    return path / info.relative_path, info.offset, info.length


def payload_offset(path: Path, name: str) -> int:
    """Returns the offset of a contiguous tensor's data in its file."""
    file, offset, length = place(path, name)
    payload = STATE[name].reshape(-1).view(torch.uint8).numpy().tobytes()
    at = file.read_bytes().index(payload, offset)
    assert at + len(payload) <= offset + length
    return at
