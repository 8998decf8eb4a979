"""Finds out what a store and its credentials permit, with a few small requests."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_ckpt.stores.object_store import ObjectStore, Version
from torch_ckpt.stores.store_errors import Changed

#: Names of the objects that a probe writes and deletes begin with this.
PROBE_PREFIX = ".torch_ckpt-probe-"


class Check(NamedTuple):
    """A statement on which saves rely: it holds, fails, or is unknown.

    Attributes:
        what: the statement.
        state: "holds", "fails" or "unknown".
        why: the reason for the state.
    """

    what: str
    state: str
    why: str

    @classmethod
    def of(cls, what: str, holds: bool | None, if_holds: str, if_fails: str) -> Check:
        """Builds a check; ``holds`` is None if nothing was tried."""
        if holds is None:
            return cls(what, "unknown", "not tried, because another request fails")
        return cls(what, "holds", if_holds) if holds else cls(what, "fails", if_fails)


@dataclass
class Probe:
    """The requests and conditions that a store permits.

    Attributes:
        failures: the error of each request that failed: "list", "read", "write" or "delete".
        creates: True if the server refuses to create an object that exists; None if not tried.
        swaps: True if the server refuses to replace an object of another version; None if not
            tried.
    """

    failures: dict[str, OSError] = field(default_factory=dict)
    creates: bool | None = None
    swaps: bool | None = None

    def missing(self) -> list[str]:
        """Lists the requests that the credentials do not permit."""
        return [name for name, error in self.failures.items() if error.errno == errno.EACCES]

    def checks(self) -> Iterator[Check]:
        """Yields a check for each request and each condition."""
        for request in ("list", "read", "write", "delete"):
            error = self.failures.get(request)
            reason = "" if error is None else str(error.strerror)
            yield Check.of(f"{request} is permitted", error is None, "tried", reason)
        for what, holds, risk in (
            ("a create fails if the object exists", self.creates, "take the lease of one root"),
            ("a swap fails if the object has changed", self.swaps, "replace one checkpoint"),
        ):
            reason = f"not refused, so two jobs could {risk}. Start only one job for each root"
            yield Check.of(what, holds, "tried", reason)

    def warning(self) -> str | None:
        """Returns a sentence on the conditions that the server ignores."""
        ignored = [
            text
            for text, holds in (
                ("create an object only if it is absent", self.creates),
                ("replace an object only if it is unchanged", self.swaps),
            )
            if holds is False
        ]
        if not ignored:
            return None
        return (
            f"the server does not {' or '.join(ignored)}, so it cannot keep two jobs from writing "
            "to one root. Start only one job for each root."
        )


def probe(store: ObjectStore, read_only: bool, seconds: float = 10.0) -> Probe:
    """Lists and reads; writes, creates, replaces and deletes an object unless ``read_only``.

    Takes at most ``seconds``. The object is deleted, unless deleting is what fails.
    """
    found = Probe()
    begun = time.monotonic()
    deadline = begun + 0.8 * seconds
    name = f"{PROBE_PREFIX}{os.urandom(8).hex()}"

    def attempt(operation: str, function: Callable[[ObjectStore], object]) -> bool:
        try:
            function(store.within(max(deadline - time.monotonic(), 0.05)))
        except FileNotFoundError as error:
            # The object that a read-only probe asks for does not exist; the bucket should.
            if operation == "read" and read_only and "NoSuchBucket" not in str(error):
                return True
            found.failures[operation] = error
        except OSError as error:
            found.failures[operation] = error
        return operation not in found.failures

    attempt("list", lambda some: next(some.list(), None))
    if read_only:
        attempt("read", lambda some: some.read(name, 64))
        return found
    try:
        written = attempt("write", lambda some: _write(some, name, found))
        if written and attempt("read", lambda some: some.read(name, 64)):
            attempt("write", lambda some: _replace(some, name, found))
    finally:
        deadline = begun + seconds
        attempt("delete", lambda some: some.delete([name]))
    return found


def _write(store: ObjectStore, name: str, found: Probe) -> None:
    """Creates the object twice; the second time must fail."""
    try:
        store.put_if_absent(name, b"1")
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        found.creates = False
        store.put(name, [memoryview(b"1")], 1)
        return
    found.creates = False
    try:
        store.put_if_absent(name, b"2")
    except FileExistsError:
        found.creates = True


def _replace(store: ObjectStore, name: str, found: Probe) -> None:
    """Replaces the object, and then the version that no longer exists, which must fail."""
    version: Version = store.head(name).version
    found.swaps = False
    try:
        store.swap(name, b"3", version)
        store.swap(name, b"4", version)
    except Changed:
        # The first time, if another process writes to the same name.
        with suppress(FileNotFoundError):
            found.swaps = store.read(name, 64)[0] == b"3"
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
