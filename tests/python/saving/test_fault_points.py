"""The fault points for tests: csrc/os/fault.h from Python."""

from __future__ import annotations

import threading
from errno import EACCES, EIO
from pathlib import Path

import pytest

from tests.fault_hooks import at_fault_points, before, failing, held
from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory


def test_a_call_fails_with_the_errno_that_the_hook_returns(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    with failing("unlink", EACCES, tmp_path / "one"), pytest.raises(PermissionError) as raised:
        OpenDirectory(tmp_path).remove("one")
    assert raised.value.filename == str(tmp_path / "one")
    assert (tmp_path / "one").exists()


def test_a_point_in_python_fails_like_a_call_of_the_engine(tmp_path: Path) -> None:
    with failing("look", EIO, tmp_path), pytest.raises(OSError, match="look") as raised:
        _core.fault_point("look", tmp_path)
    assert (raised.value.errno, raised.value.filename) == (EIO, str(tmp_path))


def test_an_exception_of_a_hook_is_raised_at_the_end() -> None:
    with pytest.raises(ZeroDivisionError), at_fault_points(lambda _operation, _path: 1 // 0):
        _core.fault_point("look")


def test_a_point_that_is_not_reached_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rename was not reached"), before("rename", list):
        pass


def test_all_nested_hooks_are_called_and_any_can_fail_the_call() -> None:
    reached: list[str] = []
    with (
        at_fault_points(lambda operation, _path: reached.append(operation)),
        before("here", lambda: reached.append("inside")),
    ):
        with failing("there", EIO, "*/2"), pytest.raises(OSError, match="there"):
            _core.fault_point("there", "run/2")
        _core.fault_point("there", "run/2")
        _core.fault_point("here")
    assert reached == ["there", "there", "here", "inside"]


def test_a_thread_at_a_held_point_waits_until_the_gate_opens() -> None:
    passed: list[str] = []
    with held("here") as gate:
        other = threading.Thread(target=lambda: (_core.fault_point("here"), passed.append("it")))
        other.start()
        gate.wait()
        assert passed == []
        gate.open()
        other.join()
    assert passed == ["it"]
