"""``torch-ckpt steps``, ``gc``, ``delete``, ``pin`` and ``unpin``."""

import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_ckpt
from tests.commands import Run
from tests.fault_hooks import before
from torch_ckpt._base.formatting import duration
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.cli.steps import StepListing, collect
from torch_ckpt.retention import Retention
from torch_ckpt.steps import LocalSteps, StepInfo, open_steps
from torch_ckpt.steps.remote import RemoteSteps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save_step(root: Path, step: int, hours_ago: float = 0.0, **metrics: float) -> None:
    marker = {"saved_at": time.time() - 3600 * hours_ago, "metrics": metrics}
    writer = LocalSteps(root).writer(step, attempt="0123abcd", marker=lambda: marker)
    torch_ckpt.save({"t": torch.ones(100)}, storage_writer=writer, no_dist=True)


def leave_unfinished(root: Path, step: int) -> str:
    name = f"{step:010d}.tmp-0123abcd"
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(bytes(1000))
    return name


def steps_of(root: Path) -> list[int]:
    return [entry.step for entry in LocalSteps(root).entries() if entry.complete]


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


def test_steps_names_the_missing_package_of_a_url(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    error = run("steps", "sftp://host/run", code=2)
    assert error.startswith("torch-ckpt: sftp://host/run: ")
    assert "paramiko" in error


def test_steps_names_leftovers(root: Path, run: Run) -> None:
    save_step(root, 100)
    name = leave_unfinished(root, 200)
    lines = run("steps", root).splitlines()
    assert f"unfinished: {name} (1.0 kB)" in lines
    assert lines[-1].startswith("total: 1 complete step, 1 leftover, ")


def test_steps_prints_every_field_as_json(root: Path, run: Run) -> None:
    save_step(root, 100, loss=0.25, bad=float("nan"))
    leave_unfinished(root, 200)
    complete, unfinished = run.json("steps", root)["steps"]
    assert (complete["step"], complete["state"]) == (100, "complete")
    assert complete["metrics"] == {"loss": 0.25, "bad": "nan"}
    assert complete["bytes"] > 400
    assert (unfinished["step"], unfinished["state"], unfinished["bytes"]) == (
        200,
        "unfinished",
        1000,
    )


def test_steps_of_a_root_without_steps_exits_with_2(root: Path, run: Run) -> None:
    assert "there are no steps" in run("steps", root, code=2)


def test_names_of_metrics_are_escaped() -> None:
    entry = StepInfo(1, "/run/0000000001", "complete", metrics={"\x1b[2J": 1.0})
    assert all(line.isprintable() for line in StepListing("run", [entry]).lines())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 12.9, "12 d")],
)
def test_ages_are_written_in_the_largest_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- gc ------------------------------------------------------------------------------------------


def test_a_dry_run_lists_leftovers_as_to_be_examined(root: Path, run: Run) -> None:
    save_step(root, 1)
    name = leave_unfinished(root, 2)
    lines = run("gc", root, "--sweep", "--dry-run").splitlines()
    assert f"leftover that would be examined: {name}" in lines


def test_gc_keeps_a_step_that_is_pinned_while_others_are_deleted(root: Path) -> None:
    for step in (1, 2, 3):
        save_step(root, step)
    with before("rmtree", lambda: LocalSteps(root).set_pinned(2, True)):
        report = collect(LocalSteps(root), Retention(keep_last=1))
    assert [entry.step for entry in report.deleted] == [1]
    assert report.kept == {2: ["pinned"], 3: ["the newest", "last 1"]}
    assert steps_of(root) == [2, 3]


def test_gc_reports_the_rules_that_keep_each_step(root: Path, run: Run) -> None:
    for step in (100, 150, 200, 250, 300):
        save_step(root, step)
    LocalSteps(root).set_pinned(150, True)
    rules = ["--keep-last", "1", "--keep-every", "200"]
    report = run.json("gc", root, *rules)
    assert report["kept"] == [
        {"step": 150, "reasons": ["pinned"]},
        {"step": 200, "reasons": ["every 200 steps"]},
        {"step": 300, "reasons": ["the newest", "last 1"]},
    ]
    assert report["deleted"] == [100, 250]
    assert steps_of(root) == [150, 200, 300]


