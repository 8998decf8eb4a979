"""``torch-ckpt steps``, ``gc``, ``delete``, ``pin`` and ``unpin``."""

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests import support
from tests.commands import Run
from tests.fault_hooks import before
from torch_ckpt import Retention
from torch_ckpt._base.formatting import duration
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.cli.steps import collect
from torch_ckpt.steps import MARKER_NAME, LocalSteps, open_steps
from torch_ckpt.steps.lease_file import LeaseFile
from torch_ckpt.steps.object_steps import ObjectSteps
from torch_ckpt.steps.root_lease import RootLease

real_and_dry = pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry run"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save_step(
    root: Path, step: int, hours_ago: float = 0.0, epoch: int = 0, **metrics: float
) -> None:
    marker = {"saved_at": time.time() - 3600 * hours_ago, "metrics": metrics, "epoch": epoch}
    support.save_step(LocalSteps(root), step, {"t": torch.ones(100)}, marker=lambda: marker)


def save_steps(root: Path, *steps: int) -> None:
    for step in steps:
        save_step(root, step)


def leave_unfinished(root: Path, step: int) -> str:
    name = f"{step:010d}.tmp-0123abcd"
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(bytes(1000))
    return name


def leave_unmarked(root: Path) -> str:
    name = "0000000007"
    torch_ckpt.save({"t": torch.ones(100)}, root / name, no_dist=True)
    return name


def steps_of(root: Path) -> list[int]:
    return [entry.step for entry in LocalSteps(root).entries() if entry.complete]


def files_and_bytes(*directories: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for directory in directories for file in directory.iterdir()]
    return len(sizes), sum(sizes)


@pytest.mark.parametrize(
    "command",
    [["steps"], ["gc", "--keep-last", "1"], ["delete", "7"], ["pin", "7"], ["unpin", "7"]],
    ids=lambda command: command[0],
)
def test_a_single_checkpoint_or_a_file_is_no_root(
    root: Path, tmp_path: Path, run: Run, command: list[str]
) -> None:
    name, *rest = command
    save_step(root, 7)
    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "single", no_dist=True)
    (tmp_path / "file").touch()
    step = root / "0000000007"
    expected = f"{step} is a single checkpoint, not the root of a run. Pass {root}, or a new "
    assert expected in run.refused(name, step, *rest)
    single = tmp_path / "single"
    error = run.refused(name, single, *rest)
    assert "Pass the directory that contains the steps, or a new " in error
    assert error.endswith(f"run torch-ckpt ls {single}.\n")
    assert "contains the steps, but is not a directory" in run.refused(
        name, tmp_path / "file", *rest
    )
    assert steps_of(root) == [7]


# --- steps ---------------------------------------------------------------------------------------


def test_steps_lists_size_age_metrics_and_pins(root: Path, run: Run) -> None:
    save_step(root, 100, hours_ago=49, loss=0.25)
    save_step(root, 200, hours_ago=2.5)
    LocalSteps(root).set_pinned(200, True)
    header, first, second, blank, total = run("steps", root).splitlines()
    assert header.split() == ["STEP", "SIZE", "AGE", "PINNED", "METRICS"]
    assert first.split()[0] == "100"
    assert first.split()[-4:] == ["2", "d", "-", "loss=0.25"]
    assert second.split()[-4:] == ["2", "h", "yes", "-"]
    assert blank == ""
    assert total.startswith("total: 2 complete steps, ")


def test_steps_names_leftovers(root: Path, run: Run) -> None:
    save_step(root, 100)
    name = leave_unfinished(root, 200)
    lines = run("steps", root).splitlines()
    assert f"unfinished: {name} (1.0 kB)" in lines
    assert lines[-1].startswith("total: 1 complete step, 1 leftover, ")


def test_steps_prints_every_field_as_json(root: Path, run: Run) -> None:
    save_step(root, 100, loss=0.25, bad=float("nan"))
    leave_unfinished(root, 200)
    complete, left = run.json("steps", root)["steps"]
    assert (complete["step"], complete["state"]) == (100, "complete")
    assert complete["metrics"] == {"loss": 0.25, "bad": "nan"}
    assert complete["bytes"] > 400
    assert (left["step"], left["state"], left["bytes"]) == (200, "unfinished", 1000)


