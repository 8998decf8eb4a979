"""Converts the exceptions of storage libraries to OSErrors without secrets."""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from torch_ckpt._base.formatting import printable
from torch_ckpt.stores.redaction import Redactor


class Changed(OSError):
    """An object has another version than the one that the caller has read. ``errno`` is
    ``ESTALE``."""


class _Cause(NamedTuple):
    """A cause of failures: a pattern of the library's text, errno, meaning, and advice.

    The meaning replaces the library's text, if there is one.
    """

    pattern: str
    number: int
    meaning: str
    advice: str


_CREDENTIALS = "Check the credentials, and that they permit this request"
_LATER = "The server is overloaded or out of order: try again later"
_REACH = "Check the endpoint, and that the server runs"

# The first pattern that matches the type and text of an exception counts.
_CAUSES = [
    _Cause(r"AlreadyExistsError|FileExistsError", errno.EEXIST, "", ""),
    _Cause(
        r"PreconditionError|PreconditionFailed|pre-?conditions?\b.*did not hold",
        errno.ESTALE,
        "",
        "",
    ),
    _Cause(
        r"(?i)certificate|UnknownIssuer|tls handshake",
        errno.ECONNABORTED,
        "the server's certificate is not trusted",
        "Pass the path of the authority's certificate as ca_bundle in storage_options",
    ),
    _Cause(
        r"ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidToken",
        errno.EACCES,
        "",
        "Renew the credentials",
    ),
    _Cause(r"RequestTimeTooSkewed", errno.EACCES, "", "Set the clock of this machine"),
    _Cause(r"NoSuchBucket|ContainerNotFound", errno.ENOENT, "", "Create the bucket first"),
    _Cause(
        r"code: 30[1278]\b|PermanentRedirect|without LOCATION",
        errno.EIO,
        "the server redirects to another endpoint",
        "Set the region or the endpoint of the bucket",
    ),
    _Cause(
        r"code: 40[13]\b|PermissionError|AccessDenied|SignatureDoesNotMatch|InvalidAccessKeyId"
        r"|Forbidden|Unauthor|necessary privileges|valid authentication|NoCredentials"
        r"|(?:locate|instance) credentials",
        errno.EACCES,
        "",
        _CREDENTIALS,
    ),
    _Cause(r"FileNotFoundError|code: 404\b|NoSuchKey", errno.ENOENT, "", ""),
    _Cause(
        r"BadScheme|scheme is not allowed",
        errno.EINVAL,
        "the endpoint, or a redirect, is not https",
        "Pass an endpoint that begins with https://, or with http:// to use no encryption",
    ),
    _Cause(
        r"(?i)dns error|failed to lookup|name resolution|nodename",
        errno.EHOSTUNREACH,
        "the name of the host cannot be resolved",
        _REACH,
    ),
    _Cause(
        r"ConnectionRefused|refused|(?:EndpointConnection|ClientConnector)Error",
        errno.ECONNREFUSED,
        "connection refused",
        _REACH,
    ),
    _Cause(
        r"TimeoutError|TimedOut|kind: Timeout|timed out",
        errno.ETIMEDOUT,
        "the server did not answer in time",
        _REACH,
    ),
    _Cause(
        r"code: (?:429|50[034])\b|SlowDown|TooManyRequests|ServiceUnavailable|InternalError",
        errno.EREMOTEIO,
        "",
        _LATER,
    ),
    _Cause(
        r"ConnectionReset|IncompleteMessage|Interrupted|BrokenPipe|UnexpectedEof|IncompleteBody",
        errno.ECONNRESET,
        "the server closed the connection",
        _LATER,
    ),
    _Cause(
        r"Content-Range|CONTENT_RANGE|non-partial|UnexpectedRange|InvalidRange",
        errno.EIO,
        "",
        "The object is shorter than expected, or the server does not implement ranges",
    ),
    _Cause(
        r"NotImplemented|NotSupported|not implemented|not supported|PROPFIND",
        errno.EOPNOTSUPP,
        "",
        "Use another kind of store",
    ),
]

# Failures that may pass. A request may have been carried out nevertheless.
_TRANSIENT = (errno.ETIMEDOUT, errno.ECONNRESET, errno.EREMOTEIO, errno.ECONNREFUSED)


def translate(error: BaseException, operation: str, url: str, redactor: Redactor) -> OSError:
    """Returns an OSError for an exception of a library: what failed, where, the request, the
    cause, and what to do."""
    text = str(error)
    cause = _cause_of(error)
    if isinstance(error, OSError) and error.strerror:
        meaning = error.strerror
    else:
        meaning = cause.meaning or _short(text) or os.strerror(cause.number)
    advice = f". {cause.advice}." if cause.advice else ""
    message = printable(redactor(f"{operation} failed: {_request(text)}{meaning}{advice}"))
    kind = Changed if cause.number == errno.ESTALE else OSError
    return kind(cause.number, message, url)


def _cause_of(error: BaseException) -> _Cause:
    # s3fs keeps the server's code in the cause. Names and URLs may contain any word.
    text = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
    text = re.sub(r"\w+://\S+|(?:location|path:?) \S+|<(Key|Resource)>.*?</\1>", "", text)
    found = next((cause for cause in _CAUSES if re.search(cause.pattern, text)), None)
    number = error.errno if isinstance(error, OSError) else None
    # s3fs raises an OSError with EINVAL for all codes that it does not know.
    if number in (None, 0, errno.EINVAL) or (found and found.number == number):
        return found or _Cause("", number or errno.EIO, "", "")
    known = (cause.advice for cause in reversed(_CAUSES) if cause.number == number)
    return _Cause("", number or errno.EIO, "", next(known, ""))


def was_repeated(error: BaseException) -> bool:
    """True if the library has sent the request more than once."""
    return re.search(r"after [1-9]\d* retries", str(error)) is not None


def unknown_outcome(error: BaseException) -> bool:
    """True if a write that failed may have been carried out, now or by an earlier attempt."""
    number = _cause_of(error).number
    return number in _TRANSIENT or (was_repeated(error) and number in (errno.EEXIST, errno.ESTALE))


def number_of(error: BaseException) -> int:
    """Returns the error number for an exception of a library."""
    return _cause_of(error).number


def is_transient(error: BaseException) -> bool:
    """True if repeating the request may succeed."""
    return _cause_of(error).number in _TRANSIENT


def _request(text: str) -> str:
    """Returns the request that a library names, as "PUT: " or "PUT after 3 retries: "."""
    match = re.search(r"Error performing ([A-Z]+) ", text)
    if match is None:
        return ""
    repeated = re.search(r"after ([1-9]\d*) retries", text)
    return f"{match[1]}{f' after {repeated[1]} retries' if repeated else ''}: "


def _short(text: str) -> str:
    """Returns the server's code and message, or else the first line of a library's text."""
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>([^<]{1,100})</Code>", text)
    message = re.search(r"<Message>([^<]{1,300})</Message>", text)
    if status or code:
        answer = " ".join(found[1] for found in (status, code) if found)
        return f"{answer}: {message[1].rstrip('. ')}" if message else answer
    first = text.strip().split("\n")[0][:400]
    return re.sub(r"^(?:Generic \w+ error|Object at location \S+ not found): ", "", first)