def test_gc_keeps_the_best_by_a_metric(root: Path, run: Run) -> None:
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.1)):
        save_step(root, step, accuracy=accuracy)
    rules = ["--keep-best", "2", "--metric", "accuracy", "--mode", "max"]
    run("gc", root, *rules)
    assert steps_of(root) == [2, 3, 4]


def test_gc_keeps_one_step_for_each_period(root: Path, run: Run) -> None:
    for step, hours in ((1, 10), (2, 9), (3, 7.9), (4, 7), (5, 0)):
        save_step(root, step, hours_ago=hours)
    run("gc", root, "--keep-every-hours", "2")
    assert steps_of(root) == [1, 3, 5]


def test_a_dry_run_deletes_nothing_and_prints_the_same_report(root: Path, run: Run) -> None:
    for step in (1, 2, 3):
        save_step(root, step)
    name = leave_unfinished(root, 4)
    arguments = ["gc", root, "--keep-last", "1", "--sweep"]
    before = run.json(*arguments, "--dry-run")
    assert steps_of(root) == [1, 2, 3]
    assert (root / name).is_dir()
    after = run.json(*arguments)
    assert before.pop("dry_run")
    assert not after.pop("dry_run")
    assert before == after
    assert steps_of(root) == [3]
    assert not (root / name).exists()


def files_and_bytes(directory: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for file in directory.iterdir()]
    return len(sizes), sum(sizes)


def test_gc_counts_the_files_and_bytes_that_it_frees(root: Path, run: Run) -> None:
    for step in (1, 2):
        save_step(root, step)
    freed = files_and_bytes(root / "0000000001")
    report = run.json("gc", root, "--keep-last", "1")
    assert (report["freed_files"], report["freed_bytes"]) == freed
    assert steps_of(root) == [2]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry run"])
def test_a_sweep_counts_the_files_and_bytes_that_it_frees(
    root: Path, run: Run, dry: list[str]
) -> None:
    save_step(root, 1)
    name = leave_unfinished(root, 2)
    (root / name / "__1_0.distcp").write_bytes(bytes(500))
    last = run("gc", root, "--sweep", *dry).splitlines()[-1]
    would = "would be " if dry else ""
    assert last == (
        f"{root}: 1 step kept, 0 steps {would}deleted, 1 leftover {would}removed, "
        f"2 files and 1.5 kB {would}freed"
    )


# --- delete, pin, unpin --------------------------------------------------------------------------


def test_delete_deletes_the_given_steps_and_counts_their_files(root: Path, run: Run) -> None:
    for step in (1, 2, 3, 4):
        save_step(root, step)
    (files, size), (others, other_size) = (
        files_and_bytes(root / f"{step:010d}") for step in (1, 3)
    )
    report = run.json("delete", root, "3", "1")
    assert report["deleted"] == [1, 3]
    assert (report["freed_files"], report["freed_bytes"]) == (files + others, size + other_size)
    assert steps_of(root) == [2, 4]


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (9, "there is no complete step 9; the newest step is 3"),
        (2, "step 2 is pinned; unpin it first (torch-ckpt unpin "),
        (3, "step 3 is the newest step, from which a run would resume; pass --force to delete it"),
        (5, "step 5 is being saved, or its save was interrupted (0000000005.tmp-0123abcd)"),
    ],
)
def test_delete_deletes_no_step_if_it_refuses_one(
    root: Path, run: Run, step: int, sentence: str
) -> None:
    for number in (1, 2, 3):
        save_step(root, number)
    leave_unfinished(root, 5)
    LocalSteps(root).set_pinned(2, True)
    assert sentence in run("delete", root, "1", str(step), code=2)
    assert steps_of(root) == [1, 2, 3]


