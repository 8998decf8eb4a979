"""A reader that decodes the metadata of a checkpoint once for all loads."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable
from typing import Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.checkpoint.metadata import decode_indexed
from torch_ckpt.loading.reader import FileSystemReader

#: Metadata that is kept: that of the last checkpoint, and of the one before.
_MOST_KEPT = 2


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads distributed checkpoints; what their metadata has been decoded to is kept.

    It serves all readers of this class, as long as the file has the same contents. It takes the
    longest part of reading metadata; the file itself is read each time.

    Args:
        path: directory of the checkpoint.
        cache_metadata: False keeps nothing. May be the second argument, as in
            nvidia-resiliency-ext.
        kwargs: as for :class:`torch_ckpt.FileSystemReader`.
    """

    # By the file's path: the digest of its contents, and the metadata.
    _kept: ClassVar[dict[str, tuple[bytes, Metadata]]] = {}

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        cache_metadata: bool = True,
        **kwargs: Any,
    ) -> None:
        # Theirs has it there; torch has its stream extensions, of which there is no bool.
        if args and isinstance(args[0], bool):
            cache_metadata, args = args[0], args[1:]
        super().__init__(path, *args, **kwargs)
        self.cache_metadata = cache_metadata

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forgets the metadata of the checkpoint in a directory; of all if None."""
        for source in list(cls._kept):
            if path is None or os.path.dirname(source) == os.path.abspath(path):
                cls._kept.pop(source, None)

    def _unpickler(self) -> Callable[[bytes, str], Metadata]:
        # With zero_fill it is changed for the caller.
        if not self.cache_metadata or self.zero_fill:
            return super()._unpickler()
        return self._kept_or_decoded

    @classmethod
    def _kept_or_decoded(cls, data: bytes, source: str) -> Metadata:
        source = os.path.abspath(source)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        known = cls._kept.pop(source, None)
        if known is None or known[0] != digest:
            known = digest, decode_indexed(data, source)
        cls._kept[source] = known
        for oldest in list(cls._kept)[:-_MOST_KEPT]:
            cls._kept.pop(oldest, None)
        # Whoever saves with it again gives it other files.
        metadata = copy.copy(known[1])
        for name, value in vars(metadata).items():
            if name == "storage_meta" or isinstance(value, (dict, list)):
                setattr(metadata, name, copy.copy(value))
        return metadata
