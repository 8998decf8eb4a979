"""``torch-ckpt doctor URL``: measures an object store and checks what saves beneath a URL rely on.

A thread makes all requests. After Ctrl-C, the thread ends its upload or its request and deletes its
object. If a signal kills the process, a later sweep of the root deletes the object.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from torch_ckpt._base.progress import Progress
from torch_ckpt.cli.diagnosis import Diagnosis, median_ms_of, seconds_of
from torch_ckpt.stores import ObjectStore, at_once, open_store, part_bytes
from torch_ckpt.stores.bucket_rules import check_bucket, s3_client, suggested_rule
from torch_ckpt.stores.folder import CLEANUP_SECONDS
from torch_ckpt.stores.probe import PROBE_PREFIX, Check, probe

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