def test_delete_refuses_a_step_that_is_being_saved_again(root: Path, run: Run) -> None:
    save_step(root, 1)
    name = leave_unfinished(root, 1)
    assert name in run("delete", root, "1", "--force", code=2)
    assert steps_of(root) == [1]
    assert (root / name).is_dir()


def test_delete_refuses_a_checkpoint_that_no_manager_saved(root: Path, run: Run) -> None:
    name = leave_unmarked(root)
    assert f"delete {root / name} by hand" in run("delete", root, "7", code=2)
    assert (root / name / ".metadata").exists()


def test_delete_deletes_the_newest_step_with_force(root: Path, run: Run) -> None:
    save_step(root, 1)
    save_step(root, 2)
    run("delete", root, "2", "--force")
    assert steps_of(root) == [1]


def test_delete_keeps_a_step_that_is_in_use(root: Path, run: Run) -> None:
    for step in (1, 2, 3):
        save_step(root, step)
    with closing(OpenDirectory(root / "0000000001")) as loading:
        assert loading.share()
        report = run.json("delete", root, "1", "2", code=1)
    assert (report["deleted"], report["busy"]) == ([2], [1])
    assert steps_of(root) == [1, 3]


def test_pin_and_unpin_print_the_steps(root: Path, run: Run) -> None:
    for step in (1, 2, 3):
        save_step(root, step)
    assert run("pin", root, "1", "2").splitlines() == ["pinned: 1", "pinned: 2"]
    assert run.json("unpin", root, "2")["unpinned"] == [2]
    pinned = {entry.step: entry.pinned for entry in LocalSteps(root).entries()}
    assert pinned == {1: True, 2: False, 3: False}


def test_pin_pins_no_step_if_one_does_not_exist(root: Path, run: Run) -> None:
    save_step(root, 1)
    assert "there is no complete step 2" in run("pin", root, "1", "2", code=2)
    assert not LocalSteps(root).is_pinned(1)


# --- gc: refusals --------------------------------------------------------------------------------


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
    save_step(root, 1)
    save_step(root, 2)
    assert error in run("gc", root, *rules, code=2)
    assert steps_of(root) == [1, 2]


@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=["dry", "real"])
def test_gc_suggests_a_metric_for_one_that_no_step_has(
    root: Path, dry_run: list[str], run: Run
) -> None:
    for step in range(1, 7):
        save_step(root, step, eval_loss=float(step))
    left = leave_unfinished(root, 7)
    rules = ["--keep-best", "2", "--metric", "evalloss", "--keep-last", "1", "--sweep"]
    text = run("gc", root, *rules, *dry_run, code=2)
    assert "the metric 'evalloss', which keep_best compares, is missing" in text
    assert "did you mean 'eval_loss'?" in text
    assert steps_of(root) == [1, 2, 3, 4, 5, 6]
    assert (root / left).exists()


def test_gc_keeps_a_step_that_is_in_use_and_exits_with_1(root: Path, run: Run) -> None:
    for step in (1, 2, 3):
        save_step(root, step)
    loading = OpenDirectory(root / "0000000002")
    assert loading.share()
    report = run.json("gc", root, "--keep-last", "1", code=1)
    loading.close()
    assert (report["deleted"], report["busy"]) == ([1], [2])
    assert steps_of(root) == [2, 3]


def test_gc_without_sweep_keeps_leftovers(root: Path, run: Run) -> None:
    save_step(root, 1)
    name = leave_unfinished(root, 2)
    run("gc", root, "--keep-last", "1")
    assert (root / name).is_dir()


def test_a_sweep_without_rules_deletes_no_step(root: Path, run: Run) -> None:
    save_step(root, 1)
    save_step(root, 2)
    name = leave_unfinished(root, 3)
    report = run.json("gc", root, "--sweep")
    assert (report["swept"], report["deleted"]) == ([name], [])
    assert steps_of(root) == [1, 2]


@pytest.mark.parametrize("arguments", [["--keep-last", "1"], ["--sweep"]], ids=" ".join)
def test_gc_of_a_missing_root_exits_with_2(root: Path, run: Run, arguments: list[str]) -> None:
    assert f"{root}: there are no steps" in run("gc", root, *arguments, code=2)
    assert not root.exists()


