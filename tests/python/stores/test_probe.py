"""Probes find missing permissions and ignored conditions, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.object_server import Fault, ObjectServer, s3_fault
from tests.python.stores.conftest import KINDS, obstore_store
from torch_ckpt.stores import Limits, ObjectStore
from torch_ckpt.stores.probe import Probe, probe

URL = "s3://bucket/run"


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_finds_conditions_and_leaves_nothing(
    kind: str, open_kind: Callable[[str], ObjectStore]
) -> None:
    store = open_kind(kind)
    found = probe(store, read_only=False)
    assert found.failures == {}
    assert found.creates is not kind.endswith("juicefs")
    compares = kind.startswith("obstore") or kind == "fsspec-memory"
    assert found.swaps is (compares and not kind.endswith("juicefs"))
    assert (found.warning() is None) == (found.creates and found.swaps)
    assert list(store.list()) == []


def test_a_read_only_probe_writes_nothing(server: ObjectServer) -> None:
    assert probe(obstore_store(URL, server.options), read_only=True) == Probe()
    assert server.kinds() == ["list", "get"]


DENIED = s3_fault(403, "AccessDenied")


@pytest.mark.parametrize(
    ("kinds", "read_only", "missing"),
    [
        (["list"], False, ["list"]),
        (["list", "get", "head"], True, ["list", "read"]),
        (["get"], False, ["read"]),
        (["put"], False, ["write"]),
        (["bulk delete", "delete"], False, ["delete"]),
        (["list", "put", "delete", "bulk delete"], False, ["list", "write", "delete"]),
    ],
)
def test_missing_permissions_are_named(
    server: ObjectServer, kinds: list[str], read_only: bool, missing: list[str]
) -> None:
    server.fault = lambda request: DENIED if request.kind in kinds else None
    found = probe(obstore_store(URL, server.options), read_only)
    assert found.missing() == missing
    for error in found.failures.values():
        assert str(error.filename).startswith(URL)
    assert "delete" in missing or server.objects == {}


def test_a_server_that_ignores_conditions_is_named(server: ObjectServer) -> None:
    server.conditions = False
    found = probe(obstore_store(URL, server.options), read_only=False)
    assert (found.creates, found.swaps, found.failures) == (False, False, {})
    warning = found.warning()
    assert warning is not None
    assert "only if it is absent or replace an object only if it is unchanged" in warning
    assert server.objects == {}


def test_a_missing_bucket_is_named(server: ObjectServer) -> None:
    server.fault = lambda request: s3_fault(404, "NoSuchBucket")
    for read_only in (False, True):
        found = probe(obstore_store(URL, server.options), read_only)
        assert "Create the bucket" in str(found.failures["list"])
        assert len(found.failures) >= 2


def test_a_probe_of_a_silent_server_ends_in_time(server: ObjectServer) -> None:
    server.fault = lambda request: Fault("stall")
    begun = time.monotonic()
    found = probe(obstore_store(URL, server.options), read_only=False, seconds=2)
    assert time.monotonic() - begun < 6
    assert isinstance(found.failures["list"], TimeoutError)
    assert isinstance(found.failures["write"], TimeoutError)


def test_a_probe_names_the_cause_within_its_time() -> None:
    store = obstore_store(
        URL, {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}, Limits()
    )
    begun = time.monotonic()
    found = probe(store, read_only=True, seconds=6)
    assert time.monotonic() - begun < 6
    assert "connection refused" in str(found.failures["list"])


def test_a_failed_create_is_still_deleted(server: ObjectServer) -> None:
    answers = iter([None, DENIED])
    server.fault = lambda request: next(answers, None) if request.kind == "put" else None
    found = probe(obstore_store(URL, server.options), read_only=False)
    assert found.missing() == ["write"]
    assert server.objects == {}
