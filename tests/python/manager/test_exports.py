"""Versions of a model that a manager exports."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.fault_hooks import failing, held
from torch_ckpt.events import Event
from torch_ckpt.steps import open_steps


class Run:
    """A run whose weight is the number of its steps."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.exports = path / "exports"
        self.events: list[Event] = []
        self.model = torch.nn.Linear(2, 1)
        self.options = options

    def manager(self, **options: Any) -> torch_ckpt.CheckpointManager:
        return torch_ckpt.CheckpointManager(
            self.exports.parent / "steps",
            export=torch_ckpt.Export(self.exports, **self.options),
            on_event=self.events.append,
            **options,
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "step": 3}

    def at(self, step: int) -> dict[str, Any]:
        torch.nn.init.constant_(self.model.weight, step)
        return self.state

    def versions(self) -> dict[int, float]:
        """Returns the weight of each version."""
        found = {}
        for info in open_steps(self.exports).entries(leftovers=False):
            model = torch.nn.Linear(2, 1)
            torch_ckpt.load(model.state_dict(), info.path, no_dist=True)
            found[info.step] = model.weight[0, 0].item()
        return found

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_the_model_is_exported_at_multiples_of_the_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3)
    with run.manager(interval=100) as manager:
        for step in range(1, 8):
            manager.save(step, run.at(step))
            manager.wait_until_finished()
    assert run.versions() == {3: 3, 6: 6}
    assert run.kinds() == ["exported", "exported"]
    assert os.readlink(run.exports / "latest") == "0000000006"


def test_the_model_is_exported_on_request(tmp_path: Path) -> None:
    run = Run(tmp_path, format=torch_ckpt.Safetensors(dtype="bf16"), delta=True)
    with run.manager(interval=2) as manager:
        for step in range(1, 4):
            manager.save(step, run.at(step))
        assert manager.export(3, run.state)
        assert manager.export(4, run.at(5))
    assert run.versions() == {3: 3, 4: 5}
    assert manager.all_steps() == [2]
    assert (run.exports / "latest" / "torch_ckpt.delta").exists()


def test_an_export_at_the_step_of_a_save_starts_after_the_save(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    with run.manager(interval=2) as manager:
        with held("fsync") as gate:
            manager.save(2, run.at(2))
            gate.wait()
        manager.wait_until_finished()
        assert run.versions() == {}
        for step in range(3, 5):
            manager.save(step, run.at(step))
            manager.wait_until_finished()
    assert run.versions() == {3: 3}
    assert manager.all_steps() == [2, 4]


def test_an_export_replaces_the_versions_of_an_abandoned_timeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    with run.manager(interval=10) as manager:
        for step in (10, 20, 30):
            manager.save(step, run.at(step))
            manager.export(step, run.state)
        manager.wait_until_finished()
        manager.restore(run.state, 10)
        with failing("pwrite", errno.ENOSPC):
            manager.export(20, run.at(22))
            with pytest.raises(torch.distributed.checkpoint.CheckpointException):
                manager.wait_until_finished()
        assert run.versions() == {10: 10, 20: 20, 30: 30}, "a failed export deletes nothing"
        with caplog.at_level(logging.WARNING):
            manager.export(20, run.at(25))
            manager.wait_until_finished()
    assert run.versions() == {10: 10, 20: 25}
    assert os.readlink(run.exports / "latest") == "0000000020"
    assert "deleting the stale versions [20, 30], because training was rewound" in caplog.text


def failed_export(manager: torch_ckpt.CheckpointManager, step: int, run: Run) -> str:
    manager.export(step, run.at(step))
    with pytest.raises(torch.distributed.checkpoint.CheckpointException) as caught:
        manager.wait_until_finished()
    return str(caught.value)


def test_versions_that_are_not_stale_and_pinned_ones_are_never_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager(interval=10) as manager:
        for step in (10, 20):
            manager.save(step, run.at(step))
            manager.export(step, run.state)
        manager.wait_until_finished()
        assert not manager.export(20, run.at(99)), "the same step is not exported again"
        assert "version 20 is the newest" in failed_export(manager, 15, run)
        open_steps(run.exports).set_pinned(20, True)
        manager.restore(run.state, 10)
        assert "it is pinned" in failed_export(manager, 15, run)
    assert run.versions() == {10: 10, 20: 20}


def test_an_export_is_not_postponed_forever_by_saves_of_every_step(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    with run.manager(interval=1) as manager:
        for step in range(1, 8):
            manager.save(step, run.at(step))
    assert run.versions() == {3: 3, 5: 5, 7: 7}
    assert manager.all_steps() == [1, 2, 3, 4, 5, 6, 7]


def test_an_export_that_is_due_when_a_save_fails_starts_later(tmp_path: Path) -> None:
    run = Run(tmp_path, every=6)
    with run.manager(interval=3) as manager:
        with failing("rename", errno.ENOSPC):
            manager.save(3, run.at(3))
            manager.wait_until_staged()
            with pytest.raises(torch.distributed.checkpoint.CheckpointException):
                manager.wait_until_finished()
        for step in range(4, 8):
            manager.save(step, run.at(step))
            manager.wait_until_finished()
    assert run.versions() == {7: 7}


def test_a_due_export_that_has_not_started_is_logged_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, every=2)
    with run.manager(interval=2) as manager:
        manager.save(2, run.at(2))
    assert "the export that was due at step 2 has not started" in caplog.text


def test_exports_beside_the_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exports need another directory than the steps"):
        torch_ckpt.CheckpointManager(tmp_path, export=torch_ckpt.Export(tmp_path))


def test_a_failed_export_is_raised_and_reported_like_a_failed_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager(interval=1) as manager:
        manager.save(1, run.at(1))
        manager.wait_until_finished()
        with failing("rename", errno.ENOSPC):
            manager.export(1, run.state)
            with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="No space"):
                manager.wait_until_finished()
        assert manager.save_errors == 1
        manager.save(2, run.at(2))
    assert run.versions() == {}
    assert manager.all_steps() == [1, 2]
    assert run.kinds()[2:] == ["export_failed", "saving", "saved"]


