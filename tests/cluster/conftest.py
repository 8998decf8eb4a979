"""Starts hosts for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, cluster, lacking


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Hosts; the parameter is the kind of their file system, or the kind and the number of hosts.
    Without a number, there are two."""
    kind, count = (request.param, 2) if isinstance(request.param, str) else request.param
    if missing := lacking(kind):
        pytest.skip(f"this machine lacks {missing}")
    with cluster(kind, tmp_path, count) as started:
        yield started
