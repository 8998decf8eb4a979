"""Faults of servers: repeated within limits, and then one sentence, without a secret."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.object_server import BUCKET, Fault, ObjectServer, Request, s3_fault
from tests.python.stores.conftest import SHORT, fsspec_store, memory_store, obstore_store
from torch_ckpt.stores import Changed, Limits, ObjectStore, Version

MIB = 1 << 20
URL = f"s3://{BUCKET}/run"
PLANTED = "PLANTEDSECRETVALUE0123456789"


@pytest.fixture
def store(server: ObjectServer) -> ObjectStore:
    opened = obstore_store(URL, server.options | {"secret": PLANTED})
    opened.put("a", [memoryview(b"0123456789")], 10)
    return opened


def upload(store: ObjectStore) -> Version:
    return store.put("big", (memoryview(bytes(8 * MIB)) for _ in range(5)), 40 * MIB)


def read(store: ObjectStore, version: Version | None = None) -> bytes:
    return bytes(store.read_range("a", 2, 4, version))


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "upload": upload,
    "put": lambda store: store.put("b", [memoryview(b"1")], 1),
    "create": lambda store: store.put_if_absent("b", b"unique"),
    "replace": lambda store: store.swap("a", b"unique", Version("e")),
    "stat": lambda store: store.head("a"),
    "read": lambda store: store.read("a", 100),
    "range": read,
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete(["a"]),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())

#: Each fault, with the number of the error and a part of its message.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "slow down": (
        s3_fault(503, "SlowDown"),
        errno.EREMOTEIO,
        "503 SlowDown: no. The server is overl",
    ),
    "too many requests": (s3_fault(429, "Throttled"), errno.EREMOTEIO, "429 Throttled"),
    "reset": (Fault("reset"), errno.ECONNRESET, "closed the connection"),
    "no answer": (Fault("stall"), errno.ETIMEDOUT, "did not answer in time. Check the endpoint"),
    "no permission": (s3_fault(403, "AccessDenied"), errno.EACCES, "403 AccessDenied: no. Check"),
    "expired": (s3_fault(400, "ExpiredToken"), errno.EACCES, "ExpiredToken: no. Renew the cred"),
    "no bucket": (s3_fault(404, "NoSuchBucket"), errno.ENOENT, "NoSuchBucket: no. Create the bu"),
}


def all_texts(error: BaseException | None) -> str:
    """Returns everything that an error and its causes can print."""
    texts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        texts += [str(error), repr(error), repr(error.args), repr(vars(error))]
        texts += traceback.format_exception(error)
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def failure_of(call: Callable[[ObjectStore], object], store: ObjectStore) -> OSError:
    with pytest.raises(OSError, match="failed: ") as caught:
        call(store)
    return caught.value


@calls
@pytest.mark.parametrize(
    "fault",
    [
        *("slow down", "no answer", "no permission"),
        *(
            pytest.param(fault, marks=pytest.mark.full)
            for fault in ("too many requests", "reset", "expired", "no bucket")
        ),
    ],
)
def test_a_fault_is_one_sentence_within_the_limits(
    server: ObjectServer,
    store: ObjectStore,
    call: Callable[[ObjectStore], object],
    fault: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer, number, text = FAULTS[fault]
    if fault == "no bucket" and call in (CALLS["replace"], CALLS["delete"]):
        pytest.skip("the object has no version, and nothing is to be deleted")
    body = f"{answer.body}<StringToSign>{PLANTED}</StringToSign>"
    answer = Fault(answer.kind, answer.status, body, answer.headers)
    server.fault = lambda request: answer
    begun = time.monotonic()
    error = failure_of(call, store)
    assert time.monotonic() - begun < 2 * (SHORT.stalled + 1)
    # The server may not answer the abort of an upload either.
    # The answer to HEAD has no body.
    if call is not CALLS["stat"] and "no progress" not in str(error):
        assert error.errno == number
        assert text in str(error)
    assert str(error.filename).startswith(URL)
    assert "\n" not in str(error)
    output = capfd.readouterr()
    texts = all_texts(error) + output.out + output.err + caplog.text + repr(store)
    assert PLANTED not in texts
    assert "Signature" not in texts
    assert "uploadId" not in texts
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.full
@calls
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_no_secret_through_fsspec(
    server: ObjectServer,
    call: Callable[[ObjectStore], object],
    fault: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = fsspec_store(URL, server.options | {"secret": PLANTED})
    answer = FAULTS[fault][0]
    body = f"{answer.body}<StringToSign>{PLANTED}</StringToSign>"
    if answer.kind == "status":
        message = f"<Message>wrong {PLANTED} at http://h/k?X-Amz-Signature=S</Message>"
        body = body.replace("<Message>no</Message>", message)
    server.fault = lambda request: Fault(answer.kind, answer.status, body)
    raised: OSError | None = None
    begun = time.monotonic()
    try:
        call(store)
    except OSError as error:
        raised = error
    assert raised is None or (raised.__cause__, raised.__context__) == (None, None)
    assert time.monotonic() - begun < 2 * (SHORT.stalled + 1)
    output = capfd.readouterr()
    texts = all_texts(raised) + output.out + output.err + caplog.text + repr(store)
    assert PLANTED not in texts
    assert "X-Amz-Signature" not in texts


@calls
@pytest.mark.parametrize("fault", ["slow down", "reset"])
@pytest.mark.parametrize("after", [False, True])
def test_a_request_that_fails_once_is_repeated(
    server: ObjectServer,
    store: ObjectStore,
    call: Callable[[ObjectStore], object],
    fault: str,
    after: bool,
) -> None:
    """Each request of a call fails once: before the server carries it out, or after."""
    answer = FAULTS[fault][0]
    answer = Fault(answer.kind, answer.status, answer.body, after=after)
    failed: set[tuple[str, str]] = set()
    lock = threading.Lock()

    def fail_once(request: Request) -> Fault | None:
        with lock:
            one = (request.kind, request.key)
            if one in failed:
                return None
            failed.add(one)
            return answer

    server.fault = fail_once
    if call is CALLS["replace"]:
        # The object has another version.
        with pytest.raises(Changed):
            call(store)
        assert server.objects["run/a"].data == b"0123456789"
        version = Version(server.objects["run/a"].etag)
        failed.clear()
        store.swap("a", b"unique", version)
        assert server.objects["run/a"].data == b"unique"
        return
    call(store)
    assert failed


def test_a_lost_answer_to_a_create_is_not_taken_for_another_writer(
    server: ObjectServer, store: ObjectStore
) -> None:
    lost = iter([Fault("stall", after=True)])
    server.fault = lambda request: next(lost, None) if request.kind == "put" else None
    store.put_if_absent("b", b"mine")
    assert server.objects["run/b"].data == b"mine"
    with pytest.raises(FileExistsError):
        store.put_if_absent("b", b"theirs")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("short"), "2..6, got 2..5"),
        (Fault("headers", headers={"Content-Range": "bytes 3-6/10"}), "2..6, got 3..7"),
        (Fault("headers", headers={"Content-Range": "garbage"}), "CONTENT_RANGE"),
        (Fault("headers", headers={"Content-Range": ""}), "Content-Range header not present"),
        (Fault("headers", headers={"Content-Length": "3"}), "requested 4 bytes, got 3"),
        (Fault("truncate"), "closed the connection"),
        (Fault("stall body"), "did not answer in time"),
    ],
)
def test_a_wrong_range_is_refused(
    server: ObjectServer, store: ObjectStore, fault: Fault, text: str
) -> None:
    server.fault = lambda request: fault
    error = failure_of(read, store)
    assert text in str(error)
    server.fault = lambda request: fault if request.number == len(server.log) - 1 else None
    server.log.clear()


def test_a_server_without_ranges_is_refused(server: ObjectServer, store: ObjectStore) -> None:
    server.ranges = False
    assert "non-partial response" in str(failure_of(read, store))


def test_a_content_encoding_is_ignored(server: ObjectServer, store: ObjectStore) -> None:
    server.fault = lambda request: Fault("headers", headers={"Content-Encoding": "gzip"})
    assert read(store) == b"2345"


def test_another_etag_in_the_answer_is_a_replaced_object(
    server: ObjectServer, store: ObjectStore
) -> None:
    version = store.head("a").version
    server.fault = lambda request: Fault("headers", headers={"ETag": '"other"'})
    with pytest.raises(Changed, match="replaced"):
        read(store, version)


def test_versions_without_etags_compare_size_and_time(
    server: ObjectServer, store: ObjectStore
) -> None:
    server.etags = False
    version = store.head("a").version
    assert version.etag is None
    assert read(store, version) == b"2345"
    assert read(store, Version('"of the put"')) == b"2345"
    server.objects["run/a"].data = b"01234567890"
    with pytest.raises(Changed):
        read(store, version)


# --- uploads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["create", "part", "complete"])
def test_a_failed_upload_leaves_no_object_and_no_parts(
    server: ObjectServer, store: ObjectStore, kind: str
) -> None:
    denied = s3_fault(403, "AccessDenied")
    server.fault = lambda request: denied if request.kind == kind else None
    failure_of(upload, store)
    assert "run/big" not in server.objects
    assert server.uploads == {}


def test_credentials_that_expire_in_an_upload_are_named(
    server: ObjectServer, store: ObjectStore
) -> None:
    expired = s3_fault(400, "ExpiredToken")
    server.fault = lambda r: expired if r.kind == "part" and r.number >= 2 else None
    error = failure_of(upload, store)
    assert error.errno == errno.EACCES
    assert "Renew the credentials" in str(error)


def test_a_part_that_fails_is_repeated_and_no_other(
    server: ObjectServer, store: ObjectStore
) -> None:
    server.fault = lambda r: (
        s3_fault(503, "SlowDown") if (r.kind, r.number) == ("part", 1) else None
    )
    upload(store)
    assert server.kinds().count("part") == 3 + 1
    assert server.objects["run/big"].data == bytes(40 * MIB)


def test_waiting_for_the_caller_is_no_stall(server: ObjectServer, store: ObjectStore) -> None:
    limits = Limits(connect=0.3, progress=1, retry=0.3)
    store = obstore_store(URL, server.options, limits)

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(16 * MIB))
        threading.Event().wait(2 * limits.stalled)
        yield memoryview(bytes(16 * MIB))

    store.put("big", parts(), 32 * MIB)
    assert len(server.objects["run/big"].data) == 32 * MIB


def test_a_limit_for_the_call_ends_it(server: ObjectServer) -> None:
    server.fault = lambda request: Fault("stall")
    for opener in (obstore_store, fsspec_store):
        store: ObjectStore = opener(URL, server.options, Limits())
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"longer than the limit of 1 s|answer in time"):
            store.within(1).head("a")
        assert time.monotonic() - begun < 5


def test_a_library_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store(Limits(connect=0.1, progress=0.1, retry=0.1))
    hang = threading.Event()
    monkeypatch.setattr(type(store), "_head", lambda self, name: hang.wait(60))
    with pytest.raises(TimeoutError, match="stat failed: the server made no progress for 0 s"):
        store.head("a")
    hang.set()


def test_a_panic_of_a_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        __module__ = "pyo3_runtime"

    def panic(self: ObjectStore, name: str) -> None:
        raise Panic("overflow")

    store = memory_store()
    monkeypatch.setattr(type(store), "_head", panic)
    assert "stat failed: panic: overflow" in str(failure_of(lambda store: store.head("a"), store))


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = {
            "key": "k",
            "secret": "s",
            "endpoint_url": f"http://127.0.0.1:{unused.getsockname()[1]}",
        }
        for opener in (obstore_store, fsspec_store):
            error = failure_of(lambda store: store.head("a"), opener(URL, options, SHORT))
            # botocore repeats requests, too.
            assert error.errno in (errno.ECONNREFUSED, errno.ETIMEDOUT)
            assert "Check the endpoint" in str(error)


def test_an_upload_outlives_a_server_that_is_away() -> None:
    first = ObjectServer()
    with first.running():
        store = obstore_store(URL, first.options, Limits(connect=1, progress=5, retry=20))

        def parts() -> Iterator[memoryview]:
            yield from [memoryview(bytes(16 * MIB))] * 2
            away.set()
            yield memoryview(bytes(16 * MIB))

        away, failures = threading.Event(), []

        def run() -> None:
            try:
                store.put("big", parts(), 48 * MIB)
            except OSError as error:
                failures.append(error)

        # Holds the answers back until the server is away.
        first.fault = lambda r: Fault("reset") if r.kind == "part" and away.wait(10) else None
        thread = threading.Thread(target=run)
        thread.start()
        assert away.wait(10)
    second = ObjectServer(int(first.url.rpartition(":")[2]))
    second.uploads = first.uploads
    threading.Event().wait(2)  # Nothing listens.
    with second.running():
        thread.join(30)
        assert failures == []
        assert len(second.objects["run/big"].data) == 48 * MIB


@pytest.fixture
def secure(server: ObjectServer, tmp_path: Path) -> dict[str, Any]:
    """Encrypts the connections of the server. Returns the options of a client that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    new = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", *new, "-keyout", "key", "-out", "request", "-subj", "/CN=localhost")
    (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
    openssl("x509", "-req", "-in", "request", *signing, "-out", "certificate")
    server.encrypt(tmp_path / "certificate", tmp_path / "key")
    return server.options | {"ca_bundle": str(tmp_path / "ca.pem")}


def test_an_untrusted_server_is_refused(server: ObjectServer, secure: dict[str, Any]) -> None:
    obstore_store(URL, secure).put("a", [memoryview(b"1")], 1)
    error = failure_of(lambda store: store.head("a"), obstore_store(URL, server.options))
    assert "certificate is not trusted. Pass the path" in str(error)


def test_a_redirect_from_https_to_http_is_refused(
    server: ObjectServer, secure: dict[str, Any]
) -> None:
    with ObjectServer().running() as other:
        store = obstore_store(URL, secure)
        store.put("a", [memoryview(b"1")], 1)
        location = {"Location": f"{other.url}/{BUCKET}/run/a"}
        server.fault = lambda request: Fault("status", 307, headers=location)
        assert "redirect, is not https" in str(failure_of(lambda s: s.read("a", 9), store))
        assert other.log == []


@pytest.mark.full
def test_a_frozen_server_is_named(real_servers: Callable[[str], Any]) -> None:
    started = real_servers("seaweedfs")
    limits = Limits(connect=1, progress=2, retry=3)
    store = obstore_store("s3://checkpoints/frozen", started.options, limits)

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(16 * MIB))
        os.kill(started.pid, signal.SIGSTOP)
        yield from [memoryview(bytes(16 * MIB))] * 5

    begun = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="upload failed: ") as caught:
            store.put("big", parts(), 96 * MIB)
        assert time.monotonic() - begun < 2 * limits.stalled
        assert caught.value.filename == store.url_of("big")
    finally:
        os.kill(started.pid, signal.SIGCONT)
    store.put("small", [memoryview(b"1")], 1)
    assert store.read("small", 1)[0] == b"1"