def test_a_missing_entry_fails_the_export(tmp_path: Path) -> None:
    run = Run(tmp_path, entry="policy")
    with run.manager(on_save_error="warn_and_continue") as manager:
        assert not manager.export(1, run.state)
        assert manager.save_errors == 1
    assert "policy" in run.events[0].message


def test_an_export_without_a_directory_is_refused(tmp_path: Path) -> None:
    with (
        torch_ckpt.CheckpointManager(tmp_path / "steps") as manager,
        pytest.raises(ValueError, match=r"Pass export=torch_ckpt\.Export"),
    ):
        manager.export(1, {"model": {}})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"keep": 0}, ValueError, "keep_last must be positive"),
        ({"base": 1.5}, TypeError, "base must be the number of a version"),
        ({"format": "bf16"}, TypeError, r"format must be a torch_ckpt\.Safetensors"),
        ({"overwrite": True}, TypeError, "a version never changes"),
        ({"dtype": "bf16"}, TypeError, r"format=torch_ckpt\.Safetensors\(dtype=\.\.\.\)"),
        ({"dtyp": "bf16"}, TypeError, "Export.* unexpected keyword argument 'dtyp'"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torch_ckpt.Export("exports", **options)


def test_an_exported_version_is_not_stale_for_a_later_export(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.manager(interval=10) as manager:
        manager.save(10, run.at(10))
        manager.wait_until_finished()
        manager.restore(run.state)
        manager.export(30, run.at(30))
        assert "a new version must have a larger number" in failed_export(manager, 20, run)
    assert run.versions() == {30: 30}


def test_exports_are_due_if_each_save_may_overwrite(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    with run.manager(interval=1) as manager:
        for step in range(1, 4):
            manager.save(step, run.at(step), overwrite=True)
            manager.wait_until_finished()
    assert run.versions() == {3: 3}


def test_a_relative_directory_is_resolved_when_the_export_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    export = torch_ckpt.Export("exports")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert export.root == str(tmp_path / "exports")


@pytest.mark.parametrize("form", ["file://{}", "{}/../steps", "{}/"])
def test_another_form_of_the_root_is_refused(tmp_path: Path, form: str) -> None:
    root = tmp_path / "steps"
    root.mkdir()
    with pytest.raises(ValueError, match="exports need another directory than the steps"):
        torch_ckpt.CheckpointManager(root, export=torch_ckpt.Export(form.format(root)))