@pytest.mark.parametrize(
    "arguments", [["steps"], ["gc", "--keep-last", "1"], ["gc", "--sweep"]], ids=" ".join
)
def test_a_missing_root_is_an_error(root: Path, run: Run, arguments: list[str]) -> None:
    error = run(arguments[0], root, *arguments[1:], code=2)
    assert f"{root}: there are no steps" in error
    assert not root.exists()


def test_steps_names_a_missing_package_of_a_url(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    error = run("steps", "sftp://host/run", code=2)
    assert error.startswith("torch-ckpt: sftp://host/run: ")
    assert "paramiko" in error
    assert "nosuch" in run("steps", "nosuch://run", code=2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 12.9, "12 d")],
)
def test_ages_are_written_in_the_largest_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def save_steps_of_two_runs(root: Path) -> None:
    """Saves steps 1 to 4 of a run, and step 2 of a later run that has continued from step 1."""
    for step, epoch in ((1, 1), (2, 2), (3, 1), (4, 1)):
        save_step(root, step, epoch=epoch)


def test_steps_warns_if_the_steps_of_several_runs_are_mixed(root: Path, run: Run) -> None:
    save_steps_of_two_runs(root)
    [warning] = [line for line in run("steps", root).splitlines() if line.startswith("warning: ")]
    assert "(epoch 1) saved steps 3, 4; an unknown process (epoch 2) saved step 2." in warning
    assert "The newest step of the highest epoch, 2, counts as the newest step." in warning
    run("delete", root, "3", "4", "--force")
    assert "warning" not in run("steps", root)


# --- gc ------------------------------------------------------------------------------------------


def test_gc_keeps_a_step_that_is_pinned_while_others_are_deleted(root: Path) -> None:
    save_steps(root, 1, 2, 3)
    with before("rmtree", lambda: LocalSteps(root).set_pinned(2, True)):
        report = collect(LocalSteps(root), Retention(keep_last=1))
    assert [entry.step for entry in report.deleted] == [1]
    assert report.kept == {2: ["pinned"], 3: ["the newest", "last 1"]}
    assert steps_of(root) == [2, 3]


@pytest.mark.parametrize("arguments", [["gc", "--keep-last", "1"], ["delete", "1", "2"]])
def test_a_step_that_is_saved_again_after_the_steps_were_listed_is_kept(
    root: Path, run: Run, arguments: list[str]
) -> None:
    save_steps(root, 1, 2, 3)
    marker = root / "0000000002" / MARKER_NAME
    again = json.loads(marker.read_text()) | {"saved_at": 1e9}
    command, *others = arguments
    with before("rmtree", lambda: marker.write_text(json.dumps(again))):
        run(command, root, *others, code=1)
    assert steps_of(root) == [2, 3]


@pytest.mark.parametrize("arguments", [["gc", "--keep-last", "1"], ["delete", "1", "2"]])
def test_deletions_stop_if_a_run_takes_the_lease_after_the_steps_were_listed(
    root: Path, run: Run, arguments: list[str]
) -> None:
    save_steps(root, 1, 2, 3)
    lease = RootLease(LeaseFile(str(root)))
    command, *others = arguments
    with before("rmtree", lease.require):
        run(command, root, *others, code=2)
    assert "the lease on this root has changed since the steps were listed" in run.err
    assert steps_of(root) == [2, 3]
    lease.release()


def test_gc_reports_the_rules_that_keep_each_step_and_what_it_frees(root: Path, run: Run) -> None:
    save_steps(root, 100, 150, 200, 250, 300)
    LocalSteps(root).set_pinned(150, True)
    freed = files_and_bytes(root / "0000000100", root / "0000000250")
    report = run.json("gc", root, "--keep-last", "1", "--keep-every", "200")
    assert report["kept"] == [
        {"step": 150, "reasons": ["pinned"]},
        {"step": 200, "reasons": ["every 200 steps"]},
        {"step": 300, "reasons": ["the newest", "last 1"]},
    ]
    assert report["deleted"] == [100, 250]
    assert (report["freed_files"], report["freed_bytes"]) == freed
    assert steps_of(root) == [150, 200, 300]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("--keep-best 2 --metric accuracy --mode max", [2, 3, 5]),
        ("--keep-every-hours 2", [1, 3, 5]),
    ],
)
def test_gc_passes_its_rules_on(root: Path, run: Run, rules: str, kept: list[int]) -> None:
    hours_and_accuracy = [(10, 0.5), (9, 0.9), (7.9, 0.7), (7, 0.1), (0, 0.2)]
    for step, (hours, accuracy) in enumerate(hours_and_accuracy, start=1):
        save_step(root, step, hours, accuracy=accuracy)
    run("gc", root, *rules.split())
    assert steps_of(root) == kept


