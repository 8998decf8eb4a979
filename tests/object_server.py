"""An S3 server in a thread of the test, with faults that a test chooses for each request."""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: Settings for clients of the server.
MIB = 1 << 20
BUCKET, KEY, SECRET = "bucket", "AKIDTEST", "SECRETTEST"


@dataclass(frozen=True)
class Request:
    """A request that the server has received.

    Attributes:
        kind: "put", "part", "create", "complete", "abort", "get", "head", "list", "delete" or
            "bulk delete".
        key: the object's key; empty for requests to the bucket.
        number: how many requests of this kind came before.
    """

    kind: str
    key: str
    number: int
    headers: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """An answer that is not the one the client asked for.

    Attributes:
        kind: "status" (answer ``status`` with ``body``), "reset" (close the connection), "stall"
            (never answer), "stall body" (send half of the body, then nothing), "truncate" (close
            after half of the body), "headers" (answer correctly, but with ``headers``) or "short"
            (serve one byte less than the range, with matching headers).
        after: True if the server carries out the request before the fault.
    """

    kind: str
    status: int = 503
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False


def s3_fault(status: int, code: str, message: str = "no", after: bool = False) -> Fault:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Fault("status", status, body, after=after)


@dataclass
class Stored:
    data: bytes
    etag: str
    modified: datetime


