"""The contract of an object store: objects beneath one URL, without files on a local disk."""

from __future__ import annotations

import builtins
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch_ckpt.stores.limits import Feed, Limits, call, end_saves_before_pools, pauses
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.store_errors import Changed, translate, unknown_outcome
from torch_ckpt.stores.urls import Root, check_name

if TYPE_CHECKING:
    from typing_extensions import Self

Q = TypeVar("Q")
T = TypeVar("T")

#: Smallest part of an upload.
MIN_PART = 16 << 20
#: S3 allows 10,000 parts. The part size is a whole number of MiB, so that fewer are needed.
_MOST_PARTS = 9000
#: Maximum number of parts of one upload in flight, and of their bytes.
MOST_PARTS_IN_FLIGHT, MOST_BYTES_IN_FLIGHT = 4, 128 << 20
#: Maximum number of objects that a listing yields.
MOST_ENTRIES = 1_000_000
# Maximum number of names in one request to delete, and of small requests in flight.
_NAMES_AT_ONCE, _REQUESTS_AT_ONCE = 1000, 8


@dataclass(frozen=True)
class Version:
    """The state of an object, as its store reports it. Opaque to callers.

    Stores report different parts: Google a generation, S3 an ETag, JuiceFS's gateway no ETag of
    stored objects.
    """

    etag: str | None = None
    generation: str | None = None
    bytes: int | None = None
    modified: float | None = None

    @property
    def is_unique(self) -> bool:
        """True if no other version of the object agrees with this one. Otherwise, a version of the
        same size agrees if it was stored within the resolution of the server's clock."""
        return self.generation is not None or self.etag is not None

    def agrees(self, other: Version) -> bool:
        """True if no part that both versions have differs."""
        for name in ("generation", "etag"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                return bool(mine == theirs)
        return all(
            mine is None or theirs is None or mine == theirs
            for mine, theirs in ((self.bytes, other.bytes), (self.modified, other.modified))
        )


class Entry(NamedTuple):
    """An object in a store.

    Attributes:
        name: relative to the store's root.
        bytes: size of the object.
        modified: time of the last write by the server's clock, as a Unix timestamp; None if the
            store does not report it.
        version: for :meth:`ObjectStore.read_range` and :meth:`ObjectStore.swap`. In a listing, it
            may lack parts.
    """

    name: str
    bytes: int
    modified: float | None
    version: Version


class Service(NamedTuple):
    """The server of a store, and the packages that send it requests. Has no secrets.

    Attributes:
        library: names and versions of the packages that send the requests.
        endpoint: URL of the server; "" if the package does not report it.
        region: "" if the package does not report it.
    """

    library: str
    endpoint: str = ""
    region: str = ""


def at_once(request: Callable[[Q], T], arguments: Iterable[Q]) -> list[T]:
    """Makes small requests, several at a time. An exception does not wait for the others."""
    threads = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "torch_ckpt requests")
    try:
        return [*threads.map(request, arguments)]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def part_bytes(bytes: int) -> int:
    """Returns the size of the parts in which an object of ``bytes`` bytes is uploaded."""
    mebibytes = -(-bytes // (_MOST_PARTS << 20))
    return max(MIN_PART, mebibytes << 20)


def parts_in_flight(bytes: int) -> int:
    """Returns how many parts of an object of ``bytes`` bytes are uploaded at once."""
    return max(1, min(MOST_PARTS_IN_FLIGHT, MOST_BYTES_IN_FLIGHT // part_bytes(bytes)))


class ObjectStore(ABC):
    """Objects beneath one URL. Thread-safe.

    Names are relative to the URL, and are checked by
    :func:`torch_ckpt.stores.urls.check_name`. A call waits in slices, at most for its limits, so
    that signal handlers run and their exceptions end the wait. After a ``TimeoutError``, a write
    may still take place.

    Failures raise ``OSError`` with ``errno`` and, as ``filename``, the URL of the object:
    ``FileNotFoundError``, ``PermissionError``, ``TimeoutError``, and ``FileExistsError`` or
    :class:`Changed` if a condition does not hold. An error has no cause or context, because a
    library's exception can have secrets.

    Implementations define the methods with an underscore, which may raise any exception of their
    library.
    """

    def __init__(self, root: Root, limits: Limits, redactor: Redactor) -> None:
        end_saves_before_pools()
        self.root = root
        self.limits = limits
        self._redactor = redactor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root.url!r})"

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self!r} has credentials and connections and cannot be pickled. Pass the URL, and "
            "open the store in the other process."
        )

    def url_of(self, name: str) -> str:
        return self.root.url_of(name)

    def within(self, seconds: float) -> Self:
        """Returns the same store with a limit of ``seconds`` for each call."""
        store = object.__new__(type(self))
        store.__dict__.update(self.__dict__)
        store.limits = self.limits.within(seconds)
        store._apply_limits()
        return store

    def beneath(self, name: str) -> Self:
        """Returns the objects beneath a name as a store, with the same connections."""
        check_name(name)
        store = object.__new__(type(self))
        store.__dict__.update(self.__dict__)
        prefix = f"{self.root.prefix}/{name}".lstrip("/")
        store.root = replace(self.root, url=self.root.url_of(name), prefix=prefix)
        store._enter(name)
        return store

    # --- writes -----------------------------------------------------------------------------------

    def put(self, name: str, parts: Iterable[memoryview], bytes: int) -> Version:
        """Creates or replaces an object from views of its ``bytes`` bytes, in order.

        An object of more than :func:`part_bytes` is a multipart upload with
        :func:`parts_in_flight`. Nothing is staged on disk. The object becomes visible as a whole,
        unless its file system cannot do that (sftp, for example).

        **Views.** The store iterates in a thread of its own, and asks for the next view only if a
        part may be sent. It does not copy: it exports a view's buffer until the bytes have been
        sent. If the iterator keeps no reference to the view, the view's exporter is released (C's
        ``bf_releasebuffer`` is called, in any thread) as soon as the store no longer reads the
        memory, even while the iterator blocks. The memory may then be filled again. Views may be
        released in another order. The memory of :func:`part_bytes` suffices for progress; that of
        :func:`parts_in_flight` plus one parts keeps all connections busy.

        If the call raises, the store may still read some views until the library's request ends:
        do not fill memory again before its exporter was released. The iterator is not called again,
        but may still be in a call, in the store's thread.

        Raises:
            ValueError: the views have more or fewer than ``bytes`` bytes. Errors of ``parts`` are
                raised as they are. In both cases nothing is stored.
        """
        part, in_flight = part_bytes(bytes), parts_in_flight(bytes)
        feed = Feed(parts, bytes, part)
        return self._call(
            "upload", name, lambda: self._put(name, feed, bytes, part, in_flight), feed
        )

    def put_if_absent(self, name: str, data: bytes) -> Version:
        """Creates an object.

        ``data`` must be unique to the caller. If the answer to a request was lost, the store reads
        the object, and equal bytes are the caller's.

        Raises:
            FileExistsError: the object exists.
            OSError: with ``EOPNOTSUPP``, the file system has no such call.
        """
        return self._call("create", name, lambda: self._settle(name, data, None))

    def swap(self, name: str, data: bytes, expected: Version) -> Version:
        """Replaces an object if its version is ``expected``. ``data`` must be unique to the caller.

        Raises:
            Changed: the object has another version, or does not exist.
            OSError: with ``EOPNOTSUPP``, the file system has no such call, or reports no version.
        """
        return self._call("replace", name, lambda: self._settle(name, data, expected))

    def exchange(self, name: str, data: bytes, expected: Version | None) -> Version:
        """Creates an object if ``expected`` is None, and otherwise replaces that version.

        If the store has no conditions, compares the versions before the write; another process may
        write in between.

        Raises: see :meth:`put_if_absent` and :meth:`swap`.
        """
        try:
            if expected is None:
                return self.put_if_absent(name, data)
            return self.swap(name, data, expected)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        found = self.find(name)
        if (found is None) != (expected is None) or (
            found is not None and expected is not None and not found.version.agrees(expected)
        ):
            raise Changed(errno.ESTALE, "the object was replaced", self.url_of(name))
        return self.put(name, [memoryview(data)], len(data))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects. Ignores objects that do not exist."""
        all_names = [check_name(name) for name in names]
        for begin in range(0, len(all_names), _NAMES_AT_ONCE):
            some = all_names[begin : begin + _NAMES_AT_ONCE]
            only = some[0] if len(some) == 1 else ""
            self._call("delete", only, lambda some=some: self._delete(some))  # type: ignore[misc]

    # --- reads ------------------------------------------------------------------------------------

    def head(self, name: str) -> Entry:
        """Returns the size and version of an object."""
        return self._call("stat", name, lambda: self._head(name))

    def find(self, name: str) -> Entry | None:
        """Returns the size and version of an object; None if there is none."""
        try:
            return self.head(name)
        except FileNotFoundError:
            return None

    def read(self, name: str, limit: int) -> tuple[bytes, Version]:
        """Reads an object of at most ``limit`` bytes.

        Raises:
            OSError: with ``EFBIG``, the object is larger.
        """
        return self._call("read", name, lambda: self._read(name, limit))

    def read_range(
        self, name: str, offset: int, bytes: int, version: Version | None = None
    ) -> memoryview:
        """Reads ``bytes`` bytes of an object from ``offset`` on, in one request.

        Several threads may read at once; 4 to 8 threads with ranges of 8 MiB suffice.

        Args:
            version: of the object that the caller began to read.

        Raises:
            Changed: the object has another version.
            OSError: with ``EIO``, the server returned another range or number of bytes.
        """
        if bytes == 0:
            return memoryview(b"")
        return self._call(
            "read", name, lambda: self._read_range(name, offset, bytes, version or Version())
        )

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yields the objects beneath a directory, in any order. Names that
        :func:`torch_ckpt.stores.urls.check_name` rejects are left out.

        Raises:
            OSError: with ``EOVERFLOW``, there are more than :data:`MOST_ENTRIES` objects.
        """
        if prefix:
            check_name(prefix)
        pages = self._call("list", prefix, lambda: self._list(prefix))
        count = 0
        while (page := self._call("list", prefix, lambda: next(pages, None))) is not None:
            count += len(page)
            if count > MOST_ENTRIES:
                message = (
                    f"list failed: there are more than {MOST_ENTRIES} objects. Use a new root."
                )
                raise OSError(errno.EOVERFLOW, message, self.url_of(prefix))
            yield from (entry for entry in page if _is_allowed(entry.name))

    # --- to be implemented ------------------------------------------------------------------------

    @abstractmethod
    def service(self) -> Service:
        """Describes the service, which some packages know only after the first request."""

    @abstractmethod
    def _apply_limits(self) -> None:
        """Passes new limits on to the library."""

    @abstractmethod
    def _enter(self, name: str) -> None:
        """Makes all names relative to ``name``."""

    @abstractmethod
    def _put(self, name: str, feed: Feed, bytes: int, part: int, in_flight: int) -> Version: ...

    @abstractmethod
    def _put_conditional(
        self, name: str, data: builtins.bytes, expected: Version | None
    ) -> Version:
        """Creates the object, or replaces the version ``expected``."""

    @abstractmethod
    def _read(self, name: str, limit: int) -> tuple[builtins.bytes, Version]: ...

    @abstractmethod
    def _read_range(self, name: str, offset: int, bytes: int, version: Version) -> memoryview: ...

    @abstractmethod
    def _head(self, name: str) -> Entry: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[builtins.list[Entry]]:
        """Returns the pages of a listing."""

    @abstractmethod
    def _delete(self, names: builtins.list[str]) -> None: ...

    # --- private ----------------------------------------------------------------------------------

    def _call(
        self, operation: str, name: str, function: Callable[[], T], feed: Feed | None = None
    ) -> T:
        if name:
            check_name(name)
        try:
            return call(function, self.limits, feed)
        except Exception as error:
            failure = error
        if feed is not None and feed.error is not None:
            raise feed.error
        # Outside of the handler, so that the new error has no context.
        raise translate(failure, operation, self.url_of(name), self._redactor)

    def _settle(self, name: str, data: bytes, expected: Version | None) -> Version:
        """Writes under a condition, until the outcome is known.

        A request that is repeated after its answer was lost finds its own object.
        """
        failure: Exception | None = None
        for _ in pauses(self.limits.retry):
            try:
                return self._put_conditional(name, data, expected)
            except Exception as error:
                if not unknown_outcome(error):
                    raise
                failure = error
            try:
                stored = self._head(name)
                if stored.bytes == len(data) and self._read(name, len(data))[0] == data:
                    return stored.version
            except FileNotFoundError:
                continue
            except Exception:
                raise failure from None
            if expected is None:
                raise FileExistsError(errno.EEXIST, "the object exists")
            if not stored.version.agrees(expected):
                raise Changed(errno.ESTALE, "the object was replaced")
        assert failure is not None
        raise failure


def _is_allowed(name: str) -> bool:
    try:
        check_name(name)
    except ValueError:
        return False
    return True
