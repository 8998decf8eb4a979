"""Runs a module of this package in a process of its own, where nothing has been warmed up yet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FreshProcessError(RuntimeError):
    """The process failed. Holds what it wrote to stderr."""


def run(module: str, arguments: Sequence[str]) -> Any:
    """The JSON value that `python -m benchmarks.MODULE ARGUMENTS` printed as its last line."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    repository = Path(__file__).resolve().parents[1]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise FreshProcessError(f"{' '.join(command[1:])} failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])