SIGNALLED = """
import signal, sys, threading, time
sys.path[:0] = {path!r}
from torch_ckpt.stores import Limits, open_store
if {handler}:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
store = open_store({url!r}, {options!r}, Limits())
print("waits", flush=True)
store.put("a", (memoryview(bytes(8 << 20)) for _ in range(9)), 72 << 20)
"""


@pytest.mark.parametrize(
    ("number", "handler", "status"),
    [
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGTERM, True, 7),
        (signal.SIGINT, False, -2),
    ],
)
def test_a_signal_ends_a_wait_for_a_silent_server(
    server: ObjectServer, number: int, handler: bool, status: int
) -> None:
    server.fault = lambda request: Fault("stall") if request.kind == "part" else None
    text = SIGNALLED.format(path=sys.path, handler=handler, url=URL, options=server.options)
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    while "part" not in server.kinds():
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begun < 5
    assert process.returncode == status, errors
    assert not re.search("panick|Fatal Python", errors)


def test_a_process_ends_although_a_call_was_abandoned(server: ObjectServer) -> None:
    server.fault = lambda request: Fault("stall")
    text = SIGNALLED.format(path=sys.path, handler=False, url=URL, options=server.options)
    text = text.replace("store.put(", "store.within(0.5).put(")
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert "TimeoutError" in done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert time.monotonic() - begun < 20
    assert not re.search("panick|Fatal Python", done.stderr)


