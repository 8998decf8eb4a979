"""Installs the packages of other projects to measure, each in its own directory in build/peers.

They are not installed into the environment, because one of them changes its behavior if it finds
another. Each is on `sys.path` only in the process that measures it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
_DIRECTORY = _REPOSITORY / "build" / "peers"
# One retry: without a network pip would try for minutes.
_PIP = ("install", "--no-deps", "--quiet", "--disable-pip-version-check", "--retries", "1")


class PeerUnavailableError(RuntimeError):
    """The package is missing and pip failed. The message has the command to install it by hand."""


@dataclass(frozen=True)
class Peer:
    """A package at the measured version. `needs` are its dependencies besides torch's own."""

    name: str
    version: str
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name and version, for labels."""
        return f"{self.name} {self.version}"

    @property
    def path(self) -> Path:
        """Directory for `sys.path`, for this version of Python because of compiled parts."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return _DIRECTORY / f"{self.name}-{self.version}-python-{python}"

    def install(self) -> Path:
        """Installs the package with pip if `path` does not exist. Returns `path`.

        Raises:
            PeerUnavailableError: pip failed.
        """
        if self.path.exists():
            return self.path
        _DIRECTORY.mkdir(parents=True, exist_ok=True)
        # Later runs would mistake an incomplete directory for the package.
        unfinished = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=_DIRECTORY))
        requirements = [f"{self.name}=={self.version}", *self.needs]
        command = [sys.executable, "-m", "pip", *_PIP, "--target", str(unfinished), *requirements]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode != 0:
            shutil.rmtree(unfinished)
            lines = pip.stderr.strip().splitlines() or [f"pip ended with {pip.returncode}"]
            raise PeerUnavailableError(
                f"{self.title} is not in {self.path.relative_to(_REPOSITORY)}, and pip failed: "
                f"{lines[-1]}. Install it by hand: pip install --no-deps --target "
                f"{self.path.relative_to(_REPOSITORY)} {' '.join(requirements)}"
            )
        unfinished.rename(self.path)
        return self.path


def _read_pin(name: str) -> str:
    """Reads the version of a package that tests also use from pyproject.toml."""
    pin = re.search(rf'"{name}==([^"]+)"', (_REPOSITORY / "pyproject.toml").read_text())
    assert pin is not None, f"pyproject.toml pins no {name}"
    return pin[1]


NVRX = Peer("nvidia-resiliency-ext", _read_pin("nvidia-resiliency-ext"), ("psutil",))
MEGATRON_CORE = Peer("megatron-core", _read_pin("megatron-core"), ("psutil",))
TORCH_CHECKPOINTING = Peer("torch_checkpointing", "0.1.1")
