"""Other projects' packages that are measured, each in a directory of its own below build/peers.

They are not installed into the environment, where one would be found by another (and changes what
that does), and are on the path only of the process in which they are measured.
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
# Without a network pip would go on trying for minutes.
_PIP = ("install", "--no-deps", "--quiet", "--disable-pip-version-check", "--retries", "1")


class PeerUnavailableError(RuntimeError):
    """The package is not there and could not be installed. Says how to do it by hand."""


@dataclass(frozen=True)
class Peer:
    """A package at the version that is measured, and what of its needs torch does not bring."""

    name: str
    version: str
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name and version for people."""
        return f"{self.name} {self.version}"

    @property
    def path(self) -> Path:
        """The directory for `sys.path`. Compiled parts are of one version of Python."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return _DIRECTORY / f"{self.name}-{self.version}-python-{python}"

    def install(self) -> Path:
        """`path`, after pip has filled it if need be.

        Raises:
            PeerUnavailableError: pip failed.
        """
        if self.path.exists():
            return self.path
        _DIRECTORY.mkdir(parents=True, exist_ok=True)
        # A directory half filled would pass for the package from then on.
        unfinished = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=_DIRECTORY))
        requirements = [f"{self.name}=={self.version}", *self.needs]
        command = [sys.executable, "-m", "pip", *_PIP, "--target", str(unfinished), *requirements]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode != 0:
            shutil.rmtree(unfinished)
            lines = pip.stderr.strip().splitlines() or [f"pip ended with {pip.returncode}"]
            raise PeerUnavailableError(
                f"{self.title} is not in {self.path.relative_to(_REPOSITORY)} and pip failed: "
                f"{lines[-1]}; to install it by hand: pip install --no-deps --target "
                f"{self.path.relative_to(_REPOSITORY)} {' '.join(requirements)}"
            )
        unfinished.rename(self.path)
        return self.path


def _read_pin(name: str) -> str:
    """Reads the version of a package that tests use too from pyproject.toml."""
    pin = re.search(rf'"{name}==([^"]+)"', (_REPOSITORY / "pyproject.toml").read_text())
    assert pin is not None, f"pyproject.toml pins no {name}"
    return pin[1]


NVRX = Peer("nvidia-resiliency-ext", _read_pin("nvidia-resiliency-ext"), ("psutil",))
MEGATRON_CORE = Peer("megatron-core", _read_pin("megatron-core"), ("psutil",))
TORCH_CHECKPOINTING = Peer("torch_checkpointing", "0.1.1")
