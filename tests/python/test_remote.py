"""Steps beneath URLs: saved, loaded in parts, verified, replaced, deleted, swept."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import torch_ckpt
from tests.remote_stores import BUCKET, Hooked, hooked, hooked_url, s3_server
from tests.support import assert_equal, cause_of, random_tensor
from torch_ckpt import free_space, remote
from torch_ckpt.errors import Corrupt, NotCommitted, Unsafe
from torch_ckpt.ranges import box_ranges, coalesced
from torch_ckpt.remote import RemoteSteps
from torch_ckpt.remote_files import RemoteFile, RemoteFiles, _callback, age, modified
from torch_ckpt.remote_reader import RemoteReader
from torch_ckpt.remote_writer import busy
from torch_ckpt.steps import MARKER_NAME, LocalSteps, open_steps
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint

ATTEMPT = "0123abcd"

# For what nothing should be waiting.
PATIENCE = 60.0

KINDS = ["memory", "file", "s3"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as settings:
        yield settings


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture(params=KINDS)
def steps(
    request: pytest.FixtureRequest,
    staging: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> RemoteSteps:
    """On each kind of file system, with nothing there."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        settings = request.getfixturevalue("s3")
        monkeypatch.setitem(fsspec.config.conf, "s3", settings)
        return RemoteSteps(f"s3://{BUCKET}/{name}", staging)
    root = f"memory://{name}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    return RemoteSteps(root, staging)


@pytest.fixture
def flaky(staging: Path) -> RemoteSteps:
    """On a file system that can fail; see ``hooked``."""
    return RemoteSteps(hooked_url(), staging)


def state_of(seed: int = 0) -> dict[str, Any]:
    return {
        "model": {
            "large": random_tensor((300, 1000), torch.float32, seed),
            "transposed": random_tensor((7, 5), torch.bfloat16, seed + 1).t(),
            "empty": torch.empty(0, 3),
        },
        "step": torch.tensor(seed),
        "note": f"state {seed}",
    }


