"""Launches of ranks, shared by the cases of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launcher import Launches


@pytest.fixture(scope="module")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launches]:
    module = f"tests.distributed.{request.path.stem}"
    imported = getattr(request.module, "IMPORTED", ())
    of_file = Launches(module, tmp_path_factory.mktemp(request.path.stem), imported)
    yield of_file
    of_file.end()
