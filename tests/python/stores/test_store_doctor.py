"""``torch-ckpt doctor URL``: measurements, checks, and the removal of its objects."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from scripts import object_servers
from tests.commands import Run
from tests.object_server import Fault, ObjectServer, Request, s3_fault
from tests.python.stores.conftest import fsspec_store
from torch_ckpt.cli import store_doctor
from torch_ckpt.cli.output import ExitCode
from torch_ckpt.cli.store_doctor import check_bucket, s3_client, suggested_rule
from torch_ckpt.stores import Service, object_store, open_store
from torch_ckpt.stores.folder import CLEANUP_SECONDS
from torch_ckpt.stores.probe import PROBE_PREFIX, Check
from torch_ckpt.stores.urls import parse_root

URL = "s3://bucket/run"
UPLOADS, STORAGE = "unfinished uploads end", "deletions free storage"
CONDITIONS = {"a create fails if the object exists", "a swap fails if the object has changed"}
DENIED = s3_fault(403, "AccessDenied")


class Bucket:
    """Answers as boto3's client does."""

    def __init__(self, rules: Any = (), versioning: Any = "") -> None:
        self._rules, self._versioning = rules, versioning

    def get_bucket_lifecycle_configuration(self, Bucket: str) -> dict[str, Any]:
        if isinstance(self._rules, str):
            raise refusal(self._rules)
        return {"Rules": [*self._rules]}

    def get_bucket_versioning(self, Bucket: str) -> dict[str, Any]:
        if isinstance(self._versioning, Exception):
            raise self._versioning
        return {"Status": self._versioning} if self._versioning else {}


def refusal(code: str) -> Exception:
    return RuntimeError(f"An error occurred ({code}) when calling the GetBucketX operation: no")


def rule(days: int = 1, status: str = "Enabled", **conditions: Any) -> dict[str, Any]:
    conditions = conditions or {"Filter": {}}
    abort = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days}}
    return {"ID": "r", "Status": status, **conditions, **abort}


