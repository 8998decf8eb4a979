"""The number of Python functions that a save and a load enter; it may only fall."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.full

#: The most functions of torch_ckpt that rank 0 of two enters, by operation.
MOST = {"save, unchanged plan": 86, "save, new name": 88, "async_save": 110, "load": 80}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the names of nested functions")
def test_saves_and_loads_enter_no_more_functions_than_before(tmp_path: Path) -> None:
    out = tmp_path / "functions.json"
    command = [sys.executable, "-m", "tests.python_calls", "--out", str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    entered = {operation: len(names) for operation, names in json.loads(out.read_text()).items()}
    assert entered.keys() == MOST.keys()
    assert {key: count for key, count in entered.items() if count > MOST[key]} == {}