def test_gc_keeps_the_step_that_a_run_would_resume_from(root: Path, run: Run) -> None:
    save_steps_of_two_runs(root)
    assert run.json("gc", root, "--keep-last", "1")["deleted"] == [1, 3, 4]
    assert steps_of(root) == [2]


def test_delete_protects_the_step_that_a_run_would_resume_from(root: Path, run: Run) -> None:
    save_steps_of_two_runs(root)
    error = run("delete", root, "2", code=2)
    assert "step 2 is the newest step, from which a run would resume; pass --force" in error
    assert "there is no complete step 9; the newest step is 2" in run("delete", root, "9", code=2)
    assert run.json("delete", root, "4")["deleted"] == [4]


def test_a_dry_run_deletes_nothing_and_prints_the_same_report(root: Path, run: Run) -> None:
    save_steps(root, 1, 2, 3)
    name = leave_unfinished(root, 4)
    arguments = ["gc", root, "--keep-last", "1", "--sweep"]
    lines = run(*arguments, "--dry-run").splitlines()
    assert f"leftover that would be examined: {name}" in lines
    before = run.json(*arguments, "--dry-run")
    assert steps_of(root) == [1, 2, 3]
    assert (root / name).is_dir()
    after = run.json(*arguments)
    assert before.pop("dry_run")
    assert not after.pop("dry_run")
    assert before == after
    assert steps_of(root) == [3]
    assert not (root / name).exists()


def test_gc_removes_leftovers_only_in_a_sweep_which_deletes_no_step(root: Path, run: Run) -> None:
    save_steps(root, 1, 2)
    name = leave_unfinished(root, 3)
    run("gc", root, "--keep-last", "2")
    assert (root / name).is_dir()
    report = run.json("gc", root, "--sweep")
    assert (report["swept"], report["deleted"]) == ([name], [])
    assert steps_of(root) == [1, 2]


@real_and_dry
def test_a_sweep_counts_files_and_bytes_that_it_frees(root: Path, run: Run, dry: list[str]) -> None:
    save_step(root, 1)
    name = leave_unfinished(root, 2)
    (root / name / "__1_0.distcp").write_bytes(bytes(500))
    last = run("gc", root, "--sweep", *dry).splitlines()[-1]
    would = "would be " if dry else ""
    assert last == (
        f"{root}: 1 step kept, 0 steps {would}deleted, 1 leftover {would}removed, "
        f"2 files and 1.5 kB {would}freed"
    )


@real_and_dry
def test_a_sweep_keeps_and_names_an_unmarked_checkpoint(
    root: Path, run: Run, dry: list[str]
) -> None:
    name = leave_unmarked(root)
    lines = run("gc", root, "--sweep", *dry).splitlines()
    assert f"not removed: {name} (it has no write_completed file)" in lines
    assert (root / name / ".metadata").exists()


def test_a_sweep_names_a_leftover_in_use(root: Path, run: Run) -> None:
    name = leave_unfinished(root, 2)
    with closing(OpenDirectory(root / name)) as saving:
        assert saving.share()
        report = run.json("gc", root, "--sweep")
    assert (report["swept"], report["left"]) == ([], [name])


def test_gc_of_a_root_with_only_leftovers_exits_with_2_without_sweep(root: Path, run: Run) -> None:
    name = leave_unfinished(root, 1)
    assert "there are no steps" in run("gc", root, "--keep-last", "1", code=2)
    assert f"leftover removed: {name}" in run("gc", root, "--sweep")


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ([], "gc needs a rule"),
        (["--keep-best", "1"], "--metric"),
        *((["--keep-every-hours=" + hours], "hours") for hours in ("0", "-1", "nan", "inf", "x")),
    ],
)
def test_gc_with_incomplete_or_invalid_rules_is_refused(
    root: Path, run: Run, rules: list[str], error: str
) -> None:
    save_steps(root, 1, 2)
    assert error in run("gc", root, *rules, code=2)
    assert steps_of(root) == [1, 2]


@real_and_dry
def test_gc_suggests_a_metric_for_one_no_step_has(root: Path, run: Run, dry: list[str]) -> None:
    for step in range(1, 7):
        save_step(root, step, eval_loss=float(step))
    left = leave_unfinished(root, 7)
    rules = ["--keep-best", "2", "--metric", "evalloss", "--keep-last", "1", "--sweep"]
    text = run("gc", root, *rules, *dry, code=2)
    assert "the metric 'evalloss', which keep_best compares, is missing" in text
    assert "did you mean 'eval_loss'?" in text
    assert steps_of(root) == [1, 2, 3, 4, 5, 6]
    assert (root / left).exists()


