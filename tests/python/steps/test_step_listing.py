"""Contents of a local root: steps, leftovers, and what may be deleted."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.fault_hooks import at_fault_points, before
from tests.local_steps import ATTEMPT, listed, names, saved, state, unfinished, value_of
from tests.support import assert_equal
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.marker import PINNED_NAME
from torch_ckpt.steps import MARKER_NAME, LocalSteps, StepInfo, open_steps

#: A leftover of an interrupted deletion of step 2.
DELETED = "0000000002.deleted-5f0c19ab"


@pytest.fixture
def store(tmp_path: Path) -> LocalSteps:
    return LocalSteps(tmp_path / "run")


# --- listing -------------------------------------------------------------------------------------


def test_a_missing_root_has_no_steps(store: LocalSteps) -> None:
    assert store.entries() == []
    assert store.sweep() == []
    assert not os.path.exists(store.root)


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LocalSteps(tmp_path / "file").entries()


def test_steps_and_leftovers_are_listed_by_number(store: LocalSteps) -> None:
    for step in (20, 3):
        saved(store, step)
    unfinished(store, 10)
    saved(store, 2)
    os.rename(store.path_of(2), Path(store.root, DELETED))
    assert listed(store) == [(2, "deleted"), (3, "complete"), (10, "unfinished"), (20, "complete")]


FOREIGN = ["events.out", "100", "0000000100.tmp", "0000000100.tmp-xyz", "\u0660" * 10]
STEPS = [f"0000000100{suffix}" for suffix in ("", f".deleted-{ATTEMPT}", f".tmp-{ATTEMPT}")]


@pytest.mark.parametrize(
    ("foreign", "is_directory"),
    [(FOREIGN, True), (FOREIGN, False), (STEPS, False)],
    ids=["directories", "files", "files with the names of steps"],
)
@pytest.mark.parametrize("leftovers", [True, False])
def test_directories_with_other_names_and_files_are_no_steps_and_stay(
    store: LocalSteps, foreign: list[str], is_directory: bool, leftovers: bool
) -> None:
    for name in foreign:
        path = Path(store.root, name, MARKER_NAME) if is_directory else Path(store.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert store.entries(leftovers=leftovers) == []
    assert store.sweep() == []
    assert names(store) == sorted(foreign)


MARKERS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "empty": (b"", {}),
    "no JSON": (b"step 100 is complete", {}),
    "no text": (bytes(range(256)), {}),
    "a list": (b"[1, 2]", {}),
    "deep": (b"[" * 100_000, {}),
    "many digits": (b"1" * 10_000, {}),
    "wrong types": (
        b'{"saved_at": "now", "bytes": "many", "metrics": [1], "notes": 3, "step": {}}',
        {},
    ),
    "truth values": (b'{"saved_at": true, "bytes": true, "metrics": {"a": true}}', {}),
    "a negative size": (b'{"bytes": -1}', {}),
    "a huge metric": (b'{"metrics": {"a": 1' + b"0" * 400 + b', "b": 2}}', {"metrics": {"b": 2.0}}),
    "a huge time": (b'{"saved_at": 1' + b"0" * 400 + b"}", {}),
    "an endless time": (b'{"saved_at": Infinity}', {}),
    "no time": (b'{"saved_at": NaN}', {}),
    "a negative epoch": (b'{"epoch": -1, "run": 5}', {}),
    "an epoch without a run": (b'{"epoch": true, "run": null}', {}),
    "whole numbers": (b'{"saved_at": 5, "bytes": 6}', {"saved_at": 5.0, "bytes": 6}),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_a_marker_of_any_content_makes_a_step_complete(store: LocalSteps, kind: str) -> None:
    path = saved(store, 100)
    content, expected = MARKERS[kind]
    (path / MARKER_NAME).write_bytes(content)
    [info] = store.entries()
    size = sum(file.stat().st_size for file in path.iterdir())
    # Only the marker of a run has an epoch.
    epoch = 0 if content.startswith(b"{") else None
    assert info == StepInfo(100, str(path), "complete", **{"bytes": size, **expected}, epoch=epoch)


def test_a_directory_as_marker_makes_a_step_complete(store: LocalSteps) -> None:
    path = saved(store, 100)
    (path / MARKER_NAME).unlink()
    (path / MARKER_NAME).mkdir()
    assert listed(store) == [(100, "complete")]


def test_nan_and_infinity_as_metrics_make_the_round_trip(store: LocalSteps) -> None:
    saved(store, 1, marker=lambda: {"metrics": {"a": math.nan, "b": -math.inf}})
    [info] = store.entries()
    assert math.isnan(info.metrics["a"])
    assert info.metrics["b"] == -math.inf


def test_a_step_deleted_during_the_listing_is_omitted(store: LocalSteps) -> None:
    saved(store, 1)
    left = unfinished(store, 2)
    saved(store, 3)
    with before("scandir", lambda: shutil.rmtree(left), left):
        assert listed(store) == [(1, "complete"), (3, "complete")]


# --- 5: deletions --------------------------------------------------------------------------------


def test_a_listing_has_the_later_step_of_a_run_that_deletes_the_listed_one(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 1)
    real = LocalSteps._info

    def info(store: LocalSteps, root: OpenDirectory, name: str) -> StepInfo | None:
        monkeypatch.undo()
        saved(store, 2)
        store.delete(1)
        return real(store, root, name)

    monkeypatch.setattr(LocalSteps, "_info", info)
    assert listed(store) == [(2, "complete")]


def test_nothing_is_deleted_from_an_exchanged_root(store: LocalSteps, tmp_path: Path) -> None:
    saved(store, 2)
    os.rename(store.root, tmp_path / "away")
    saved(LocalSteps(store.root), 2)
    with pytest.raises(OSError, match="a different directory than at the last save"):
        store.delete(2)
    assert listed(store) == [(2, "complete")]
    # The root may belong to another run by now.
    saved(store, 3)
    assert store.delete(2)
    assert listed(store) == [(3, "complete")]


def test_a_deletion_never_renames_a_step_that_has_replaced_its_own(store: LocalSteps) -> None:
    path = saved(store, 2, 1.0)
    moments: list[str] = []
    seen: list[list[tuple[int, str]]] = []

    def replace_at_the_last_moment(operation: str, where: str) -> None:
        if moments == ["begun", "replaced"]:
            # The listing reaches fault points, too.
            moments.append("listing")
            seen.append(listed(store))
            moments.pop()
        elif not moments and (operation, where) == ("flock", store.root):
            moments.append("begun")
            saved(store, 2, 2.0, may_replace=True)
            moments.append("replaced")

    with at_fault_points(replace_at_the_last_moment):
        assert not store.delete(2)
    assert moments == ["begun", "replaced"]
    assert all((2, "complete") in at_point for at_point in seen)
    assert value_of(path) == 2.0


def test_a_load_keeps_its_step_until_it_has_ended(store: LocalSteps) -> None:
    saved(store, 2, 6.0)
    answers: list[bool] = []
    found = state(0.0)
    with before("pread", lambda: answers.append(store.delete(2))):
        store.load(2, found, no_dist=True)
    assert_equal(found, state(6.0))
    assert answers == [False]


# --- 6: the sweep --------------------------------------------------------------------------------


def test_the_sweep_spares_a_complete_directory_in_use(store: LocalSteps) -> None:
    left = unfinished(store, 2, marker="{}")
    with closing(OpenDirectory(left)) as other:
        assert other.share()
        assert store.sweep() == []
        assert names(store) == [left.name]


def test_a_save_uses_the_directory_that_another_rank_has_made(store: LocalSteps) -> None:
    path = Path(store.root) / f"0000000002.tmp-{ATTEMPT}"
    path.mkdir(parents=True)
    # Held open, so that no other directory can get its inode number.
    with closing(OpenDirectory(path)) as made:
        step = saved(store, 2)
        assert step.stat().st_ino == os.fstat(made.fd).st_ino


@pytest.mark.parametrize("moment", ["pwrite", "rename", "before the marker"])
def test_the_sweep_of_another_manager_spares_a_running_save(store: LocalSteps, moment: str) -> None:
    swept: list[list[str]] = []

    def sweep() -> dict[str, Any]:
        swept.append(LocalSteps(store.root).sweep())
        return {}

    if moment == "before the marker":
        path = saved(store, 2, 3.0, marker=sweep)
    else:
        with before(moment, sweep):
            path = saved(store, 2, 3.0)
    assert value_of(path) == 3.0
    assert swept == [[]]


def test_a_removed_leftover_is_no_error(
    store: LocalSteps, caplog: pytest.LogCaptureFixture
) -> None:
    left = unfinished(store, 2)
    with before("open_directory", lambda: shutil.rmtree(left), left):
        assert store.sweep() == []
    assert caplog.text == ""


# --- pins, verification, roots -------------------------------------------------------------------


def test_a_step_is_pinned_until_it_is_unpinned(store: LocalSteps) -> None:
    path = saved(store, 2)
    for _ in range(2):
        store.set_pinned(2, True)
        assert [info.pinned for info in store.entries()] == [True]
    assert (path / PINNED_NAME).read_bytes() == b""
    for _ in range(2):
        store.set_pinned(2, False)
        assert [info.pinned for info in store.entries()] == [False]


def test_an_incomplete_step_cannot_be_pinned(store: LocalSteps) -> None:
    path = saved(store, 2)
    (path / MARKER_NAME).unlink()
    for step in (2, 3):
        with pytest.raises(FileNotFoundError, match=f"step {step} cannot be pinned"):
            store.set_pinned(step, True)
    assert not (path / PINNED_NAME).exists()


def test_a_root_may_be_a_url_or_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = [open_steps(f"file://{tmp_path}/run"), open_steps("run")]
    monkeypatch.chdir("/")
    for store in opened:
        assert isinstance(store, LocalSteps)
        assert store.root == str(tmp_path / "run")