def test_gc_of_a_root_with_only_leftovers_exits_with_2_without_sweep(root: Path, run: Run) -> None:
    name = leave_unfinished(root, 1)
    assert "there are no steps" in run("gc", root, "--keep-last", "1", code=2)
    assert f"leftover removed: {name}" in run("gc", root, "--sweep")


def leave_unmarked(root: Path) -> str:
    name = "0000000007"
    torch_ckpt.save({"t": torch.ones(100)}, root / name, no_dist=True)
    return name


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry run"])
def test_a_sweep_keeps_and_names_a_checkpoint_without_a_marker(
    root: Path, run: Run, dry: list[str]
) -> None:
    name = leave_unmarked(root)
    lines = run("gc", root, "--sweep", *dry).splitlines()
    assert f"not removed: {name} (it has no write_completed file)" in lines
    assert (root / name / ".metadata").exists()


def test_a_sweep_names_a_leftover_in_use(root: Path, run: Run) -> None:
    name = leave_unfinished(root, 2)
    saving = OpenDirectory(root / name)
    assert saving.share()
    report = run.json("gc", root, "--sweep")
    saving.close()
    assert (report["swept"], report["left"]) == ([], [name])


def test_a_dry_run_below_a_url_lists_unmarked_steps_as_to_be_swept(
    run: Run,
) -> None:
    store = RemoteSteps("memory://test_dry_run")
    store._files.write("0000000007/.metadata", b"x")
    report = run.json("gc", store.root, "--sweep", "--dry-run")
    assert (report["swept"], report["left"]) == (["0000000007"], [])
    # It is younger than an hour.
    report = run.json("gc", store.root, "--sweep")
    assert (report["swept"], report["left"]) == ([], ["0000000007"])


def test_steps_and_gc_work_on_remote_roots(run: Run) -> None:
    root = "memory://test_cli_steps"
    store = open_steps(root)
    for step in (1, 2):
        writer = store.writer(step, attempt="0123abcd", marker=lambda: {"metrics": {"loss": 1.0}})
        torch_ckpt.save({"t": torch.ones(100)}, storage_writer=writer, no_dist=True)
    assert [step["step"] for step in run.json("steps", root)["steps"]] == [1, 2]
    run("pin", root, "1")
    assert "is pinned" in run("delete", root, "1", code=2)
    run("unpin", root, "1")
    assert run.json("gc", root, "--keep-last", "1")["deleted"] == [1]
    assert [step["step"] for step in run.json("steps", root)["steps"]] == [2]


def test_steps_refuses_an_unknown_url_scheme(run: Run) -> None:
    assert "nosuch" in run("steps", "nosuch://run", code=2)


class Memory(LocalSteps):
    """Steps without files, each of which can be deleted."""

    def __init__(self, steps: list[int]) -> None:
        super().__init__("/nowhere")
        self.steps = steps

    def entries(self) -> list[StepInfo]:
        return [StepInfo(step, self.path_of(step), "complete", bytes=step) for step in self.steps]

    def contents(self, name: str) -> tuple[int, int]:
        return 1, int(name)

    def delete(self, step: int) -> bool:
        self.steps.remove(step)
        return True


@given(
    steps=st.lists(st.integers(0, 1000), unique=True).map(sorted),
    last=st.integers(1, 5),
    every=st.integers(1, 50),
)
def test_every_step_is_either_kept_or_deleted(steps: list[int], last: int, every: int) -> None:
    store = Memory(list(steps))
    report = collect(store, Retention(keep_last=last, keep_every=every))
    gone = [entry.step for entry in report.deleted]
    assert sorted([*report.kept, *gone]) == steps
    assert store.steps == list(report.kept)
    assert steps[-last:] == [step for step in report.kept if step in steps[-last:]]
    assert (report.freed_files, report.freed_bytes) == (len(gone), sum(gone))
