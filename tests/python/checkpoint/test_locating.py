"""Paths of a checkpoint: its directory, a step of a run, the root of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.local_steps import saved
from tests.support import cause_of
from torch_ckpt import CheckpointError
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint import locating
from torch_ckpt.checkpoint.folders import LocalFolder
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.marker import DELETED_NAME, MARKER_NAME, PINNED_NAME, step_name
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.listing import examine
from torch_ckpt.inspection.show import show
from torch_ckpt.steps import LocalSteps
from torch_ckpt.stores import open_store


class Run:
    """A run in a directory or beneath a URL. The value of each step is its number."""

    def __init__(self, root: str) -> None:
        self.root = root

    def save(self, step: int, epoch: int = 0) -> None:
        if is_url(self.root):
            name = step_name(step)
            state = {"w": torch.full((5, 3), float(step))}
            torch_ckpt.save(state, f"{self.root}/{name}", no_dist=True)
            self.write(f"{name}/{MARKER_NAME}", json.dumps({"step": step, "epoch": epoch}))
        else:
            saved(LocalSteps(self.root), step, float(step))

    def write(self, name: str, text: str = "") -> None:
        data = text.encode()
        if is_url(self.root):
            open_store(self.root).put(name, iter([memoryview(data)]), len(data))
        else:
            Path(self.root, name).write_bytes(data)

    def remove(self, name: str) -> None:
        if is_url(self.root):
            open_store(self.root).delete([name])
        else:
            Path(self.root, name).unlink()


@pytest.fixture(params=["directory", "URL"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Makes a run with steps 3 and 40."""
    if request.param == "URL":
        pytest.importorskip("fsspec")
    made = Run(f"memory://{tmp_path}/run" if request.param == "URL" else str(tmp_path / "run"))
    for step in (3, 40):
        made.save(step)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Makes a run with steps 3 and 40 in a directory. Returns its root."""
    made = Run(str(tmp_path / "run"))
    for step in (3, 40):
        made.save(step)
    return tmp_path / "run"


def loaded(path: str | Path) -> float:
    state = {"w": torch.zeros(5, 3)}
    torch_ckpt.load(state, path, no_dist=True)
    return float(state["w"][0, 0])


def loaded_by_dcp(path: str | Path) -> float:
    state = {"w": torch.zeros(5, 3)}
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True)
    return float(state["w"][0, 0])


def found(path: str | Path) -> str:
    opened = open_checkpoint(path)
    with closing(opened.folder):
        assert opened.path == opened.folder.path
        return Path(opened.path).name


@pytest.mark.parametrize("load", [loaded, loaded_by_dcp])
def test_a_load_accepts_a_step_and_a_root_for_its_newest_step(
    run: Run, load: Callable[[str], float]
) -> None:
    paths = f"{run.root}/3", f"{run.root}/40", run.root
    assert [load(path) for path in paths] == [3.0, 40.0, 40.0]


def test_a_reused_reader_finds_the_newest_step_again(run: Run) -> None:
    reader = torch_ckpt.FileSystemReader(run.root)
    state = {"w": torch.zeros(5, 3)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    run.save(41)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"][0, 0] == 41.0


@pytest.mark.parametrize("name", ["/40", ""])
def test_each_function_that_reads_a_checkpoint_accepts_steps_and_roots(
    run: Run, tmp_path: Path, name: str
) -> None:
    step, path = f"{run.root}/0000000040", run.root + name
    run.write(f"0000000040/{PINNED_NAME}")
    report = torch_ckpt.verify(path)
    # The markers of a step belong to it.
    assert (report.checkpoint, report.ok, report.unreferenced) == (step, True, [])
    assert show(path).checkpoint == step
    assert diff(path, f"{run.root}/40").a == step
    assert examine(path).path == step
    with torch_ckpt.open(path) as checkpoint:
        assert checkpoint.location == step
    assert torch_ckpt.preflight({"w": torch.zeros(5, 3)}, path).loaded == ["w"]
    torch_ckpt.convert(path, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["w"][0, 0] == 40.0


def test_a_step_without_its_marker_is_not_the_newest_one(run: Run) -> None:
    run.remove(f"0000000040/{MARKER_NAME}")
    assert found(run.root) == "0000000003"


def test_the_error_for_a_root_without_a_complete_step_names_its_steps(run: Run) -> None:
    for step in ("0000000003", "0000000040"):
        run.remove(f"{step}/{MARKER_NAME}")
    match = (
        rf"no step is complete: 0000000003, 0000000040 lack {MARKER_NAME}.* pass its directory, "
        f"such as {run.root}/0000000040"
    )
    with pytest.raises(FileNotFoundError, match=match):
        open_checkpoint(run.root)
    assert found(f"{run.root}/40") == "0000000040"


def test_the_newest_step_beneath_a_url_is_the_newest_one_of_the_highest_epoch(
    tmp_path: Path,
) -> None:
    pytest.importorskip("fsspec")
    run = Run(f"memory://{tmp_path}/run")
    for step, epoch in ((10, 1), (30, 1), (20, 2)):
        run.save(step, epoch)
    assert found(run.root) == "0000000020"


def test_a_step_beneath_a_url_that_is_being_deleted_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    run = Run(f"memory://{tmp_path}/run")
    for step in (3, 40):
        run.save(step)
    run.write(f"0000000040/{DELETED_NAME}")
    assert found(run.root) == "0000000003"
    with pytest.raises(FileNotFoundError, match="no such step; the newest step is 3"):
        open_checkpoint(f"{run.root}/40")


def test_a_step_is_found_in_a_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert found(Path("3")) == "0000000003"
    assert found(Path(".")) == "0000000040"


def test_a_checkpoint_with_the_exact_name_is_not_replaced_by_a_step(run: Run) -> None:
    for name in ("0000000007", "7"):
        torch_ckpt.save({"t": torch.ones(3)}, f"{run.root}/{name}", no_dist=True)
    assert found(f"{run.root}/7") == "7"


@pytest.mark.parametrize("name", ["40", ""])
def test_an_open_step_is_not_deleted(root: Path, name: str) -> None:
    with closing(open_checkpoint(root / name).folder):
        assert not LocalSteps(root).delete(40)
    assert LocalSteps(root).delete(40)


def test_the_step_that_a_load_of_a_root_reads_is_not_deleted(root: Path) -> None:
    deleted = []

    def delete(operation: str, path: str) -> None:
        if operation == "decode metadata" or operation == "pread":
            deleted.append(LocalSteps(root).delete(40))

    with at_fault_points(delete):
        assert loaded(root) == 40.0
    assert deleted
    assert not any(deleted)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_newest_step_that_is_deleted_as_it_is_opened_is_replaced_by_the_previous_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def open_and_delete(path: str) -> LocalFolder:
        opened = LocalFolder(path)
        if path.endswith("0000000040"):
            LocalSteps(root).delete(40)
            if when == "before":
                return LocalFolder(path)
        return opened

    monkeypatch.setattr(locating, "LocalFolder", open_and_delete)
    assert found(root) == "0000000003"


# --- other formats -------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load({"t": torch.zeros(3)}, path, no_dist=True)
    cause = cause_of(caught.value)
    assert isinstance(cause, CheckpointError)
    return str(cause)


def test_a_load_of_another_format_names_convert(tmp_path: Path) -> None:
    convert = "to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"
    file = tmp_path / "model.pt"
    torch.save({"t": torch.ones(3)}, file)
    assert refusal(file) == f"{file} is not a directory but a torch.save file; convert it {convert}"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/pytorch_model.bin").touch()
    contains = f"it contains torch.save files; convert one of them {convert}"
    assert refusal(tmp_path / "hf") == f"{tmp_path}/hf is not a checkpoint: {contains}"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("41", FileNotFoundError, "no such step; the newest step is 40"),
        (
            "0000000040/.metadata",
            CheckpointError,
            "but a file of the checkpoint {}/0000000040; pass that",
        ),
        ("notes", CheckpointError, "is not a directory; pass a checkpoint directory"),
        ("else", FileNotFoundError, "no committed checkpoint"),
    ],
)
def test_the_error_for_another_path_names_the_nearest_checkpoint(
    run: Run, name: str, error: type[Exception], message: str
) -> None:
    run.write("notes", "x")
    with pytest.raises(error, match=message.format(run.root)):
        open_checkpoint(f"{run.root}/{name}")
