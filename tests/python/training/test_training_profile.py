"""Profiles: traces in their requested directories, readable by a viewer."""

from __future__ import annotations

import errno
import gzip
import json
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from benchmarks.ranks import mesh_without_peers
from torch_ckpt.training import profiles, start_profile, stop_profile


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory to which traces are written before they are copied."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture(autouse=True)
def stopped(tmp_path: Path) -> Iterator[None]:
    """Stops a profile that a failed test has left running."""
    yield
    if profiles._running is not None:
        stop_profile(tmp_path / "left")


def operations(trace: bytes) -> set[str]:
    return {event.get("name") for event in json.loads(gzip.decompress(trace))["traceEvents"]}


def taken(directory: str | Path, profiler: torch.profiler.profile | None = None) -> str:
    start_profile(profiler)
    torch.ones(3).cumsum(0)
    path = stop_profile(directory)
    assert path is not None
    return path


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_the_trace_has_the_operations_of_the_profile(tmp_path: Path, prefix: str) -> None:
    path = taken(f"{prefix}{tmp_path}/made/now")
    assert "aten::cumsum" in operations(Path(path.removeprefix(prefix)).read_bytes())


def test_the_trace_is_copied_to_another_file_system() -> None:
    path = taken(f"memory://{uuid.uuid4().hex}/profiles")
    assert "aten::cumsum" in operations(fsspec.filesystem("memory").cat_file(path))


def test_a_directory_with_a_trailing_slash_is_the_same_directory(tmp_path: Path) -> None:
    path = Path(taken(f"{tmp_path}/traces/"))
    assert path.parent == tmp_path / "traces"
    assert path.exists()


def test_a_trace_has_only_the_operations_of_its_profile(tmp_path: Path, temporary: Path) -> None:
    torch.ones(3).cumprod(0)
    path = taken(tmp_path / "traces")
    torch.ones(3).logcumsumexp(0)
    assert not {"aten::cumprod", "aten::logcumsumexp"} & operations(Path(path).read_bytes())
    assert taken(tmp_path / "traces") != path
    assert list(temporary.iterdir()) == []
    # TensorBoard recognizes this name.
    assert re.fullmatch(r"rank-0\.\d+\.pt\.trace\.json\.gz", Path(path).name)


def test_a_trace_is_named_by_the_rank_that_started_it(tmp_path: Path) -> None:
    with mesh_without_peers(3, rank=2):
        start_profile(all_ranks=True)
    path = stop_profile(tmp_path)
    assert path is not None
    assert Path(path).name.startswith("rank-2.")


def test_a_profiler_with_other_options_is_used(tmp_path: Path) -> None:
    profiler = torch.profiler.profile(record_shapes=True)
    trace = Path(taken(tmp_path, profiler)).read_bytes()
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    [event] = [event for event in events if event.get("name") == "aten::cumsum"]
    assert event["args"]["Input Dims"][0] == [3]


def test_starting_twice_and_stopping_without_a_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no profile is running; call start_profile first"):
        stop_profile(tmp_path)
    start_profile()
    with pytest.raises(RuntimeError, match="a profile is running; call stop_profile first"):
        start_profile()


def test_starting_while_a_torch_profiler_runs_is_refused() -> None:
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="a torch profiler is running"):
        start_profile()


def test_stopping_on_another_thread_is_refused_and_the_profile_continues(tmp_path: Path) -> None:
    start_profile()
    failures: list[BaseException] = []

    def stop() -> None:
        try:
            stop_profile(tmp_path)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert "another thread called start_profile" in str(failures[0])
    assert stop_profile(tmp_path) is not None


def test_an_unsupported_url_is_refused_and_the_profile_continues(tmp_path: Path) -> None:
    start_profile()
    with pytest.raises(ValueError, match="nowhere://run"):
        stop_profile("nowhere://run")
    assert stop_profile(tmp_path) is not None


def test_a_trace_that_cannot_be_copied_is_kept_at_the_named_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    start_profile()
    torch.ones(3).cumsum(0)
    with pytest.raises(OSError, match="the trace could not be copied") as failure:
        stop_profile(tmp_path / "file")
    kept = re.search(r"kept at (\S+\.gz)", str(failure.value))
    assert kept is not None
    assert "aten::cumsum" in operations(Path(kept[1]).read_bytes())
    # Another profile can be taken.
    assert Path(taken(tmp_path / "traces")).exists()


def test_a_trace_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: object, path: str) -> None:
        Path(path).write_bytes(b"incomplete")
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    start_profile()
    with pytest.raises(OSError, match="No space left on device"):
        stop_profile(tmp_path / "traces")
    assert list(temporary.iterdir()) == []
