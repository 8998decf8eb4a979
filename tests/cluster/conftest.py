"""Starts two hosts for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, cluster, lacking


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts; the parameter is the kind of their file system."""
    if missing := lacking(request.param):
        pytest.skip(f"this machine lacks {missing}")
    with cluster(request.param, tmp_path) as started:
        yield started
