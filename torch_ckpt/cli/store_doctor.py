"""``torch-ckpt doctor URL``: measures an object store and checks what saves beneath a URL rely on.

A thread makes all requests. After Ctrl-C, the thread ends its upload or its request and deletes its
object. If a signal kills the process, a later sweep of the root deletes the object.
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from torch_ckpt._base.formatting import plural
from torch_ckpt._base.progress import Progress
from torch_ckpt.cli.diagnosis import Diagnosis, median_ms_of, seconds_of
from torch_ckpt.stores import ObjectStore, at_once, open_store, part_bytes
from torch_ckpt.stores.folder import CLEANUP_SECONDS
from torch_ckpt.stores.object_store import Service
from torch_ckpt.stores.probe import PROBE_PREFIX, Check, probe
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import s3fs_variables
from torch_ckpt.stores.urls import Root

#: Bytes written and read in each measurement: two parts of an upload.
DEFAULT_MEASURED = 32 << 20

_SMALL_BYTES, _RANGE_BYTES = 1024, 8 << 20

# Seconds between two checks for Ctrl-C.
_SLICE_SECONDS = 0.2

# Sweeps compare the server's times with this machine's clock, and act after an hour.
_MOST_CLOCK_SECONDS = 300.0


def diagnose_store(
    url: str,
    *,
    measured_bytes: int = DEFAULT_MEASURED,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
    """Examines the store beneath a URL, with settings from the environment.

    Raises:
        ImportError, ValueError: see :func:`torch_ckpt.stores.open_store`.
        OSError: the store permits no request, or a measurement failed.
    """
    store, is_interrupted = open_store(url), threading.Event()
    outcome: Future[Diagnosis] = Future()

    def advance(done: int) -> None:
        if is_interrupted.is_set():
            raise InterruptedError(errno.EINTR, "the examination was interrupted", url)
        if progress is not None:
            progress(Progress(2 * measured_bytes, 0, done))

    def run() -> None:
        try:
            outcome.set_result(_examine(store, measured_bytes, advance))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="torch_ckpt doctor", daemon=True).start()
    try:
        while not outcome.done():
            # The kernel may deliver SIGINT to another thread, which does not end a longer wait.
            wait([outcome], _SLICE_SECONDS)
        return outcome.result()
    except BaseException:
        is_interrupted.set()
        wait([outcome], CLEANUP_SECONDS)
        raise


def _examine(store: ObjectStore, measured_bytes: int, advance: Callable[[int], None]) -> Diagnosis:
    found = probe(store, read_only=False)
    if "write" in found.failures:
        found.failures |= probe(store, read_only=True).failures
    if found.failures.keys() >= {"list", "read", "write"}:
        raise found.failures["read"]
    service = store.service()
    facts = {name: text or None for name, text in service._asdict().items()}
    report = Diagnosis(store.root.url, facts)
    report.checks += found.checks()
    if found.failures.keys().isdisjoint({"read", "write", "delete"}):
        name = f"{PROBE_PREFIX}{os.urandom(8).hex()}"
        try:
            report.measured = _measure(store, name, measured_bytes, advance)
        finally:
            store.within(CLEANUP_SECONDS).delete([name])
        report.checks.append(check_clock(report.measured.get("clock_s")))
    advance(2 * measured_bytes)
    of_bucket = check_bucket(store.root, lambda: s3_client(service))
    report.checks += of_bucket
    if of_bucket[0].state != "holds":
        report.lifecycle_rule = suggested_rule(store.root)
    return report


def _measure(
    store: ObjectStore, name: str, count: int, advance: Callable[[int], None]
) -> dict[str, float]:
    small = memoryview(os.urandom(_SMALL_BYTES))
    block = memoryview(os.urandom(min(count, part_bytes(count))))

    def put() -> None:
        advance(0)
        store.put(name, [small], len(small))

    def views() -> Iterator[memoryview]:
        for begin in range(0, count, len(block)):
            advance(begin)
            yield block[: count - begin]

    def read(begin: int) -> None:
        advance(count)
        store.read_range(name, begin, min(_RANGE_BYTES, count - begin))

    measured = {"put_ms": median_ms_of(put)}
    measured["get_ms"] = median_ms_of(lambda: store.read(name, len(small)))
    begun = time.time()
    put()
    ended, modified = time.time(), store.head(name).modified
    if modified is not None:
        # HTTP has whole seconds.
        measured["clock_s"] = min(modified - begun + 1, 0.0) or max(modified - ended, 0.0)
    seconds = seconds_of(lambda: store.put(name, views(), count))
    measured["upload_bytes_per_second"] = count / seconds
    seconds = seconds_of(lambda: at_once(read, range(0, count, _RANGE_BYTES)))
    return measured | {"read_bytes_per_second": count / seconds}


def check_clock(ahead_s: float | None) -> Check:
    """Checks that the clocks of the server and of this machine agree, as sweeps assume.

    Args:
        ahead_s: seconds by which the server's clock is ahead; None if they are unknown.
    """
    what = "the clocks agree"
    if ahead_s is None:
        return Check(what, "unknown", "the server does not report the time of a write")
    if ahead_s == 0:
        return Check(what, "holds", "to the second")
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"the server's clock is {abs(ahead_s):.1f} s {side} the clock of this machine"
    holds = abs(ahead_s) <= _MOST_CLOCK_SECONDS
    return Check.of(what, holds, found, f"{found}. Set the clock of this machine")


# --- the rules of the bucket ----------------------------------------------------------------------


# Seconds for a connection to boto3, and for its answer.
_LIMIT = 10

_ABORT, _EXPIRE = "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"
_UPLOADS, _VERSIONS = "unfinished uploads end", "deletions free storage"


def s3_client(service: Service) -> Any:
    """Returns boto3's client for a service, with the credentials of the environment.

    Raises:
        ImportError: boto3 is not installed.
    """
    boto3 = importlib.import_module("boto3")
    config = importlib.import_module("botocore.config").Config(
        connect_timeout=_LIMIT, read_timeout=_LIMIT, retries={"total_max_attempts": 1}
    )
    given = s3fs_variables()
    return boto3.Session().client(
        "s3",
        endpoint_url=service.endpoint or None,
        region_name=service.region or None,
        aws_access_key_id=given.get("key"),
        aws_secret_access_key=given.get("secret"),
        aws_session_token=given.get("token"),
        config=config,
    )


def check_bucket(root: Root, open_client: Callable[[], Any]) -> list[Check]:
    """Checks first that unfinished uploads end, and then that deletions free storage.

    Args:
        root: the URL whose objects the rules must cover.
        open_client: returns boto3's client.
    """
    if root.kind == "az":
        return [Check(_UPLOADS, "holds", "Azure removes uncommitted blocks after a week")]
    if root.kind != "s3":
        return [Check(_UPLOADS, "unknown", "only the rules of S3 can be read")]
    checks: list[Check] = []
    try:
        client = open_client()
        rules = [rule for rule in _rules(client, root) if _covers(rule, root)]
        days = [rule[_ABORT]["DaysAfterInitiation"] for rule in rules if _ABORT in rule]
        found = f"a rule ends them after {plural(min(days, default=0), 'day')}"
        absent = "no rule ends the uploads of killed jobs, whose parts no listing shows"
        checks.append(Check.of(_UPLOADS, bool(days), found, absent))
        versions = client.get_bucket_versioning(Bucket=root.bucket).get("Status") == "Enabled"
        expires = any(_EXPIRE in rule for rule in rules)
        found = "a rule expires old versions" if versions else "the bucket keeps no old versions"
        absent = f"the bucket keeps old versions. Add a rule with {_EXPIRE}"
        checks.append(Check.of(_VERSIONS, expires or not versions, found, absent))
    except ImportError:
        checks.append(Check(_UPLOADS, "unknown", "the rules cannot be read. Install boto3"))
    except Exception as error:  # boto3 has classes of its own for each service.
        reason = Redactor()(f"the rules cannot be read: {error}").split("\n")[0]
        checks.append(Check(_VERSIONS if checks else _UPLOADS, "unknown", reason))
    return checks


def _rules(client: Any, root: Root) -> list[dict[str, Any]]:
    try:
        answer = client.get_bucket_lifecycle_configuration(Bucket=root.bucket)
    except Exception as error:
        if "NoSuchLifecycleConfiguration" in str(error):
            return []
        raise
    return [rule for rule in answer["Rules"] if rule["Status"] == "Enabled"]


def _covers(rule: dict[str, Any], root: Root) -> bool:
    """True if a rule holds for all objects beneath a URL, whatever their sizes and tags."""
    conditions = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    prefix: str = conditions.get("Prefix", "")
    return conditions.keys() <= {"Prefix"} and _beneath(root).startswith(prefix)


def suggested_rule(root: Root) -> dict[str, Any] | None:
    """Returns the rule that ends unfinished uploads after a day, in the form of S3 or Google; None
    for other stores."""
    prefix = _beneath(root)
    if root.kind == "s3":
        rule = {"ID": "torch_ckpt", "Status": "Enabled", "Filter": {"Prefix": prefix}}
        return {**rule, _ABORT: {"DaysAfterInitiation": 1}}
    if root.kind == "gs":
        prefixes = {"matchesPrefix": [prefix]} if prefix else {}
        return {"action": {"type": _ABORT}, "condition": {"age": 1, **prefixes}}
    return None


def _beneath(root: Root) -> str:
    """Returns the prefix of the keys of all objects beneath a URL."""
    return f"{root.prefix}/".lstrip("/")
