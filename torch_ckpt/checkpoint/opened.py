"""The handle to a checkpoint that a save returns."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from torch_ckpt._base.paths import is_url
from torch_ckpt.checkpoint.directory import share_or_warn
from torch_ckpt.checkpoint.index import METADATA_NAME, metadata_bytes_in, read_safetensors
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import decode_metadata, metadata_of
from torch_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from torch_ckpt.checkpoint.metrics import SaveMetrics


class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: path or URL of the checkpoint.
        metrics: durations and sizes of the save that returned the checkpoint, on this rank; None if
            no save returned it.

    Example::

        checkpoint = torch_ckpt.save({"model": model}, "checkpoints/100")
        print(checkpoint.path, checkpoint.metrics.bytes)
        names = list(checkpoint.metadata().state_dict_metadata)
    """

    def __init__(self, path: str, metrics: SaveMetrics | None = None, seal: bytes = b"") -> None:
        self.path = path
        self.metrics = metrics
        self._seal = seal

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    def metadata(self) -> Metadata:
        """Reads the metadata: names, shapes, dtypes and locations of all values.

        Raises:
            FileNotFoundError: the checkpoint does not exist any more.
            CheckpointError: another save has replaced the checkpoint since the save that returned
                it.
            Corrupt, Unsafe: the metadata is damaged, or names more than metadata needs.
        """
        if is_url(self.path):
            raise CheckpointError(f"{self.path}: the metadata of a URL cannot be read by its path")
        opened = open_checkpoint(self.path)
        with closing(opened.directory):
            share_or_warn(opened.directory)
            if opened.safetensors is not None:
                return metadata_of(read_safetensors(opened.directory, opened.safetensors).index)
            data = metadata_bytes_in(opened.directory, METADATA_NAME)
        if not data.endswith(self._seal):
            raise CheckpointError(
                f"{self.path}: another save has replaced the checkpoint that this save wrote; read "
                "the metadata before the next save"
            )
        return decode_metadata(data, os.path.join(self.path, METADATA_NAME))