def use(monkeypatch: pytest.MonkeyPatch, options: Mapping[str, str]) -> None:
    """Sets the environment of S3's clients."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])


@pytest.fixture
def s3(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """A server in the environment, whose bucket has the recommended rule."""
    pytest.importorskip("obstore")
    use(monkeypatch, server.options)
    monkeypatch.setattr(store_doctor, "s3_client", lambda service: Bucket([rule()]))
    return server


def states(document: dict[str, Any]) -> dict[str, str]:
    return {check["what"]: check["state"] for check in document["checks"]}


# --- measurements --------------------------------------------------------------------------------


def test_a_store_in_memory_is_measured_and_left_empty(run: Run) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{uuid.uuid4().hex}/run"
    text = run("doctor", url, "--size", "17MiB")
    assert text.startswith(f"{url}\nCHECK ")
    for row in ("library ", "put ", "get ", "upload ", "read "):
        assert f"\n{row}" in text
    assert "lifecycle" not in text
    assert [*open_store(url).list()] == []
    document = run.json("doctor", url, "--size", "64KiB")
    found = states(document)
    assert found.pop(UPLOADS) == "unknown"
    assert {*found.values()} == {"holds"}
    assert document["facts"]["library"].startswith("fsspec 20")


def test_a_bucket_is_measured_by_requests_as_saves_make_them(s3: ObjectServer, run: Run) -> None:
    document = run.json("doctor", URL, "--size", "17MiB")
    service = document["facts"]
    assert service["library"].startswith("obstore 0.")
    assert (service["endpoint"], service["region"]) == (s3.url, "us-east-1")
    assert s3.kinds().count("part") == 2
    assert all(value > 0 for name, value in document["measured"].items() if name != "clock_s")
    assert abs(document["measured"]["clock_s"]) < 60
    assert {*states(document).values()} == {"holds"}
    assert document["lifecycle_rule"] is None
    assert (s3.objects, s3.uploads) == ({}, {})
    # A sweep deletes what a killed process leaves.
    assert all(one.key.startswith(f"run/{PROBE_PREFIX}") for one in s3.log if one.kind == "put")


def test_the_endpoint_and_the_versions_of_s3fs_are_named(
    s3: ObjectServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_doctor, "open_store", lambda url: fsspec_store(url, s3.options))
    document = run.json("doctor", URL, "--size", "64KiB", code=1)
    assert ", s3fs 20" in document["facts"]["library"]
    assert document["facts"]["endpoint"] == s3.url
    assert [what for what, state in states(document).items() if state == "fails"] == [
        "a swap fails if the object has changed"
    ]
    assert s3.objects == {}


@pytest.mark.parametrize("kind", ["put", "head", "complete", "get"])
def test_ctrl_c_leaves_no_object(s3: ObjectServer, run: Run, kind: str) -> None:
    def interrupt(request: Request) -> None:
        if (request.kind, request.number) == (kind, 0):
            os.kill(os.getpid(), signal.SIGINT)

    s3.fault = interrupt
    run("doctor", URL, "--size", "17MiB", code=ExitCode.INTERRUPTED)
    assert run.err == "torch-ckpt: interrupted\n"
    assert (s3.objects, s3.uploads) == ({}, {})


def test_ctrl_c_ends_an_upload(s3: ObjectServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting = threading.Event()

    def wait(outcomes: Any, seconds: float) -> None:
        if seconds == CLEANUP_SECONDS:
            is_waiting.set()
        futures_wait(outcomes, seconds)

    def interrupt(request: Request) -> None:
        if request.kind == "part":
            if request.number == 0:
                os.kill(os.getpid(), signal.SIGINT)
            assert is_waiting.wait(60)

    futures_wait = store_doctor.wait
    monkeypatch.setattr(store_doctor, "wait", wait)
    monkeypatch.setattr(object_store, "MIN_PART", 1 << 20)
    s3.fault = interrupt
    run("doctor", URL, "--size", "24MiB", code=ExitCode.INTERRUPTED)
    assert "abort" in s3.kinds()
    assert "complete" not in s3.kinds()
    assert (s3.objects, s3.uploads) == ({}, {})


# --- findings ------------------------------------------------------------------------------------


def test_ignored_conditions_are_findings(s3: ObjectServer, run: Run) -> None:
    s3.conditions = False
    text = run("doctor", URL, "--size", "64KiB", code=1)
    assert "two jobs could take the lease of one root. Start only one job for each root" in text
    document = run.json("doctor", URL, "--size", "64KiB", code=1)
    assert {what for what, state in states(document).items() if state == "fails"} == CONDITIONS


@pytest.mark.parametrize(
    ("kinds", "failed", "unknown"),
    [
        (["list"], ["list"], set()),
        (["put"], ["write"], CONDITIONS),
        (["delete", "bulk delete"], ["delete"], set()),
    ],
)
def test_a_missing_permission_is_a_finding(
    s3: ObjectServer, run: Run, kinds: list[str], failed: list[str], unknown: set[str]
) -> None:
    s3.fault = lambda request: DENIED if request.kind in kinds else None
    document = run.json("doctor", URL, "--size", "64KiB", code=1)
    found = states(document)
    assert [what for what, state in found.items() if state == "fails"] == [
        f"{request} is permitted" for request in failed
    ]
    assert {what for what, state in found.items() if state == "unknown"} == unknown
    assert "AccessDenied" in str(document["checks"])
    # Objects that cannot be deleted must not become more.
    assert ("clock_s" in document["measured"]) == (failed == ["list"])


def test_a_clock_that_differs_is_a_finding(s3: ObjectServer, run: Run) -> None:
    old = Fault("headers", headers={"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"})
    s3.fault = lambda request: old if request.kind == "head" else None
    text = run("doctor", URL, "--size", "64KiB", code=1)
    assert " s behind the clock of this machine. Set the clock of this machine" in text


def test_a_store_that_permits_nothing_is_an_error(s3: ObjectServer, run: Run) -> None:
    s3.fault = lambda request: DENIED
    error = run.refused("doctor", URL)
    assert "read failed" in error
    assert "AccessDenied" in error


def test_a_url_that_is_not_allowed_is_an_error(run: Run) -> None:
    assert "has a user name or a password" in run.refused("doctor", "s3://me:hidden@bucket/run")
    assert "hidden" not in run.err


def test_a_read_only_store_is_described(server: ObjectServer, run: Run) -> None:
    pytest.importorskip("obstore")
    document = run.json("doctor", f"{server.url}/bucket/run", code=1)
    assert states(document)["read is permitted"] == "holds"
    assert states(document)["write is permitted"] == "fails"
    assert document["measured"] == {}


@pytest.mark.parametrize(
    ("ahead", "state", "why"),
    [
        (None, "unknown", "does not report"),
        (0.0, "holds", "to the second"),
        (-299.0, "holds", "299.0 s behind"),
        (301.0, "fails", "301.0 s ahead of"),
    ],
)
def test_clocks_may_differ_by_five_minutes(ahead: float | None, state: str, why: str) -> None:
    check = store_doctor.check_clock(ahead)
    assert check.state == state
    assert why in check.why


# --- the rules of the bucket ---------------------------------------------------------------------


def checks_of(bucket: Bucket, url: str = URL) -> list[Check]:
    return check_bucket(parse_root(url), lambda: bucket)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (rule(), "holds"),
        (rule(Filter={"Prefix": "run/"}), "holds"),
        (rule(Filter={"Prefix": "ru"}), "holds"),
        (rule(Prefix=""), "holds"),
        (rule(Filter={"Prefix": "run/0000"}), "fails"),
        (rule(Filter={"Prefix": "other/"}), "fails"),
        (rule(Filter={"Tag": {"Key": "a", "Value": "b"}}), "fails"),
        (rule(Filter={"And": {"Prefix": "run/", "ObjectSizeGreaterThan": 5}}), "fails"),
        (rule(status="Disabled"), "fails"),
        ({"ID": "e", "Status": "Enabled", "Filter": {}, "Expiration": {"Days": 1}}, "fails"),
    ],
)
def test_only_an_enabled_rule_for_all_objects_ends_uploads(
    given: dict[str, Any], state: str
) -> None:
    [uploads, _] = checks_of(Bucket([given]))
    assert (uploads.what, uploads.state) == (UPLOADS, state)


def test_the_earliest_of_several_rules_counts() -> None:
    [uploads, _] = checks_of(Bucket([rule(7), rule(3)]))
    assert "after 3 days" in uploads.why


def test_a_bucket_without_rules_is_a_finding_with_the_rule_to_add(
    s3: ObjectServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket("NoSuchLifecycleConfiguration")
    monkeypatch.setattr(store_doctor, "s3_client", lambda service: bucket)
    text = run("doctor", URL, "--size", "64KiB", code=1)
    assert "Add this lifecycle rule to the bucket: {" in text
    document = run.json("doctor", URL, "--size", "64KiB", code=1)
    assert states(document)[UPLOADS] == "fails"
    [uploads, _] = checks_of(Bucket([document["lifecycle_rule"]]))
    assert uploads.state == "holds"


def test_rules_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "PLANTED")
    [uploads] = checks_of(Bucket("AccessDenied, PLANTED"))
    assert (uploads.what, uploads.state) == (UPLOADS, "unknown")
    assert "AccessDenied" in uploads.why
    assert "PLANTED" not in uploads.why

    def without_boto3() -> Any:
        raise ImportError("no boto3")

    [uploads] = check_bucket(parse_root(URL), without_boto3)
    assert (uploads.state, uploads.why) == ("unknown", "the rules cannot be read. Install boto3")


EXPIRES = {"Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}


@pytest.mark.parametrize(
    ("versioning", "rules", "state"),
    [
        ("", [], "holds"),
        ("Suspended", [], "holds"),
        ("Enabled", [], "fails"),
        ("Enabled", [EXPIRES], "holds"),
        ("Enabled", [EXPIRES | {"Filter": {"Prefix": "other/"}}], "fails"),
        (refusal("AccessDenied"), [], "unknown"),
    ],
)
def test_old_versions_need_a_rule_that_expires_them(
    versioning: Any, rules: list[Any], state: str
) -> None:
    [uploads, storage] = checks_of(Bucket([rule(), *rules], versioning))
    assert uploads.state == "holds"
    assert (storage.what, storage.state) == (STORAGE, state)


def test_other_stores_have_their_own_rules() -> None:
    def fail() -> Any:
        raise AssertionError("only S3 has a client")

    for url, state, has_rule in (
        ("az://container/run", "holds", False),
        ("gs://bucket/run", "unknown", True),
        ("memory://run", "unknown", False),
    ):
        [uploads] = check_bucket(parse_root(url), fail)
        assert (uploads.what, uploads.state) == (UPLOADS, state)
        assert (suggested_rule(parse_root(url)) is not None) == has_rule


def test_the_client_of_boto3_has_the_endpoint_and_the_credentials_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("boto3")
    use(monkeypatch, {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"})
    monkeypatch.setenv("FSSPEC_S3_KEY", "other")
    monkeypatch.setenv("FSSPEC_S3_SECRET", "also")
    client = s3_client(Service("", "http://127.0.0.1:7", "eu-north-1"))
    assert client.meta.endpoint_url == "http://127.0.0.1:7"
    assert client.meta.region_name == "eu-north-1"
    credentials = client._request_signer._credentials
    assert (credentials.access_key, credentials.secret_key) == ("other", "also")


# --- real servers --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", object_servers.PROGRAMS)
def test_a_real_server_is_examined(
    name: str,
    real_servers: Callable[[str], Any],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    started = real_servers(name)
    use(monkeypatch, started.options)
    url = f"s3://{object_servers.BUCKET}/{uuid.uuid4().hex}"
    # A server may need seconds for its first writes, in which it allocates volumes.
    store = open_store(url)
    store.put_if_absent("first", b"x")
    store.delete(["first"])
    document = run.json("doctor", url, code=1)
    found = states(document)
    # A new bucket has no rules, and some servers have no such request.
    assert found.pop(UPLOADS) in ("fails", "unknown")
    failed = {what for what, state in found.items() if state == "fails"}
    assert failed == (CONDITIONS if name == "juicefs" else set()), document["checks"]
    assert document["measured"].keys() >= {"clock_s", "upload_bytes_per_second"}
    assert [*store.list()] == []
