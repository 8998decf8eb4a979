"""Servers of forked children for the tests of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.saves import save_as_rank
from tests.interposed import Server
from tests.sweeps import NEW


@pytest.fixture(scope="session")
def servers(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server for each rank."""
    examples = []
    for how in ("torch_ckpt.save", "dcp.save", "async_save"):
        store = tmp_path_factory.mktemp("example") / "store"
        examples.append((save_as_rank, (NEW, 2, how, -1, str(store))))
    started = [Server(shim, examples) for _ in range(2)]
    yield started
    for server in started:
        server.close()