class ObjectServer:
    """The server's objects, its log of requests, and its faults.

    Attributes:
        fault: called for each request; returns a fault, or None.
        conditions: False if the server ignores ``If-Match`` and ``If-None-Match``.
        ranges: False if the server ignores ``Range``.
        etags: False if the server reports no ETag for stored objects.
        page: maximum number of keys in a page of a listing.
        pause: seconds before each MiB that the server receives.
    """

    def __init__(self, port: int = 0) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.log: list[Request] = []
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.conditions = self.ranges = self.etags = True
        self.page, self.pause = 1000, 0.0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def options(self) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.url}

    def encrypt(self, certificate: Path, key: Path) -> None:
        """Uses TLS for connections that begin later."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = self.url.replace("http:", "https:")

    def kinds(self) -> list[str]:
        return [request.kind for request in self.log]

    @contextmanager
    def running(self) -> Iterator[ObjectServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        class Handler(_Handler):
            store = self

        return Handler


class _Handler(BaseHTTPRequestHandler):
    store: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self.answer()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    # --- requests ---------------------------------------------------------------------------------

    def answer(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        self.key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        kind = self.kind()
        store = self.store
        length = int(self.headers.get("Content-Length") or 0)
        self.content = b"".join(
            self.rfile.read(min(MIB, length - begin))
            for begin in range(0, length, MIB)
            if not store.ended.wait(store.pause)
        )
        with store.lock:
            number = sum(request.kind == kind for request in store.log)
            request = Request(kind, self.key, number, dict(self.headers.items()))
            store.log.append(request)
        self.fault = store.fault(request)
        if self.fault and not self.fault.after and self.fault.kind in ("status", "reset", "stall"):
            self.fail(self.fault)
            return
        with store.lock:
            status, body, headers = getattr(self, kind.replace(" ", "_"))()
        if self.fault and self.fault.after:
            self.fail(self.fault)
            return
        self.send(status, body, headers)

    def kind(self) -> str:
        command, query = self.command, self.query
        if "uploadId" in query:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[command]
        if command == "POST":
            return "create" if "uploads" in query else "bulk delete"
        if command == "GET" and not self.key:
            return "list"
        return command.lower()

    def fail(self, fault: Fault) -> None:
        if fault.kind == "stall":
            self.store.ended.wait()
        if fault.kind == "status":
            body = b"" if self.command == "HEAD" else fault.body.encode()
            self.send(fault.status, body, fault.headers)
            return
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def handle(self) -> None:
        # A client may close the connection at any time.
        with suppress(OSError):
            super().handle()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        fault = self.fault
        if fault and fault.kind == "headers":
            headers = headers | fault.headers
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.kind in ("truncate", "stall body"):
            self.wfile.write(body[: len(body) // 2])
            self.fail(Fault("stall" if fault.kind == "stall body" else "reset"))
            return
        self.wfile.write(body)

    # --- S3 ---------------------------------------------------------------------------------------

    def put(self) -> tuple[int, bytes, dict[str, str]]:
        if refused := self.refused():
            return refused
        return 200, b"", {"ETag": self.keep(self.content, "")}

    def refused(self) -> tuple[int, bytes, dict[str, str]] | None:
        """Returns the answer to a write whose condition does not hold."""
        if not self.store.conditions:
            return None
        found = self.store.objects.get(self.key)
        expected = self.headers.get("If-Match")
        if (self.headers.get("If-None-Match") == "*" and found) or (
            expected and (found is None or found.etag != expected)
        ):
            body = b"<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>"
            return 412, body, {}
        return None

    def keep(self, data: bytes, suffix: str) -> str:
        etag = f'"{hashlib.md5(data).hexdigest()}{suffix}"'
        self.store.objects[self.key] = Stored(data, etag, datetime.now(timezone.utc))
        return etag

    def create(self) -> tuple[int, bytes, dict[str, str]]:
        name = f"upload-{len(self.store.log)}"
        self.store.uploads[name] = {}
        inner = f"<Bucket>{BUCKET}</Bucket><Key>{escape(self.key)}</Key><UploadId>{name}</UploadId>"
        return 200, f"<R>{inner}</R>".encode(), {}

    def part(self) -> tuple[int, bytes, dict[str, str]]:
        parts = self.store.uploads.get(self.query["uploadId"], {})
        parts[int(self.query["partNumber"])] = self.content
        return 200, b"", {"ETag": f'"{hashlib.md5(self.content).hexdigest()}"'}

    def complete(self) -> tuple[int, bytes, dict[str, str]]:
        parts = self.store.uploads.pop(self.query["uploadId"], None)
        if parts is None:
            return 404, b"<Error><Code>NoSuchUpload</Code><Message>no</Message></Error>", {}
        etag = self.keep(b"".join(parts[number] for number in sorted(parts)), f"-{len(parts)}")
        return 200, f"<R><ETag>{escape(etag)}</ETag></R>".encode(), {}

    def abort(self) -> tuple[int, bytes, dict[str, str]]:
        self.store.uploads.pop(self.query["uploadId"], None)
        return 204, b"", {}

    def get(self) -> tuple[int, bytes, dict[str, str]]:
        found = self.store.objects.get(self.key)
        if found is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>", {}
        headers = {
            "ETag": found.etag if self.store.etags else "",
            "Last-Modified": found.modified.strftime("%a, %d %b %Y %H:%M:%S GMT"),
        }
        if self.headers.get("If-Match", found.etag) != found.etag:
            return 412, b"", headers
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or not self.store.ranges:
            return 200, found.data, headers
        begin, end = int(match[1]), min(int(match[2] or len(found.data)) + 1, len(found.data))
        if begin >= len(found.data):
            return 416, b"<Error><Code>InvalidRange</Code><Message>no</Message></Error>", headers
        if self.fault and self.fault.kind == "short":
            end -= 1
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(found.data)}"
        return 206, found.data[begin:end], headers

    def head(self) -> tuple[int, bytes, dict[str, str]]:
        status, body, headers = self.get()
        return status, b"", headers | {"Content-Length": str(len(body))}

    def list(self) -> tuple[int, bytes, dict[str, str]]:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        keys = sorted(key for key in self.store.objects if key.startswith(prefix) and key > after)
        page = keys[: self.store.page]
        more = "true" if len(keys) > len(page) else "false"
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
            f"<ETag>{escape(found.etag)}</ETag>"
            f"<LastModified>{found.modified.isoformat()}</LastModified></Contents>"
            for key in page
            if (found := self.store.objects[key])
        ]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if page else ""
        token = token if more == "true" else ""
        text = f"<R>{''.join(rows)}<IsTruncated>{more}</IsTruncated>{token}</R>"
        return 200, text.encode(), {}

    def delete(self) -> tuple[int, bytes, dict[str, str]]:
        self.store.objects.pop(self.key, None)
        return 204, b"", {}

    def bulk_delete(self) -> tuple[int, bytes, dict[str, str]]:
        keys = re.findall(r"<Key>(.*?)</Key>", self.content.decode())
        for key in keys:
            self.store.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return 200, f"<DeleteResult>{rows}</DeleteResult>".encode(), {}
