"""Servers of other tests."""

from __future__ import annotations

import fsspec
import pytest

from tests.remote_stores import BUCKET, s3_server


@pytest.mark.parametrize("number", [1, 2])
def test_each_server_starts_empty(number: int) -> None:
    with s3_server() as settings:
        files = fsspec.filesystem("s3", **settings)
        assert files.find(BUCKET) == []
        files.pipe(f"{BUCKET}/left", b"behind")