def blank() -> dict[str, Any]:
    return {
        "model": {
            "large": torch.zeros(300, 1000),
            "transposed": torch.zeros(5, 7, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        "step": torch.tensor(-1),
        "note": "",
    }


def save(steps: RemoteSteps, step: int, state: dict[str, Any], **options: Any) -> None:
    writer = steps.writer(step, attempt=ATTEMPT, **options)
    torch_ckpt.save(state, storage_writer=writer, no_dist=True)


def loaded(steps: RemoteSteps, step: int, **options: Any) -> dict[str, Any]:
    state = blank()
    steps.load(step, state, no_dist=True, **options)
    return state


def names_of(steps: RemoteSteps) -> list[str]:
    return sorted(steps._files.list())


def kinds_of(steps: RemoteSteps) -> dict[int, str]:
    return {entry.step: entry.state for entry in steps.entries()}


# --- the round trip ------------------------------------------------------------------------------


def test_a_step_makes_the_round_trip(steps: RemoteSteps) -> None:
    save(steps, 100, state_of(3))
    assert_equal(loaded(steps, 100), state_of(3))


def test_a_step_that_is_saved_in_the_background_makes_the_round_trip(steps: RemoteSteps) -> None:
    writer = steps.writer(7, attempt=ATTEMPT)
    torch_ckpt.async_save(state_of(4), storage_writer=writer, no_dist=True).result(PATIENCE)
    assert_equal(loaded(steps, 7), state_of(4))


def test_a_step_is_loaded_by_a_planner_of_torchs(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(3))
    state = loaded(steps, 1, planner=dcp.DefaultLoadPlanner())
    assert_equal(state, state_of(3))


def test_a_step_of_stock_torch_is_loaded(steps: RemoteSteps, tmp_path: Path) -> None:
    state = {"large": random_tensor((400, 500), torch.float32), "note": "stock"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for file in (tmp_path / "stock").iterdir():
        steps._files.write(f"0000000005/{file.name}", file.read_bytes())
    steps._files.write(f"0000000005/{MARKER_NAME}", b"")
    target = {"large": torch.zeros(400, 500), "note": ""}
    steps.load(5, target, no_dist=True)
    assert_equal(target, state)


def test_stock_torch_loads_a_step(tmp_path: Path) -> None:
    save(RemoteSteps(f"file://{tmp_path}"), 100, {"t": torch.arange(5)})
    target = {"t": torch.zeros(5, dtype=torch.int64)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "0000000100"), no_dist=True)
    assert target["t"].tolist() == [0, 1, 2, 3, 4]


def test_entries_tell_what_the_marker_says(steps: RemoteSteps) -> None:
    marker = {"metrics": {"loss": 0.5}, "notes": {"by": "test"}}
    save(steps, 30, state_of(), marker=lambda: marker)
    save(steps, 4, state_of())
    first, second = steps.entries()
    assert (first.step, second.step) == (4, 30)
    assert second.complete
    assert second.path == f"{steps.root}/0000000030"
    assert (second.metrics, second.notes) == ({"loss": 0.5}, {"by": "test"})
    files = steps._files.below("0000000030").list()
    assert second.bytes == sum(f.bytes for n, f in files.items() if n != MARKER_NAME)


def test_where_there_is_no_root_there_are_no_entries(steps: RemoteSteps) -> None:
    assert steps.entries() == []
    assert steps.sweep() == []


def test_metadata_is_read_without_the_data(steps: RemoteSteps, staging: Path) -> None:
    save(steps, 1, state_of())
    found = steps.metadata(1).state_dict_metadata
    assert found["model.large"].size == torch.Size([300, 1000])
    assert list(staging.iterdir()) == []


def test_nothing_is_left_in_the_staging_directory(steps: RemoteSteps, staging: Path) -> None:
    save(steps, 1, state_of())
    loaded(steps, 1)
    steps.verify(1)
    assert list(staging.iterdir()) == []


def test_a_step_is_pinned_and_unpinned(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    steps.set_pinned(1, True)
    assert [entry.pinned for entry in steps.entries()] == [True]
    steps.set_pinned(1, False)
    assert [entry.pinned for entry in steps.entries()] == [False]


def test_a_step_that_is_not_there_cannot_be_pinned(steps: RemoteSteps) -> None:
    with pytest.raises(FileNotFoundError, match="no complete step"):
        steps.set_pinned(1, True)


def test_a_step_that_is_not_there_cannot_be_loaded(steps: RemoteSteps) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(steps, 9)
    cause = cause_of(caught.value)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == f"{steps.root}/0000000009"


def test_a_step_is_deleted_with_all_its_files(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    save(steps, 2, state_of())
    assert steps.delete(1)
    assert kinds_of(steps) == {2: "complete"}
    assert all(name.startswith("0000000002/") for name in names_of(steps))


def test_deleting_what_is_not_there_is_no_error(steps: RemoteSteps) -> None:
    assert steps.delete(1)


def test_verify_finds_a_flipped_bit(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    [name] = [n for n in names_of(steps) if n.endswith("_0.distcp")]
    data = bytearray(steps._files.read(name))
    data[len(data) // 2] ^= 1
    steps._files.write(name, bytes(data))
    report = steps.verify(1)
    assert [damage.file for damage in report.damaged] == [name.partition("/")[2]]


def test_verify_of_a_sound_step_reads_all_records(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    report = steps.verify(1)
    assert report.ok
    assert report.records == len(steps.metadata(1).storage_data)


def test_verify_names_a_missing_file_and_a_strange_one(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    [_first, second] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.remove([second])
    flaky._files.write("0000000001/strange", b"x")
    report = flaky.verify(1)
    assert [file for file, _names in report.missing] == [second.partition("/")[2]]
    assert report.unreferenced == ["strange"]


def test_verify_stages_no_more_than_its_limit(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "VERIFIED_AT_ONCE_BYTES", 1)
    seen: list[set[str]] = []
    plain = remote.verify

    def verify(path: str) -> Any:
        seen.append({name for name in os.listdir(path) if name.endswith(".distcp")})
        return plain(path)

    monkeypatch.setattr(remote, "verify", verify)
    save(flaky, 1, state_of())
    report = flaky.verify(1)
    assert sorted(map(len, seen)) == [1, 1]
    assert (report.ok, report.records) == (True, len(flaky.metadata(1).storage_data))


def test_a_file_url_is_a_local_root(tmp_path: Path) -> None:
    opened = open_steps(f"file://{tmp_path}")
    assert isinstance(opened, LocalSteps)
    assert opened.root == str(tmp_path)


def test_another_url_is_a_remote_root(staging: Path) -> None:
    assert isinstance(open_steps("memory://run", staging_dir=staging), RemoteSteps)


def test_a_manager_resumes_beneath_a_url_and_keeps_the_last_steps(steps: RemoteSteps) -> None:
    state: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep_last=2) as manager:
        for step in range(manager.restore(state), 5):
            state["t"] += 1
            state["done"] = step + 1
            manager.save(step + 1, state)
    again: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep_last=2) as manager:
        assert manager.all_steps() == [4, 5]
        assert manager.restore(again) == 5
    assert_equal(again, {"t": torch.full((3,), 5.0), "done": 5})


def test_a_url_whose_protocol_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere://run: Protocol not known"):
        open_steps("nowhere://run")


# --- saves that fail -----------------------------------------------------------------------------


def fail_at(kind: str, part: str, error: Exception | None = None) -> Any:
    def hook(of: str, path: str) -> None:
        if of == kind and part in path:
            raise error or PermissionError("denied")

    return hooked(hook)


def failing_at_the_end(kind: str, name: str) -> Any:
    """A hook by which requests of a kind fail for paths that end in this name."""

    def hook(of: str, path: str) -> None:
        if of == kind and path.rstrip("/").endswith(f"/{name}"):
            raise PermissionError(errno.EACCES, "denied", path)

    return hook


def test_an_upload_that_fails_fails_the_save_with_the_url(flaky: RemoteSteps) -> None:
    with fail_at("upload", "_1.distcp"), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of())
    cause = cause_of(caught.value)
    assert isinstance(cause, PermissionError)
    assert cause.filename.startswith(f"{flaky.root}/0000000001/__0_")
    assert "denied" in str(cause)


def test_an_upload_that_fails_leaves_nothing(flaky: RemoteSteps, staging: Path) -> None:
    with fail_at("upload", "_1.distcp"), pytest.raises(dcp.CheckpointException):
        save(flaky, 1, state_of())
    assert names_of(flaky) == []
    assert list(staging.iterdir()) == []


def test_an_upload_that_fails_in_the_background_is_raised_by_the_handle(
    flaky: RemoteSteps,
) -> None:
    writer = flaky.writer(1, attempt=ATTEMPT)
    with fail_at("upload", ".distcp", ValueError("no such key")):
        handle = torch_ckpt.async_save(state_of(), storage_writer=writer, no_dist=True)
        with pytest.raises(dcp.CheckpointException, match="ValueError: no such key"):
            handle.result(PATIENCE)
    assert names_of(flaky) == []


@pytest.mark.parametrize("part", [".metadata", MARKER_NAME])
def test_a_commit_that_fails_leaves_nothing(flaky: RemoteSteps, part: str) -> None:
    with fail_at("write", part), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of())
    assert isinstance(cause_of(caught.value), NotCommitted)
    assert names_of(flaky) == []


def test_a_marker_that_came_although_its_request_failed_is_removed(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RemoteFiles.write

    def late(self: RemoteFiles, name: str, data: bytes) -> None:
        write(self, name, data)
        if name == MARKER_NAME:
            raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(RemoteFiles, "write", late)
    with pytest.raises(dcp.CheckpointException):
        save(flaky, 1, state_of())
    assert names_of(flaky) == []


def test_files_that_vanish_before_the_marker_fail_the_save(flaky: RemoteSteps) -> None:
    listed: list[str] = []

    def sweep_by_another_job(kind: str, path: str) -> None:
        # The first listing is that of the save's beginning.
        if kind == "list":
            listed.append(path)
        if len(listed) == 2 and kind == "list":
            [name] = [n for n in Hooked.store if path in n and n.endswith("_0.distcp")]
            del Hooked.store[name]

    with hooked(sweep_by_another_job), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of())
    assert "are gone" in str(cause_of(caught.value))
    assert kinds_of(flaky) == {}


def test_a_save_counts_what_it_uploads_as_a_sign_of_life(flaky: RemoteSteps) -> None:
    writer = flaky.writer(1, attempt=ATTEMPT)
    counts: list[int] = []
    with hooked(
        lambda kind, _path: counts.append(writer.bytes_moved()) if kind == "upload" else None
    ):
        torch_ckpt.save(state_of(), storage_writer=writer, no_dist=True)
    assert len(counts) == 2
    assert counts[0] < counts[1] < writer.bytes_moved()


def test_training_goes_on_while_a_step_is_uploaded(flaky: RemoteSteps) -> None:
    uploading, go_on = threading.Event(), threading.Event()

    def wait(kind: str, _path: str) -> None:
        if kind == "upload":
            uploading.set()
            assert go_on.wait(PATIENCE)

    state = state_of(1)
    with hooked(wait):
        writer = flaky.writer(1, attempt=ATTEMPT)
        handle = torch_ckpt.async_save(state, storage_writer=writer, no_dist=True)
        assert uploading.wait(PATIENCE)
        state["model"]["large"].zero_()
        assert not handle.done()
        assert kinds_of(flaky) == {}
        go_on.set()
        handle.result(PATIENCE)
    assert_equal(loaded(flaky, 1), state_of(1))


def test_a_staging_directory_without_room_is_named(small_disk: Path) -> None:
    steps = RemoteSteps(hooked_url(), small_disk)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(steps, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    cause = cause_of(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk))


KILLED = """
import os, signal, sys
import torch
import torch_ckpt
from torch_ckpt.remote import RemoteSteps
from torch_ckpt.remote_files import RemoteFile, RemoteFiles, age, modified

write = RemoteFiles.write

def until_the_marker(self, name, data):
    if name == "write_completed":
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, name, data)

RemoteFiles.write = until_the_marker
steps = RemoteSteps(sys.argv[1], sys.argv[2])
writer = steps.writer(2, attempt="0123abcd")
torch_ckpt.save({"t": torch.arange(9)}, storage_writer=writer, no_dist=True)
"""


def killed_before_the_marker(root: str, staging: Path) -> None:
    found = subprocess.run([sys.executable, "-c", KILLED, root, str(staging)], check=False)
    assert found.returncode == -signal.SIGKILL


def test_a_save_that_is_killed_before_its_marker_is_no_step(tmp_path: Path, staging: Path) -> None:
    steps = RemoteSteps(f"file://{tmp_path}/run", staging)
    save(steps, 1, state_of())
    killed_before_the_marker(steps.root, staging)
    assert kinds_of(steps) == {1: "complete", 2: "unfinished"}
    with pytest.raises(dcp.CheckpointException, match=f"there is no {MARKER_NAME}"):
        steps.load(2, {"t": torch.zeros(9)}, no_dist=True)


def test_what_a_killed_save_left_is_swept_once_it_is_old(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = RemoteSteps(f"file://{tmp_path}/run", staging)
    save(steps, 1, state_of())
    killed_before_the_marker(steps.root, staging)
    assert steps.sweep() == []
    monkeypatch.setattr(remote, "LEFTOVER_SECONDS", -1.0)
    assert steps.sweep() == ["0000000002"]
    assert kinds_of(steps) == {1: "complete"}


def test_a_save_replaces_what_a_killed_one_left(tmp_path: Path, staging: Path) -> None:
    steps = RemoteSteps(f"file://{tmp_path}/run", staging)
    killed_before_the_marker(steps.root, staging)
    before = set(names_of(steps))
    save(steps, 2, state_of(5))
    assert_equal(loaded(steps, 2), state_of(5))
    assert before & set(names_of(steps)) == {"0000000002/.metadata"}


AT_EXIT = """
import sys, torch, torch_ckpt
from torch_ckpt.remote import RemoteSteps
writer = RemoteSteps(sys.argv[1]).writer(1, attempt="0123abcd")
handle = torch_ckpt.async_save({"t": torch.arange(9)}, storage_writer=writer, no_dist=True)
"""


def test_the_interpreters_end_waits_for_the_upload(s3: dict[str, str]) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    environment = {f"FSSPEC_S3_{key.upper()}": value for key, value in s3.items()}
    subprocess.run([sys.executable, "-c", AT_EXIT, url], check=True, env=os.environ | environment)
    names = fsspec.filesystem("s3", **s3).find(url)
    assert any(name.endswith(f"/0000000001/{MARKER_NAME}") for name in names)


def test_a_save_by_torchs_own_function_lets_go_of_the_step(
    flaky: RemoteSteps, staging: Path
) -> None:
    writer = flaky.writer(1, attempt=ATTEMPT)
    dcp.save({"t": torch.arange(9)}, storage_writer=writer, no_dist=True)
    assert list(staging.iterdir()) == []
    assert flaky.delete(1)


def test_a_failed_save_by_torchs_own_function_lets_go_with_its_writer(
    flaky: RemoteSteps, staging: Path
) -> None:
    writer = flaky.writer(1, attempt=ATTEMPT)
    writer.set_up_for_save(0)
    assert list(staging.iterdir()) != []
    del writer
    gc.collect()
    assert list(staging.iterdir()) == []
    assert flaky.delete(1)


# --- replacing -----------------------------------------------------------------------------------


def test_a_complete_step_is_not_replaced_unasked(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(1))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(steps, 1, state_of(2))
    assert isinstance(cause_of(caught.value), FileExistsError)
    assert_equal(loaded(steps, 1), state_of(1))


def test_a_replaced_step_is_the_new_one_and_keeps_no_old_file(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(1))
    before = {name for name in names_of(steps) if name.endswith(".distcp")}
    save(steps, 1, state_of(2), overwrite=True)
    assert_equal(loaded(steps, 1), state_of(2))
    assert not before & set(names_of(steps))


def test_a_replaced_step_stays_pinned(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(1))
    steps.set_pinned(1, True)
    save(steps, 1, state_of(2), overwrite=True)
    assert [entry.pinned for entry in steps.entries()] == [True]


def which(steps: RemoteSteps) -> str:
    """The save that step 1 is of, by all of its values; "none" where it is no complete step."""
    if kinds_of(steps) != {1: "complete"}:
        with pytest.raises(dcp.CheckpointException, match=f"there is no {MARKER_NAME}"):
            loaded(steps, 1)
        return "none"
    state = loaded(steps, 1)
    seed = int(state["step"])
    assert_equal(state, state_of(seed))
    return {1: "old", 2: "new"}[seed]


def test_at_every_request_of_a_replacing_save_a_load_sees_one_save_whole(
    flaky: RemoteSteps,
) -> None:
    save(flaky, 1, state_of(1))
    seen: list[str] = []
    looking: list[bool] = []

    def look(_kind: str, _path: str) -> None:
        if not looking:
            looking.append(True)
            seen.append(which(flaky))
            looking.clear()

    with hooked(look):
        save(flaky, 1, state_of(2), overwrite=True)
    order = [now for now, last in zip(seen, [None, *seen], strict=False) if now != last]
    assert order == ["old", "none", "new"]


def test_a_replacing_save_that_fails_at_any_request_mixes_nothing(flaky: RemoteSteps) -> None:
    outcomes = []
    for last in range(1, 50):
        flaky.delete(1)
        save(flaky, 1, state_of(1))
        made: list[str] = []

        def fail_from(kind: str, _path: str, last: int = last, made: list[str] = made) -> None:
            made.append(kind)
            if len(made) >= last:
                raise ConnectionResetError(errno.ECONNRESET, "gone")

        try:
            with hooked(fail_from):
                save(flaky, 1, state_of(2), overwrite=True)
        except dcp.CheckpointException:
            outcomes.append(which(flaky))
        else:
            outcomes.append(which(flaky))
            if len(made) < last:
                break
    assert outcomes[0] == "old"
    assert "none" in outcomes
    assert outcomes[-1] == "new"
    assert len(outcomes) < 49


def test_a_replacing_save_of_which_one_request_fails_leaves_the_old_step(
    flaky: RemoteSteps,
) -> None:
    failed: list[tuple[str, str]] = []
    for number in range(1, 50):
        flaky.delete(1)
        save(flaky, 1, state_of(1), marker=lambda: {"metrics": {"loss": 0.5}})
        before = names_of(flaky)
        made: list[tuple[str, str]] = []

        def fail_once(
            kind: str, path: str, number: int = number, made: list[tuple[str, str]] = made
        ) -> None:
            made.append((kind, path.rpartition("/")[2]))
            if len(made) == number:
                raise ConnectionResetError(errno.ECONNRESET, "gone")

        with hooked(fail_once), contextlib.suppress(dcp.CheckpointException):
            save(flaky, 1, state_of(2), overwrite=True)
        if which(flaky) == "new":
            break
        failed.append(made[number - 1])
        assert which(flaky) == "old", made
        assert flaky.entries()[0].metrics == {"loss": 0.5}
        assert names_of(flaky) == before
    assert failed[-2:] == [("write", ".metadata"), ("write", MARKER_NAME)]


def test_a_new_marker_that_came_although_its_request_failed_gives_way_to_the_old_step(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(flaky, 1, state_of(1))
    write = RemoteFiles.write
    late: list[str] = []

    def answer_late(self: RemoteFiles, name: str, data: bytes) -> None:
        write(self, name, data)
        if name == MARKER_NAME and not late:
            late.append(name)
            raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(RemoteFiles, "write", answer_late)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of(2), overwrite=True)
    assert isinstance(cause_of(caught.value), NotCommitted)
    assert which(flaky) == "old"


def test_a_marker_that_is_too_long_says_nothing_and_is_not_read(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(flaky, 1, state_of(), marker=lambda: {"metrics": {"loss": 0.5}})
    monkeypatch.setattr(remote, "MOST_MARKER_BYTES", 10)
    Hooked.reads.clear()
    [entry] = flaky.entries()
    assert (entry.complete, entry.metrics) == (True, {})
    assert Hooked.reads == []


def test_a_reader_that_is_dropped_leaves_nothing_staged(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, {"t": torch.arange(9)})
    reader = RemoteReader(flaky._files.below("0000000001"), str(staging))
    target = {"t": torch.zeros(9, dtype=torch.int64)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["t"].tolist() == list(range(9))
    del reader
    gc.collect()
    assert list(staging.iterdir()) == []


# --- deleting and sweeping -----------------------------------------------------------------------


def test_a_deletion_that_is_cut_off_is_ended_by_the_sweep(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
        flaky.delete(1)
    assert kinds_of(flaky) == {1: "deleted"}
    assert flaky.sweep() == ["0000000001"]
    assert names_of(flaky) == []


def test_a_leftover_that_cannot_be_removed_does_not_keep_others(
    flaky: RemoteSteps, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(flaky, step, state_of())
        with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
            flaky.delete(step)
    with fail_at("remove", "0000000001"):
        assert flaky.sweep() == ["0000000002"]
    assert "0000000001" in caplog.text
    assert kinds_of(flaky) == {1: "deleted"}


def test_a_sweep_of_deletions_leaves_what_a_killed_save_left(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEFTOVER_SECONDS", -1.0)
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    assert flaky.sweep(deleted_only=True) == []
    assert flaky.sweep() == ["0000000001"]


def test_leftovers_are_not_listed_where_they_are_not_asked_for(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    flaky._files.write("0000000002/__0_0.distcp", b"x")
    assert [entry.step for entry in flaky.entries(leftovers=False)] == [1]


def test_a_deletion_that_did_not_get_to_the_marker_is_one(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    with fail_at("remove", MARKER_NAME), pytest.raises(PermissionError):
        flaky.delete(1)
    assert kinds_of(flaky) == {1: "deleted"}


def test_a_step_is_saved_where_a_deletion_was_cut_off(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(1))
    with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
        flaky.delete(1)
    save(flaky, 1, state_of(2))
    assert_equal(loaded(flaky, 1), state_of(2))


def test_a_step_that_is_saved_here_is_neither_swept_nor_deleted(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEFTOVER_SECONDS", -1.0)
    found: list[Any] = []

    def look(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(MARKER_NAME):
            found.extend([kinds_of(flaky), flaky.sweep(), flaky.delete(1)])

    with hooked(look):
        save(flaky, 1, state_of())
    assert found == [{1: "unfinished"}, [], False]
    assert_equal(loaded(flaky, 1), state_of())


def test_a_step_that_is_loaded_here_is_not_deleted(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    found: list[bool] = []

    def look(kind: str, path: str) -> None:
        if kind == "read" and path.endswith(".distcp"):
            found.append(flaky.delete(1))

    with hooked(look):
        loaded(flaky, 1)
    assert found
    assert not any(found)


def test_after_a_save_that_failed_nobody_works_in_the_step(flaky: RemoteSteps) -> None:
    with fail_at("upload", ".distcp"), pytest.raises(dcp.CheckpointException):
        save(flaky, 1, state_of())
    assert f"{flaky.root}/0000000001" not in busy


def test_other_directories_are_left_alone(flaky: RemoteSteps, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "LEFTOVER_SECONDS", -1.0)
    flaky._files.write("logs/0000000001", b"x")
    flaky._files.write("1/.metadata", b"x")
    assert (flaky.entries(), flaky.sweep()) == ([], [])
    assert names_of(flaky) == ["1/.metadata", "logs/0000000001"]


def test_a_root_with_brackets_in_its_name_is_no_pattern(steps: RemoteSteps) -> None:
    plain, bracketed = RemoteSteps(f"{steps.root}/a1"), RemoteSteps(f"{steps.root}/a[1]")
    save(plain, 1, state_of(1))
    save(bracketed, 1, state_of(2))
    save(bracketed, 1, state_of(3), overwrite=True)
    assert_equal(loaded(bracketed, 1), state_of(3))
    assert bracketed.delete(1)
    assert names_of(bracketed) == []
    assert_equal(loaded(plain, 1), state_of(1))


@pytest.mark.parametrize("part", ["run", "0000000001"])
def test_a_listing_that_fails_is_not_taken_for_an_empty_one(staging: Path, part: str) -> None:
    steps = RemoteSteps(hooked_url().replace("hooked", "walked"), staging)
    save(steps, 1, state_of())
    with hooked(failing_at_the_end("list", part)), pytest.raises(PermissionError) as caught:
        steps.entries()
    assert caught.value.filename == steps.root
    assert kinds_of(steps) == {1: "complete"}


def test_of_a_root_that_cannot_be_listed_no_load_says_that_it_is_empty(staging: Path) -> None:
    root = hooked_url().replace("hooked", "walked")
    save_checkpoint(root, 7, {"t": torch.ones(3)})
    with hooked(failing_at_the_end("list", "run")), pytest.raises(PermissionError):
        load_checkpoint_if_it_exists(root, {"t": torch.zeros(3)})


def test_a_sweep_leaves_a_step_that_has_become_complete_since_it_was_listed(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "LEFTOVER_SECONDS", -1.0)
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    listed = RemoteSteps._listed

    def then_saved(self: RemoteSteps) -> Any:
        found = listed(self)
        save(flaky, 1, state_of(1))
        return found

    monkeypatch.setattr(RemoteSteps, "_listed", then_saved)
    assert flaky.sweep() == []
    monkeypatch.undo()
    assert_equal(loaded(flaky, 1), state_of(1))


@pytest.mark.parametrize("way", ["delete", "sweep"])
def test_a_save_waits_for_the_removal_of_its_step(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    save(flaky, 1, state_of(1))
    if way == "sweep":
        flaky._files.write("0000000001/deleted", b"")
    saver = threading.Thread(target=save, args=(flaky, 1, state_of(2)), kwargs={"overwrite": True})
    looked = threading.Event()
    free: list[bool] = []
    wait_for = busy._changed.wait_for

    def look(predicate: Callable[[], bool]) -> bool:
        free.append(predicate())
        looked.set()
        return wait_for(predicate)

    monkeypatch.setattr(busy._changed, "wait_for", look)

    def save_meanwhile(kind: str, _path: str) -> None:
        if kind == "remove" and saver.ident is None:
            saver.start()
            assert looked.wait(PATIENCE)

    with hooked(save_meanwhile):
        if way == "delete":
            assert flaky.delete(1)
        else:
            assert flaky.sweep() == ["0000000001"]
        saver.join(PATIENCE)
    assert free == [False]
    assert_equal(loaded(flaky, 1), state_of(2))


# --- loading in parts ----------------------------------------------------------------------------


def bytes_read(part: str = ".distcp") -> int:
    return sum(count for path, count in Hooked.reads if part in path)


def test_a_quarter_of_the_names_takes_a_quarter_of_the_bytes(flaky: RemoteSteps) -> None:
    layers = {f"layer {n}": random_tensor((1 << 20,), torch.uint8, n) for n in range(16)}
    save(flaky, 1, layers)
    Hooked.reads.clear()
    target = {name: torch.zeros(1 << 20, dtype=torch.uint8) for name in layers}
    flaky.load(1, target, no_dist=True, names=["layer 1", "layer 5", "layer 7", "layer 15"])
    wanted = 4 << 20
    assert wanted <= bytes_read() < 1.1 * wanted
    assert_equal(target["layer 7"], layers["layer 7"])
    assert not target["layer 6"].any()


class Shape:
    """A stored tensor, and the part of it that is wanted."""

    def __init__(self, tensor: torch.Tensor, offsets: list[int], lengths: list[int]) -> None:
        self.tensor, self.offsets, self.lengths = tensor, offsets, lengths

    @property
    def part(self) -> torch.Tensor:
        part = self.tensor
        for dim, place in enumerate(zip(self.offsets, self.lengths, strict=True)):
            part = part.narrow(dim, *place)
        return part


def random_shape(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_tensor(sizes, dtype, seed=sum(sizes))


PARTS = {
    "rows": Shape(random_shape(4096, 512), [1024, 0], [1024, 512]),
    "the last rows": Shape(random_shape(4096, 512), [4000, 0], [96, 512]),
    "one element": Shape(random_shape(4096, 512), [2222, 333], [1, 1]),
    "nothing": Shape(random_shape(4096, 512), [100, 0], [0, 512]),
    "narrow columns": Shape(random_shape(1024, 2048), [0, 512], [1024, 256]),
    "wide columns": Shape(random_shape(8, 1 << 18), [0, 1 << 16], [8, 1 << 16]),
    "a box": Shape(random_shape(4, 64, 8192), [1, 16, 100], [2, 32, 5000]),
    "bytes": Shape(random_shape(4 << 20, dtype=torch.uint8), [12345], [54321]),
    "transposed": Shape(random_shape(2048, 1024).t(), [100, 0], [50, 2048]),
    "channels last": Shape(
        random_shape(64, 32, 32, 32).to(memory_format=torch.channels_last),
        [8, 0, 0, 0],
        [8, 32, 32, 32],
    ),
    "conjugated": Shape(random_shape(1024, 512, dtype=torch.complex64).conj(), [7, 0], [30, 512]),
}


def read_part(steps: RemoteSteps, name: str, shape: Shape, **options: Any) -> torch.Tensor:
    reader = RemoteReader(steps._files.below("0000000001"), None, **options)
    metadata = reader.read_metadata()
    reader.set_up_for_load(metadata, 0)
    info = metadata.storage_data[MetadataIndex(name, [0] * shape.tensor.dim())]
    stored = metadata.state_dict_metadata[name]
    target = torch.zeros(shape.lengths, dtype=shape.tensor.dtype)
    row = (name, 0, info.offset, info.length, stored.properties.dtype, stored.size)
    reader.read_rows(
        [info.relative_path], [(*row, tuple(shape.offsets), tuple(shape.lengths), target)]
    )
    reader.release()
    return target


@pytest.fixture(scope="module")
def ours() -> RemoteSteps:
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/ours")
    save(steps, 1, {name: shape.tensor for name, shape in PARTS.items()})
    return steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> RemoteSteps:
    """The same by torch's writer: without checksums of blocks."""
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/stock")
    path = tmp_path_factory.mktemp("stock")
    state = {name: shape.tensor for name, shape in PARTS.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    for file in path.iterdir():
        steps._files.write(f"0000000001/{file.name}", file.read_bytes())
    steps._files.write(f"0000000001/{MARKER_NAME}", b"{}")
    return steps


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_record_has_its_values(
    request: pytest.FixtureRequest, writer: str, name: str
) -> None:
    found = read_part(request.getfixturevalue(writer), name, PARTS[name])
    assert_equal(found, PARTS[name].part.resolve_conj().contiguous())


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", ["rows", "the last rows", "one element", "wide columns", "bytes"])
def test_a_part_of_a_record_takes_its_bytes_and_some_blocks(
    request: pytest.FixtureRequest, writer: str, name: str
) -> None:
    steps = request.getfixturevalue(writer)
    Hooked.reads.clear()
    read_part(steps, name, PARTS[name])
    wanted = PARTS[name].part.nbytes
    # The ends of the record twice, and what lies between them and the part; blocks of 16 KiB.
    assert wanted <= bytes_read() < wanted + (400 << 10)


def test_a_part_that_is_damaged_is_refused_with_the_url(flaky: RemoteSteps) -> None:
    save(flaky, 1, {"t": random_shape(2048, 1024)}, thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    data = bytearray(flaky._files.read(name))
    data[5 << 20] ^= 1
    flaky._files.write(name, bytes(data))
    part = Shape(random_shape(2048, 1024), [1024, 0], [512, 1024])
    with pytest.raises(Corrupt, match=f"{flaky.root}/0000000001/__0_"):
        read_part(flaky, "t", part)


def test_a_load_in_small_waves_has_all_values_and_frees_its_files(
    flaky: RemoteSteps, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ckpt.remote_reader.WAVE_BYTES", 1 << 20)
    layers = {f"layer {n}": random_tensor((1 << 19,), torch.uint8, n) for n in range(16)}
    save(flaky, 1, layers)
    most = 0

    def look(kind: str, _path: str) -> None:
        nonlocal most
        files = [file for file in staging.rglob("*") if file.is_file()]
        most = max(most, sum(file.stat().st_blocks * 512 for file in files))

    target = {name: torch.zeros(1 << 19, dtype=torch.uint8) for name in layers}
    with hooked(look):
        flaky.load(1, target, no_dist=True)
    assert_equal(target, layers)
    assert most < 2 << 20


def test_values_are_converted_on_the_way(flaky: RemoteSteps) -> None:
    save(flaky, 1, {"t": torch.arange(1 << 18, dtype=torch.float32)})
    target = {"t": torch.zeros(1 << 18, dtype=torch.float64)}
    flaky.load(1, target, no_dist=True)
    assert_equal(target["t"], torch.arange(1 << 18, dtype=torch.float64))


def test_a_load_that_frees_first_has_all_values(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(6))
    assert_equal(loaded(flaky, 1, free_before_read=True), state_of(6))


def test_a_request_that_fails_fails_the_load_with_the_url(
    flaky: RemoteSteps, staging: Path
) -> None:
    save(flaky, 1, state_of())
    with fail_at("read", ".distcp"), pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    cause = cause_of(caught.value)
    assert isinstance(cause, PermissionError)
    assert cause.filename.startswith(f"{flaky.root}/0000000001/__0_")
    assert list(staging.iterdir()) == []


def test_a_verify_without_room_in_the_staging_directory_downloads_nothing(
    flaky: RemoteSteps, small_disk: Path
) -> None:
    save(flaky, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    Hooked.reads.clear()
    with pytest.raises(OSError, match="pass another staging_dir") as caught:
        RemoteSteps(flaky.root, small_disk).verify(1)
    assert caught.value.errno == errno.ENOSPC
    assert Hooked.reads == []


def test_uploads_that_are_told_as_totals_are_counted_once() -> None:
    counts: list[int] = []
    callback = _callback(counts.append)
    callback.absolute_update(10)
    callback.relative_update(5)
    callback.absolute_update(20)
    assert counts == [10, 5, 5]


def test_a_load_without_room_in_the_staging_directory_says_so(
    flaky: RemoteSteps, small_disk: Path
) -> None:
    save(flaky, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    steps = RemoteSteps(flaky.root, small_disk)
    with pytest.raises(dcp.CheckpointException, match="pass another staging_dir") as caught:
        steps.load(1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)}, no_dist=True)
    cause = cause_of(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk))


def test_a_staging_directory_that_does_not_say_what_is_free_is_tried(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        f_blocks = f_frsize = f_bavail = 0

    monkeypatch.setattr(free_space.os, "statvfs", lambda path: Silent)
    save(flaky, 1, state_of())
    assert flaky.verify(1).ok
    assert_equal(loaded(flaky, 1), state_of())


def test_an_answer_that_is_cut_short_fails_the_load(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(flaky, 1, state_of())
    whole = Hooked.cat_file

    def short(self: Hooked, path: str, *args: Any, **kwargs: Any) -> bytes:
        data = whole(self, path, *args, **kwargs)
        return data[:-1] if path.endswith(".distcp") else data

    monkeypatch.setattr(Hooked, "cat_file", short)
    with pytest.raises(dcp.CheckpointException, match="asked for bytes"):
        loaded(flaky, 1)


def test_a_file_that_is_too_short_is_refused(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.write(name, flaky._files.read(name)[:-100])
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    assert isinstance(cause_of(caught.value), Corrupt)


def test_a_file_that_is_not_there_is_named(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.remove([name])
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    cause = cause_of(caught.value)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == f"{flaky.root}/{name}"


def test_metadata_that_names_a_file_elsewhere_is_refused(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, {"t": torch.arange(9)})
    metadata = flaky.metadata(1)
    [info] = metadata.storage_data.values()
    info.relative_path = "../../elsewhere.distcp"
    flaky._files.write("0000000001/.metadata", torch_ckpt.metadata.encode_metadata(metadata))
    with pytest.raises(dcp.CheckpointException) as caught:
        flaky.load(1, {"t": torch.zeros(9)}, no_dist=True)
    assert isinstance(cause_of(caught.value), Unsafe)
    assert list(staging.iterdir()) == []


# --- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_ranges_of_a_box_hold_each_of_its_elements(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=random))

    sizes = [number(1, 9) for _ in range(number(1, 2))] + [number(1, 40000)]
    offsets = [number(0, size - 1) for size in sizes]
    lengths = [number(1, size - at) for size, at in zip(sizes, offsets, strict=True)]
    item_bytes = 8
    flat = torch.arange(torch.Size(sizes).numel()).view(sizes)
    for dim, place in enumerate(zip(offsets, lengths, strict=True)):
        flat = flat.narrow(dim, *place)
    wanted = torch.zeros(torch.Size(sizes).numel(), dtype=torch.bool)
    wanted[flat.flatten()] = True
    covered = torch.zeros_like(wanted)
    last = -1
    for begin, end in box_ranges(sizes, offsets, lengths, item_bytes):
        assert begin > last
        last = end
        covered[begin // item_bytes : end // item_bytes] = True
    assert not (wanted & ~covered).any()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"LastModified": datetime(2026, 1, 1, tzinfo=timezone.utc)}, 1767225600.0),
        ({"updated": "2026-01-01T00:00:00.000Z"}, 1767225600.0),
        ({"mtime": 1767225600.5}, 1767225600.5),
        ({"updated": "yesterday"}, None),
        ({}, None),
    ],
)
def test_when_a_file_was_written_is_read_in_the_words_of_each_file_system(
    info: dict[str, Any], expected: float | None
) -> None:
    assert modified(info) == expected


def test_of_files_without_a_time_the_age_is_0() -> None:
    assert age([RemoteFile(1, 5.0), RemoteFile(1, None)]) == 0


def test_ranges_that_are_near_each_other_become_one() -> None:
    assert coalesced([(50, 60), (0, 10), (15, 20), (5, 12), (7, 7)], gap=5) == [(0, 20), (50, 60)]


def test_the_marker_is_json(flaky: RemoteSteps) -> None:
    save(flaky, 12, state_of(), marker=lambda: {"ranks": 1})
    document = json.loads(flaky._files.read(f"0000000012/{MARKER_NAME}"))
    assert (document["step"], document["ranks"]) == (12, 1)
