"""Copies of files between the disks of hosts."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch

from tests.fault_hooks import before
from torch_ckpt import CheckpointManager, WriteOptions
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.manager import LocalTier
from torch_ckpt.steps.host_step import HostStep
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.tier_files import DirectoryFiles, Files
from torch_ckpt.steps.tier_sharing import Sharing, copy_to_directory


class OtherHost(DirectoryFiles):
    """Stands for the files on another host.

    Attributes:
        failing: the file that cannot be read.
    """

    failing = ""

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        if name == self.failing:
            raise OSError(errno.EIO, "the host does not answer", name)
        return super().read(name, offset, bytes)


def in_one_piece(files: Files, name: str, _busy: object) -> Iterator[memoryview]:
    yield files.read(name, 0, files.size(name))


@pytest.fixture
def steps(tmp_path: Path) -> LocalSteps:
    """The steps of a disk that has step 1, with two data files."""
    tier, root = LocalTier(tmp_path / "disk"), tmp_path / "root"
    write = WriteOptions(thread_count=2)
    state = {"t": torch.arange(1000.0), "u": torch.ones(500)}
    with CheckpointManager(root, local=tier, write=write, preemption=None) as manager:
        manager.save(1, state, force=True)
        manager.wait_until_finished(published=True)
    return LocalSteps(tier.directory_of(str(root)))


@pytest.fixture
def other(steps: LocalSteps, tmp_path: Path) -> Iterator[OtherHost]:
    """The only copy of the data files of step 1."""
    path = tmp_path / "other"
    shutil.copytree(steps.path_of(1), path)
    for name in names_of(steps):
        Path(steps.path_of(1), name).unlink()
    with closing(OpenDirectory(str(path))) as directory, closing(OtherHost(directory)) as files:
        yield files


def names_of(steps: LocalSteps) -> list[str]:
    with closing(HostStep(steps, 1)) as found:
        return found.named()


def present(steps: LocalSteps) -> list[str]:
    return sorted(path.name for path in Path(steps.path_of(1)).glob("*.distcp*"))


def share(steps: LocalSteps, other: OtherHost) -> None:
    with closing(HostStep(steps, 1)) as found:
        digest = found.digest
    Sharing(steps, (1, digest), names_of(steps), other, in_one_piece).run()


def test_a_copy_that_fails_keeps_the_files_that_are_complete(
    steps: LocalSteps, other: OtherHost, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = names_of(steps)
    other.failing = second
    share(steps, other)
    assert present(steps) == [first]
    assert "the host does not answer" in caplog.text
    other.failing = ""
    share(steps, other)
    assert present(steps) == sorted([first, second])


def test_a_copy_of_a_damaged_file_is_removed(
    steps: LocalSteps, other: OtherHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = names_of(steps)
    with open(tmp_path / "other" / second, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    share(steps, other)
    assert present(steps) == [first]
    assert second in caplog.text


def test_a_copy_never_completes_the_incomplete_file_of_another_process(tmp_path: Path) -> None:
    def begin_another_copy() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        for name in (".file.part", ".file.01234567.part"):
            (tmp_path / name).write_bytes(b"in")

    pieces = iter([memoryview(b"contents")])
    with (
        closing(OpenDirectory(tmp_path)) as directory,
        before("rename", begin_another_copy, tmp_path / "file"),
        pytest.raises(FileNotFoundError),
    ):
        copy_to_directory(directory, "file", pieces, 8, nullcontext)
    assert not (tmp_path / "file").exists()
