"""The files of a save stay the same, byte for byte, when the code that writes them changes.

A commit that changes the files on purpose records new digests (record.py), adds samples of the old
files to tests/compat, and describes the change in CHANGELOG.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.references.saves import RECORDED, made, version

RECORDS = json.loads(RECORDED.read_text())


@pytest.mark.skipif(version() != RECORDS["torch"], reason="the digests are of another torch")
def test_saves_write_the_recorded_files(tmp_path: Path) -> None:
    assert made(tmp_path) == RECORDS["files"]
