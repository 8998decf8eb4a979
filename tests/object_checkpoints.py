"""Checkpoints beneath the URLs of an object server."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import torch

from tests.object_server import BUCKET, ObjectServer, Stored

#: URLs of a checkpoint, and of a model of safetensors files.
URL, MODEL = f"s3://{BUCKET}/run/100", f"s3://{BUCKET}/model"

#: The tensors of the model.
TENSORS = {name: torch.full((50, 40), float(number)) for number, name in enumerate("abcdef")}


def store(server: ObjectServer, name: str, data: bytes, url: str = URL) -> None:
    """Stores an object beneath a URL, without a request."""
    key = f"{url}/{name}".removeprefix(f"s3://{BUCKET}/")
    server.objects[key] = Stored(data, f'"{hash(data)}"', datetime.now(timezone.utc))


def upload(server: ObjectServer, directory: Path, url: str = URL) -> None:
    """Stores the files of a directory beneath a URL."""
    for path in directory.iterdir():
        store(server, path.name, path.read_bytes(), url)


def key_of(server: ObjectServer, suffix: str = ".distcp") -> str:
    """Returns the key of an object whose name has the suffix."""
    return next(key for key in server.objects if key.endswith(suffix))
