"""Describes the machine and the software, without names that identify a host or a path."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import torch_ckpt
from torch_ckpt._base.system import mount_of


@dataclass(frozen=True)
class Machine:
    """The machine and the software on which a result was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    python: str
    torch: str
    torch_ckpt: str
    date: str

    def sentence(self) -> str:
        """Formats the description as one line, for captions."""
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB, "
            f"Linux {self.kernel}, {self.file_system}; Python {self.python}, torch {self.torch}, "
            f"torch_ckpt {self.torch_ckpt}; {self.date}"
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def describe(directory: Path) -> Machine:
    """Describes the machine as this process sees it, with the file system of `directory`."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        file_system=mount_of(directory).file_system,
        python=platform.python_version(),
        torch=torch.__version__,
        torch_ckpt=torch_ckpt.__version__,
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
