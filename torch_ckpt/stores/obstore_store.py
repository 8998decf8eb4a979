"""Stores over obstore: S3, Google Cloud Storage, Azure, HTTP, and memory for tests.

The only module that calls obstore, whose interface changes between versions.
"""

from __future__ import annotations

import builtins
import errno
import importlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch_ckpt.stores.limits import Feed, Limits
from torch_ckpt.stores.object_store import Entry, ObjectStore, Service, Version
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import Config, Options, obstore_config
from torch_ckpt.stores.store_errors import Changed, was_repeated
from torch_ckpt.stores.urls import Root, http_base

# Number of objects in a page of a listing.
_PAGE = 1000


class ObstoreStore(ObjectStore):
    """A store over obstore. Bytes move without the GIL and without a copy in Python."""

    def __init__(
        self,
        root: Root,
        options: Options,
        limits: Limits,
        redactor: Redactor,
        backend: Any | None = None,
    ) -> None:
        """Opens the store, without a request.

        Args:
            backend: an object of ``obstore.store`` to use, for tests.
        """
        super().__init__(root, limits, redactor)
        self._obstore = importlib.import_module("obstore")
        self._base = root
        self._prefix = f"{root.prefix}/" if root.prefix and root.kind != "http" else ""
        self._backend = self._single_deletes = backend
        self._refuses_bulk_deletes = False
        failure: Exception | None = None
        try:
            self._config = None if backend else obstore_config(root.kind, options, root.account)
            self._apply_limits()
        except (ImportError, OSError):
            raise
        except Exception as error:
            # The text of a library, which may have values, ends with the source of the error.
            reason = redactor(str(error).split("\n")[0])
            failure = ValueError(f"{root.url} cannot be opened: {reason}")
        if failure is not None:
            raise failure

    def service(self) -> Service:
        library = f"obstore {self._obstore.__version__}"
        if (config := self._config) is None:
            return Service(library)
        return Service(library, self._redactor(config.endpoint), config.region)

    def _apply_limits(self) -> None:
        if (config := self._config) is None:
            return
        self._backend = self._single_deletes = self._open(config)
        if self.root.kind == "s3":
            # Some servers of MinIO's code refuse bulk deletes.
            values = config.values | {"disable_bulk_delete": True}
            self._single_deletes = self._open(config._replace(values=values))

    def _enter(self, name: str) -> None:
        self._prefix += f"{name}/"

    def _open(self, config: Config) -> Any:
        stores = importlib.import_module("obstore.store")
        limits, root = self.limits, self._base
        common: dict[str, Any] = {
            "client_options": config.client
            | {
                "connect_timeout": timedelta(seconds=limits.connect),
                # For a piece of an answer, and for a request with its body.
                "read_timeout": timedelta(seconds=limits.progress),
                "timeout": timedelta(seconds=limits.retry + limits.progress),
                "user_agent": "torch_ckpt",
            },
            "retry_config": {
                "max_retries": 10_000,  # The time is the limit.
                "retry_timeout": timedelta(seconds=limits.retry),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=min(15.0, limits.retry / 4)),
                    "base": 2,
                },
            },
        }
        if root.kind == "http":
            allow = {"allow_http": root.url.startswith("http://")}
            common["client_options"] |= allow
            return stores.HTTPStore(http_base(root), **common)
        if config.credentials is not None:
            common["credential_provider"] = config.credentials
        kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[root.kind]
        return kind(root.bucket, config=config.values, **common)

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    # --- writes -----------------------------------------------------------------------------------

    def _put(self, name: str, feed: Feed, bytes: int, part: int, in_flight: int) -> Version:
        self._require_writable()
        if bytes > part:
            key, settings = self._key(name), {"chunk_size": part, "max_concurrency": in_flight}
            try:
                # obstore aborts the upload if it fails.
                result = self._obstore.put(self._backend, key, feed, use_multipart=True, **settings)
            except Exception as error:
                # The answer to the last request was lost, and the request was repeated.
                is_complete = "NoSuchUpload" in str(error) and was_repeated(error)
                if not is_complete or (stored := self._head(name)).bytes != bytes:
                    raise
                return stored.version
            return _version(result)
        views = list(feed)
        data = views[0] if len(views) == 1 else b"".join(views)
        del views
        return _version(
            self._obstore.put(self._backend, self._key(name), data, use_multipart=False)
        )

    def _put_conditional(
        self, name: str, data: builtins.bytes, expected: Version | None
    ) -> Version:
        self._require_writable()
        mode: str | dict[str, str] = "create"
        if expected is not None:
            parts = {"e_tag": expected.etag, "version": expected.generation}
            mode = {key: value for key, value in parts.items() if value is not None}
            if not mode:
                raise OSError(
                    errno.EOPNOTSUPP, "the server reports no version, so it cannot compare one"
                )
        return _version(self._obstore.put(self._backend, self._key(name), data, mode=mode))

    def _delete(self, names: list[str]) -> None:
        self._require_writable()
        keys = [self._key(name) for name in names]
        if not self._refuses_bulk_deletes:
            try:
                self._delete_keys(self._backend, keys)
                return
            except Exception as error:
                if not _refuses_bulk_delete(error):
                    raise
                self._refuses_bulk_deletes = True
        self._delete_keys(self._single_deletes, keys)

    def _delete_keys(self, backend: Any, keys: list[str]) -> None:
        try:
            self._obstore.delete(backend, keys)
        except FileNotFoundError:
            # Google and Azure report a missing object, and may have left out those behind it.
            for key in keys:
                try:
                    self._obstore.delete(backend, [key])
                except FileNotFoundError:
                    continue

    def _require_writable(self) -> None:
        if self.root.kind == "http":
            raise OSError(errno.EROFS, "stores over http:// and https:// are read-only")

    # --- reads ------------------------------------------------------------------------------------

    def _head(self, name: str) -> Entry:
        return self._entry(self._obstore.head(self._backend, self._key(name)))

    def _read(self, name: str, limit: int) -> tuple[builtins.bytes, Version]:
        result = self._obstore.get(self._backend, self._key(name))
        meta = result.meta
        if meta["size"] > limit:
            raise OSError(errno.EFBIG, f"the object has {meta['size']} bytes, more than {limit}")
        data = builtins.bytes(result.bytes())
        if len(data) != meta["size"]:
            raise OSError(errno.EIO, f"requested {meta['size']} bytes, got {len(data)}")
        return data, _version(meta)

    def _read_range(self, name: str, offset: int, bytes: int, version: Version) -> memoryview:
        end = offset + bytes
        result = self._obstore.get(self._backend, self._key(name), options={"range": (offset, end)})
        # The answer itself has the version, so that no condition is needed in the request.
        if not _version(result.meta).agrees(version):
            raise Changed(errno.ESTALE, "the object was replaced while it was read")
        if tuple(result.range) != (offset, end):
            begin, last = result.range
            raise OSError(
                errno.EIO, f"requested bytes {offset} to {end}, got bytes {begin} to {last}"
            )
        data = memoryview(result.bytes())
        if data.nbytes != bytes:
            raise OSError(errno.EIO, f"requested {bytes} bytes, got {data.nbytes}")
        return data

    def _list(self, prefix: str) -> Iterator[list[Entry]]:
        if self.root.kind == "http":
            raise OSError(errno.EOPNOTSUPP, "stores over http:// and https:// cannot be listed")
        beneath = self._key(prefix).rstrip("/") or None
        pages = self._obstore.list(self._backend, beneath, chunk_size=_PAGE)
        return ([self._entry(meta) for meta in page] for page in pages)

    def _entry(self, meta: Mapping[str, Any]) -> Entry:
        name = meta["path"].removeprefix(self._prefix)
        modified = meta["last_modified"].timestamp()
        return Entry(name, meta["size"], modified, _version(meta))


def _version(meta: Mapping[str, Any]) -> Version:
    modified = meta.get("last_modified")
    return Version(
        meta.get("e_tag") or None,
        meta.get("version") or None,
        meta.get("size"),
        # HTTP has whole seconds, listings may have fractions.
        float(int(modified.timestamp())) if modified is not None else None,
    )


def _refuses_bulk_delete(error: Exception) -> bool:
    text = str(error)
    marks = ("MissingContentMD5", "NotImplemented", "MalformedXML", "DeleteObjects response")
    return any(mark in text for mark in marks)