# --- delete, pin, unpin --------------------------------------------------------------------------


def test_delete_deletes_the_given_steps_and_counts_their_files(root: Path, run: Run) -> None:
    save_steps(root, 1, 2, 3, 4)
    freed = files_and_bytes(root / "0000000001", root / "0000000003")
    report = run.json("delete", root, "3", "1")
    assert report["deleted"] == [1, 3]
    assert (report["freed_files"], report["freed_bytes"]) == freed
    assert steps_of(root) == [2, 4]
    run("delete", root, "4", "--force")  # the newest
    assert steps_of(root) == [2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("9", "there is no complete step 9; the newest step is 4"),
        ("2", "step 2 is pinned; unpin it first (torch-ckpt unpin "),
        (
            "4",
            "step 4 is the newest step, from which a run would resume; pass --force to delete it",
        ),
        ("5", "step 5 is being saved, or its save was interrupted (0000000005.tmp-0123abcd)"),
        ("3 --force", "0000000003.tmp-0123abcd"),
        ("7", "delete {root}/0000000007 by hand"),
    ],
)
def test_delete_deletes_no_step_if_it_refuses_one(
    root: Path, run: Run, arguments: str, sentence: str
) -> None:
    save_steps(root, 1, 2, 3, 4)
    LocalSteps(root).set_pinned(2, True)
    others = [leave_unfinished(root, 3), leave_unfinished(root, 5), leave_unmarked(root)]
    error = run("delete", root, "1", *arguments.split(), code=2)
    assert sentence.format(root=root) in error
    assert steps_of(root) == [1, 2, 3, 4]
    assert all((root / name).is_dir() for name in others)


@pytest.mark.parametrize("arguments", [["gc", "--keep-last", "1"], ["delete", "1", "2"]], ids=str)
def test_a_step_that_is_in_use_is_kept_which_exits_with_1(
    root: Path, run: Run, arguments: list[str]
) -> None:
    save_steps(root, 1, 2, 3)
    with closing(OpenDirectory(root / "0000000002")) as loading:
        assert loading.share()
        report = run.json(arguments[0], root, *arguments[1:], code=1)
    assert (report["deleted"], report["busy"]) == ([1], [2])
    assert steps_of(root) == [2, 3]


def test_pin_and_unpin_print_the_steps_and_pin_all_or_none(root: Path, run: Run) -> None:
    save_steps(root, 1, 2, 3)
    assert "there is no complete step 4" in run("pin", root, "1", "4", code=2)
    assert not LocalSteps(root).is_pinned(1)
    assert run("pin", root, "1", "2").splitlines() == ["pinned: 1", "pinned: 2"]
    assert run.json("unpin", root, "2")["unpinned"] == [2]
    pinned = {entry.step: entry.pinned for entry in LocalSteps(root).entries()}
    assert pinned == {1: True, 2: False, 3: False}


# --- roots at URLs -------------------------------------------------------------------------------


def test_a_dry_run_below_a_url_lists_unmarked_steps_as_to_be_swept(run: Run) -> None:
    store = ObjectSteps("memory://test_dry_run")
    store._store.put("0000000007/.metadata", [memoryview(b"x")], 1)
    report = run.json("gc", store.root, "--sweep", "--dry-run")
    assert (report["swept"], report["left"]) == (["0000000007"], [])
    # It is younger than an hour.
    report = run.json("gc", store.root, "--sweep")
    assert (report["swept"], report["left"]) == ([], ["0000000007"])


def test_steps_and_gc_work_on_remote_roots(run: Run) -> None:
    root = "memory://test_cli_steps"
    store = open_steps(root)
    for step in (1, 2):
        state, marker = {"t": torch.ones(100)}, {"metrics": {"loss": 1.0}}
        support.save_step(store, step, state, marker=lambda m=marker: m)
    assert [step["step"] for step in run.json("steps", root)["steps"]] == [1, 2]
    run("pin", root, "1")
    assert "is pinned" in run("delete", root, "1", code=2)
    run("unpin", root, "1")
    assert run.json("gc", root, "--keep-last", "1")["deleted"] == [1]
    assert [step["step"] for step in run.json("steps", root)["steps"]] == [2]
