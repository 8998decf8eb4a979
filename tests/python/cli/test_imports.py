"""Commands that need no tensors import neither torch nor numpy, which take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import save

_RUN = """
import sys
from torch_ckpt.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
imported = {"torch", "numpy"} & sys.modules.keys()
print(code, *sorted(imported), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save({"model": {"a": torch.zeros(3), "b": torch.ones(2, 2)}, "step": 4}, path)
    return path


def run(*arguments: str | Path) -> list[str]:
    """Returns the exit code of a command, and which of torch and numpy it imported."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, arguments)], capture_output=True, text=True
    )
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *(("--help", "0"), ("--version", "0"), ("", "2"), ("lss", "2"), ("show --help", "0")),
        *(
            ("convert --help", "0"),
            ("ls SAVED", "0"),
            ("verify SAVED", "0"),
        ),
        *((f"{name} SAVED --json", "0") for name in ("ls", "verify")),
        *((f"{name} file://SAVED", "0") for name in ("ls", "verify")),
        ("doctor memory://SAVED --size 64KiB", "0"),
        # Errors before any tensor is read.
        *((f"{name} NONE", "2") for name in ("ls", "verify", "show", "doctor", "steps")),
        ("diff SAVED NONE", "2"),
    ],
)
def test_a_command_that_needs_no_tensor_imports_no_torch(
    checkpoint: Path, tmp_path: Path, command: str, code: str
) -> None:
    words = command.replace("SAVED", str(checkpoint)).replace("NONE", str(tmp_path / "missing"))
    assert run(*words.split()) == [code]


@pytest.mark.parametrize("url", ["{}", "file://{}", "memory://{}"])
def test_listing_and_deleting_steps_imports_no_torch(url: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = tmp_path / f"{step:010d}"
        path.mkdir()
        (path / "write_completed").write_text("{}")
    root = url.format(tmp_path)
    for command in (
        ["steps"],
        ["pin", "1"],
        ["gc", "--keep-last", "1"],
        ["delete", "--force", "3"],
    ):
        code = "2" if url.startswith("memory") else "0"
        assert run(command[0], root, *command[1:]) == [code], command