def test_secrets_of_the_environment_are_removed(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENVIRONMENT")
    options = {"endpoint_url": server.options["endpoint_url"]}
    server.fault = lambda request: s3_fault(403, "AccessDenied", f"wrong key {PLANTED}")
    for opener in (obstore_store, fsspec_store):
        store: Any = opener(URL, options)
        error = failure_of(lambda store: store.head("a") and store.read("a", 9), store)
        assert error.errno in (errno.EACCES, errno.EPERM)
        assert PLANTED not in all_texts(error)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == PLANTED


# --- races ----------------------------------------------------------------------------------------


def race(store: ObjectStore, write: Callable[[bytes], object]) -> list[bytes]:
    """Writes from 8 threads at once. Returns what the winners wrote."""
    winners: list[bytes] = []
    failures: list[Exception] = []
    start = threading.Barrier(8)

    def run(data: bytes) -> None:
        start.wait()
        try:
            write(data)
            winners.append(data)
        except (FileExistsError, Changed):
            pass
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(b"writer %d" % i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return winners


def test_one_writer_wins_although_answers_are_lost(server: ObjectServer) -> None:
    store = obstore_store(URL, server.options, Limits(connect=5, progress=5, retry=20))
    randomness = random.Random(5)

    def sometimes(request: Request) -> Fault | None:
        if request.kind != "put" or randomness.random() < 0.5:
            return None
        return Fault("reset", after=randomness.random() < 0.7)

    server.fault = sometimes
    for number in range(6):
        name = f"lease-{number}"
        winners = race(store, lambda data, name=name: store.put_if_absent(name, data))  # type: ignore[misc]
        assert winners == [server.objects[f"run/{name}"].data]
        version = store.head(name).version
        swapped = race(
            store,
            lambda data, name=name, version=version: store.swap(name, b"next " + data, version),  # type: ignore[misc]
        )
        assert [b"next " + data for data in swapped] == [server.objects[f"run/{name}"].data]
    assert len(server.kinds()) > 6 * 16
