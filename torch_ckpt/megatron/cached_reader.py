"""Reader that decodes the metadata of a checkpoint once for all loads."""

from __future__ import annotations

import copy
import hashlib
import os
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.file_system import ReaderArguments
from torch_ckpt.checkpoint.metadata import decode_indexed
from torch_ckpt.loading.reader import FileSystemReader

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

#: Number of checkpoints whose metadata is cached: the last two.
_CACHE_SIZE = 2


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads distributed checkpoints and caches their decoded metadata in this process.

    All readers of this class share the cache. Each load reads the metadata file, but decodes it
    again only if the contents have changed. Decoding takes longer than reading.

    Args:
        path: directory or URL of the checkpoint.
        cache_metadata: False disables the cache for this reader. Can be passed as the second
            positional argument, as in nvidia-resiliency-ext.
        kwargs: passed to :class:`torch_ckpt.FileSystemReader`.

    Examples:
        ```python
        reader = torch_ckpt.megatron.CachedMetadataFileSystemReader("checkpoints/100")
        torch.distributed.checkpoint.load(state, storage_reader=reader)
        ```
    """

    # Digest of the metadata file's contents and the decoded metadata, by the file's path or URL.
    _cache: ClassVar[dict[str, tuple[bytes, Metadata]]] = {}

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        cache_metadata: bool = True,
        **kwargs: Unpack[ReaderArguments],
    ) -> None:
        # torch's second argument is a registry of stream extensions, never a bool.
        if args and isinstance(args[0], bool):
            cache_metadata, args = args[0], args[1:]
        super().__init__(path, *args, **kwargs)
        self.cache_metadata = cache_metadata
        # Do not cache with zero_fill: it modifies the metadata to fit the state that is loaded.
        if cache_metadata and not self.options.lets_sizes_differ:
            self._unpickle = self._decode_cached

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Removes metadata from the cache.

        Args:
            path: directory or URL of a checkpoint; None means all checkpoints.
        """
        for source in list(cls._cache):
            if path is None or os.path.dirname(source) == _key_of(path):
                cls._cache.pop(source, None)

    @classmethod
    def _decode_cached(cls, data: bytes, source: str) -> Metadata:
        source = _key_of(source)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        cached = cls._cache.pop(source, None)
        if cached is None or cached[0] != digest:
            cached = digest, decode_indexed(data, source)
        cls._cache[source] = cached
        for oldest in list(cls._cache)[:-_CACHE_SIZE]:
            cls._cache.pop(oldest, None)
        # Return a copy, because a save that reuses the metadata replaces its list of files.
        metadata = copy.copy(cached[1])
        for name, value in vars(metadata).items():
            if name == "storage_meta" or isinstance(value, (dict, list)):
                setattr(metadata, name, copy.copy(value))
        return metadata


def _key_of(path: str | os.PathLike[str]) -> str:
    """Returns the URL, or the absolute form of a path."""
    return str(path).rstrip("/") if is_url(path) else os.path.abspath(path)
