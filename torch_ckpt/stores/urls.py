"""Checks URLs of stores and names of objects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

#: Protocols that obstore implements, by their alias in URLs.
OBSTORE_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
}

#: fsspec's protocols that read through another file system, a cache or an archive. Their options
#: can name any other URL.
_WRAPPING = re.compile(
    "archive|async_wrapper|blockcache|cached|cachingfs|data|dask|dir|dirfs|filecache|generic|git"
    "|github|jlab|jupyter|libarchive|reference|simplecache|tar|zip"
)
# S3 limits a key to 1024 bytes of UTF-8. File systems limit a segment to 255.
_KEY_BYTES, _SEGMENT_BYTES, _URL_BYTES = 1024, 255, 2048
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_AZURE_HOST = re.compile(r"(?P<account>[a-z0-9]{3,24})\.(?:dfs|blob)\.core\.windows\.net")


@dataclass(frozen=True)
class Root:
    """A checked URL.

    Attributes:
        url: the URL, without a slash at the end.
        kind: "s3", "gs", "az" or "http" if obstore implements the protocol, else the protocol.
        bucket: bucket, container or host; "" if the URL has none.
        prefix: what precedes each name in a key; "" or segments without a slash at either end.
        account: the Azure account that the URL names; "" if it names none.
    """

    url: str
    kind: str
    bucket: str
    prefix: str
    account: str = ""

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def parse_root(url: str) -> Root:
    """Checks the URL of a store, and splits it.

    Raises:
        ValueError: the URL is not allowed; the message has the reason, and no user info or query.
    """
    shown = safe_url(url)
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ValueError(f"{shown} is not a URL. Pass a URL such as s3://bucket/run.")
    if "::" in url:
        raise ValueError(f"{shown} chains protocols with '::'. Pass the URL of the store itself.")
    if _WRAPPING.fullmatch(scheme):
        raise ValueError(
            f"{shown}: the protocol {scheme} wraps another one. Pass the URL of the store itself."
        )
    if "?" in rest or "#" in rest:
        raise ValueError(
            f"{shown} has a query or a fragment. Remove it, and pass settings as storage_options."
        )
    kind = OBSTORE_SCHEMES.get(scheme, scheme)
    bucket, _, path = rest.partition("/")
    bucket, account = _without_user(shown, scheme, bucket)
    if kind in ("s3", "gs", "az", "http") and not bucket:
        raise ValueError(f"{shown} names no bucket or host. Pass a URL such as s3://bucket/run.")
    prefix = path.strip("/")
    if prefix:
        try:
            check_name(prefix)
        except ValueError as error:
            raise ValueError(f"{shown} is not allowed as the root of a store: {error}") from None
    if len(url.encode()) > _URL_BYTES or re.search(r"[\s\\\x00-\x1f\x7f]", bucket):
        raise ValueError(f"{shown} is too long, or its bucket has a space or a control character")
    return Root(f"{scheme}://{rest.rstrip('/')}", kind, bucket, prefix, account)


def _without_user(shown: str, scheme: str, bucket: str) -> tuple[str, str]:
    """Returns the bucket and the account of a URL. Only Azure's URLs name both."""
    if "@" not in bucket:
        return bucket, ""
    container, _, host = bucket.rpartition("@")
    match = _AZURE_HOST.fullmatch(host)
    if scheme in ("abfs", "abfss") and match and re.fullmatch(r"[a-z0-9$-]+", container):
        return container, match["account"]
    raise ValueError(
        f"{shown} has a user name or a password. Remove it, and pass it as storage_options."
    )


def safe_url(url: str) -> str:
    """Returns a URL without user info, query and fragment, for messages."""
    text = re.sub(r"[?#].*", "", url, flags=re.S)
    text = re.sub(r"(?<=://)[^/]*@", "", text)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


def check_name(name: str) -> str:
    """Returns the name of an object if it is allowed: segments that are joined by slashes.

    The rules hold for names from metadata and listings too, whose writer may be hostile.

    Raises:
        ValueError: the name is not allowed; the message has the reason.
    """
    shown = f"the name {name[:100]!r}"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{shown} is not valid Unicode") from None
    if not 0 < length <= _KEY_BYTES:
        raise ValueError(f"{shown} has {length} bytes; 1 to {_KEY_BYTES} are allowed")
    # '%' would be encoded by some libraries and not by others.
    if found := re.search(r"[\x00-\x1f\x7f-\x9f\\?#%]|://|::", name):
        raise ValueError(f"{shown} has {found[0]!r}, which is not allowed")
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            raise ValueError(f"{shown} has the segment {segment!r}, which is not allowed")
        if len(segment.encode()) > _SEGMENT_BYTES:
            raise ValueError(f"{shown} has a segment of more than {_SEGMENT_BYTES} bytes")
    return name


def http_base(root: Root) -> str:
    """Returns the percent-encoded URL of a root that is served over HTTP."""
    parts = urlsplit(root.url)
    return f"{parts.scheme}://{parts.netloc}/{quote(root.prefix)}".rstrip("/")
