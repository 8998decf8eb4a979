"""Reads the metadata of checkpoints in tests."""

from __future__ import annotations

import os
from contextlib import closing

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.checkpoint.folders import LocalFolder
from torch_ckpt.checkpoint.index import METADATA_NAME, metadata_bytes_in
from torch_ckpt.checkpoint.metadata import decode_metadata


def read_metadata(
    path: str | os.PathLike[str], name: str = METADATA_NAME, *, allow_pickle: bool = False
) -> Metadata:
    """Reads a metadata file as torch's objects."""
    with closing(LocalFolder(path)) as directory:
        data = metadata_bytes_in(directory, name)
    return decode_metadata(data, os.path.join(path, name), allow_pickle=allow_pickle)
