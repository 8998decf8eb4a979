"""Keeps the lease on a root beneath a URL in an object, ``.lease``.

1. The object is JSON with the record and a random text, ``beat``. Each renewal stores another
   ``beat``, which gives the object a new version: the heartbeat.
2. ``compare_and_swap`` creates the object if it is absent, or replaces the version that was read.
   If the server ignores conditions, two runs that start at the same time can both take the lease;
   the run that has stored its record first then loses the lease when it reads it
   (stores/probe.py warns).
3. /proc shows whether a process of this host is alive. The run of another host is dead if its
   heartbeat does not change for a minute by the clock of the run that waits.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Callable
from typing import Any

from torch_ckpt.steps.lease_protocol import (
    LEASE_NAME,
    LeaseRecord,
    StoredRecord,
    is_alive_on_this_host,
)
from torch_ckpt.stores import Changed, ObjectStore, Version

# A longer object is no lease.
_MOST_BYTES = 4 << 10

_STATES = {"held": True, "released": False}


class LeaseObject:
    """The lease on a root beneath a URL.

    Args:
        store: the objects of the root.
        newest_epoch: returns the greatest epoch of the steps' markers.
    """

    def __init__(self, store: ObjectStore, newest_epoch: Callable[[], int]) -> None:
        self.root = store.root.url
        self.newest_epoch = newest_epoch
        self._store = store

    def within(self, seconds: float) -> LeaseObject:
        return LeaseObject(self._store.within(seconds), self.newest_epoch)

    def read(self) -> StoredRecord | None:
        try:
            data, version = self._store.read(LEASE_NAME, _MOST_BYTES)
        except FileNotFoundError:
            return None
        record = decode(data)
        if record is None:
            raise OSError(
                errno.EINVAL,
                "the object is no lease of torch_ckpt. If no job uses this root, delete the object",
                self._store.url_of(LEASE_NAME),
            )
        return _stored(record, version)

    def compare_and_swap(
        self, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        data = encode(record, secrets.token_hex(8))
        try:
            version = self._store.exchange(
                LEASE_NAME, data, None if expected is None else expected.heartbeat
            )
        except (FileExistsError, Changed):
            return None
        return _stored(record, version)

    def is_alive(self, found: StoredRecord) -> bool | None:
        return is_alive_on_this_host(found.record)

    def age(self, found: StoredRecord) -> float | None:
        return None

    def release(self) -> None:
        pass

    def close(self, *, unlock: bool = True) -> None:
        pass


def encode(record: LeaseRecord, beat: str) -> bytes:
    """Encodes a record and a heartbeat."""
    state = next(name for name, is_held in _STATES.items() if is_held == record.is_held)
    document = {
        "epoch": record.epoch,
        "run": record.run,
        "state": state,
        "process": dict(record.process),
        "beat": beat,
    }
    return json.dumps(document).encode()


def decode(data: bytes) -> LeaseRecord | None:
    """Decodes a record; None if the data is none."""
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    kinds = {"epoch": int, "run": str, "state": str, "process": dict, "beat": str}
    if not isinstance(document, dict) or document.keys() != kinds.keys():
        return None
    if any(type(document[name]) is not kind for name, kind in kinds.items()):
        return None
    process, state = document["process"], document["state"]
    is_process = all(isinstance(value, str | int | float) for value in process.values())
    if document["epoch"] < 1 or state not in _STATES or not is_process:
        return None
    return LeaseRecord(document["epoch"], document["run"], _STATES[state], process)


def _stored(record: LeaseRecord, version: Version) -> StoredRecord:
    return StoredRecord(record, encode(record, ""), version)
