"""URLs of stores and names of objects."""

from __future__ import annotations

import pytest

from torch_ckpt.stores import open_store
from torch_ckpt.stores.urls import check_name, http_base, parse_root


@pytest.mark.parametrize(
    ("url", "kind", "bucket", "prefix", "account"),
    [
        ("s3://bucket/a/run", "s3", "bucket", "a/run", ""),
        ("s3://bucket", "s3", "bucket", "", ""),
        ("S3a://bucket/run/", "s3", "bucket", "run", ""),
        ("gs://bucket/run", "gs", "bucket", "run", ""),
        ("az://container/run", "az", "container", "run", ""),
        ("abfss://c@account.dfs.core.windows.net/run", "az", "c", "run", "account"),
        ("https://host:8080/a b/run", "http", "host:8080", "a b/run", ""),
        ("memory://run", "memory", "run", "", ""),
        ("file:///tmp/run", "file", "", "tmp/run", ""),
        ("sftp://host/run", "sftp", "host", "run", ""),
    ],
)
def test_a_url_is_split(url: str, kind: str, bucket: str, prefix: str, account: str) -> None:
    root = parse_root(url)
    assert (root.kind, root.bucket, root.prefix, root.account) == (kind, bucket, prefix, account)
    assert root.url_of("step/x").endswith("/step/x")


@pytest.mark.parametrize(
    "url",
    [
        "/local/path",
        "bucket/run",
        "s3:/bucket/run",
        "s3:///run",
        "s3://SECRET@bucket/run",
        "s3://user:SECRET@bucket/run",
        "https://user:SECRET@host/run",
        "abfs://user:SECRET@account.dfs.core.windows.net/run",
        "abfs://SECRET@account.example.com/run",
        "s3://bucket/run?versionId=SECRET",
        "s3://bucket/run#SECRET",
        "simplecache::s3://bucket/run",
        "s3://bucket/run::file:///etc",
        "reference://bucket/run",
        "filecache://x",
        "simplecache://x",
        "blockcache://x",
        "zip://x.zip",
        "tar://x.tar",
        "dir://x",
        "cached://x",
        "generic://x",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/a/./b",
        "s3://bucket/a%2fb",
        "s3://buc ket/run",
        "s3://bucket/a\nb",
        "s3://bucket/a\x00b",
        "s3://bucket/a\\b",
        f"s3://bucket/{'a/' * 1100}",
    ],
)
def test_a_url_that_is_not_allowed_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        open_store(url, {"secret": "SECRET"})
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_name_has_segments() -> None:
    for name in ("a", "step-1/.metadata", "__0_0.distcp", "日本/ä b", "a+b=c@d~e", "x" * 255):
        assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a?b", "a#b", "a%2eb", "a\\b"),
        *("a\nb", "a\x7fb", "a\x85b", "\ud800", "s3://b/c", "a::b", "x" * 256, "x/" * 600 + "x"),
    ],
)
def test_a_name_that_is_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"not allowed|are allowed|Unicode|more than 255 bytes"):
        check_name(name)


def test_a_root_over_http_is_percent_encoded() -> None:
    assert http_base(parse_root("https://host:80/a b/ä")) == "https://host:80/a%20b/%C3%A4"
