"""Object stores: objects beneath a URL, written from memory and read into memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch_ckpt.stores.limits import Limits
from torch_ckpt.stores.object_store import (
    Entry,
    ObjectStore,
    Service,
    Version,
    at_once,
    part_bytes,
    parts_in_flight,
)
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import Options
from torch_ckpt.stores.store_errors import Changed
from torch_ckpt.stores.urls import OBSTORE_SCHEMES, parse_root

__all__ = [
    "Changed",
    "Entry",
    "Limits",
    "ObjectStore",
    "Options",
    "Service",
    "Version",
    "at_once",
    "open_object",
    "open_store",
    "part_bytes",
    "parts_in_flight",
]


def open_store(
    url: str,
    storage_options: Options | Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> ObjectStore:
    """Opens the store beneath a URL, without a request.

    Args:
        storage_options: the settings of s3fs, gcsfs or adlfs for this protocol, and
            ``retry_seconds``, for which a failed request or part is repeated (300 by default).

    Raises:
        ImportError: the protocol needs a package that is not installed.
        ValueError: the URL or an option is not allowed.
    """
    root = parse_root(url)
    options = storage_options if isinstance(storage_options, Options) else Options(storage_options)
    redactor = Redactor(options.secrets())
    chosen = limits or options.limits()
    if root.kind in OBSTORE_SCHEMES.values() and importlib.util.find_spec("obstore"):
        from torch_ckpt.stores.obstore_store import ObstoreStore

        return ObstoreStore(root, options, chosen, redactor)
    from torch_ckpt.stores.fsspec_store import FsspecStore

    return FsspecStore(root, options, chosen, redactor)


def open_object(
    url: str, storage_options: Options | Mapping[str, Any] | None = None
) -> tuple[ObjectStore, str]:
    """Opens the store that has the object at a URL.

    Returns:
        The store of the directory above the object, and the name of the object in it; if the URL
        is a bucket, the store of the bucket and "".

    Raises:
        ImportError, ValueError: see :func:`open_store`.
    """
    directory, _, name = url.rstrip("/").rpartition("/")
    if directory.endswith(("/", ":")):
        return open_store(url, storage_options), ""
    return open_store(directory, storage_options), name
