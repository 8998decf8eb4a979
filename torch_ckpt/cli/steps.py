"""What ``torch-ckpt steps``, ``gc``, ``delete``, ``pin`` and ``unpin`` do with a run's steps."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.utils._pytree as pytree

from torch_ckpt._base.formatting import duration, plural, printable, size, table
from torch_ckpt.errors import CheckpointError
from torch_ckpt.manager.retention import Retention
from torch_ckpt.steps import MARKER_NAME, StepInfo, StepStore


@dataclass
class GcReport:
    """What :func:`collect` or :func:`delete` did, or would do.

    Attributes:
        root: of the steps.
        dry_run: whether nothing was done.
        kept: steps that stay, ascending, and why.
        deleted: steps that went, or would go.
        busy: steps that were to go and are being loaded or saved.
        swept: names of leftovers that went, or would be looked at.
        left: leftovers that a sweep leaves alone.
        freed_files: how many files of steps and leftovers went, or would go.
        freed_bytes: of these files.
    """

    root: str
    dry_run: bool
    kept: dict[int, list[str]] = field(default_factory=dict)
    deleted: list[StepInfo] = field(default_factory=list)
    busy: list[StepInfo] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    left: list[StepInfo] = field(default_factory=list)
    freed_files: int = 0
    freed_bytes: int = 0

    @property
    def found_nothing(self) -> bool:
        """Whether there was nothing that the rules, or the sweep, are about."""
        return not (self.kept or self.deleted or self.busy or self.swept or self.left)

    def add_freed(self, contents: tuple[int, int]) -> None:
        """Counts what a directory held, in files and bytes."""
        self.freed_files += contents[0]
        self.freed_bytes += contents[1]

    def lines(self) -> Iterator[str]:
        """The whole report for people, with escaped names; the last line says what it comes to."""
        would = "would be " if self.dry_run else ""
        for number, reasons in self.kept.items():
            yield printable(f"kept: {number} ({', '.join(reasons)})")
        for step in self.deleted:
            yield f"{would}deleted: {step.step} ({size(step.bytes)})"
        for step in self.busy:
            yield f"in use: {step.step}; try again when nobody loads or saves it"
        for name in self.swept:
            done = "that would be looked at" if self.dry_run else "removed"
            yield printable(f"leftover {done}: {name}")
        for entry in self.left:
            why = f"there is no {MARKER_NAME}" if entry.lacks_marker else "in use, or not removable"
            yield printable(f"left alone: {entry.name} ({why})")
        parts = [
            *([f"{plural(len(self.kept), 'step')} kept"] if self.kept else []),
            f"{plural(len(self.deleted), 'step')} {would}deleted",
            *([f"{plural(len(self.swept), 'leftover')} {would}removed"] if self.swept else []),
            f"{plural(self.freed_files, 'file')} and {size(self.freed_bytes)} {would}freed",
        ]
        yield printable(f"{self.root}: {', '.join(parts)}")

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "root": self.root,
            "dry_run": self.dry_run,
            "kept": [{"step": step, "reasons": reasons} for step, reasons in self.kept.items()],
            "deleted": [step.step for step in self.deleted],
            "busy": [step.step for step in self.busy],
            "swept": self.swept,
            "left": [entry.name for entry in self.left],
            "freed_files": self.freed_files,
            "freed_bytes": self.freed_bytes,
        }


def collect(
    store: StepStore, retention: Retention, *, sweep: bool = False, dry_run: bool = False
) -> GcReport:
    """Deletes the complete steps that no rule keeps; the newest one and pinned ones stay.

    Args:
        store: where the steps are.
        retention: the rules. Without one all steps stay.
        sweep: end what crashes have interrupted, too: see :meth:`StepStore.sweep`.
        dry_run: only say what would happen.

    Raises:
        OSError: the root cannot be listed, or something in it not be deleted.
        CheckpointError: none of the steps has the metric by which the best are kept. Nothing has
            been done then.
    """
    _require_metric(store, retention)
    report = GcReport(store.root, dry_run)
    contents: dict[str, tuple[int, int]] = {}
    if sweep:
        leftovers = [entry.name for entry in store.entries() if not entry.complete]
        contents = {name: store.contents(name) for name in leftovers}
    if sweep and not dry_run:
        # It may complete a step, which then counts.
        report.swept = store.sweep()
    entries = store.entries()
    if sweep:
        report.left = [entry for entry in entries if not entry.complete]
    if sweep and dry_run:
        stays = not store.sweeps_what_lacks_markers
        looked_at = [entry for entry in report.left if not (stays and entry.lacks_marker)]
        report.swept = [entry.name for entry in looked_at]
        report.left = [entry for entry in report.left if entry not in looked_at]
    for name in report.swept:
        # One that somebody has left since the look is not counted.
        report.add_freed(contents.get(name, (0, 0)))
    reasons = retention.reasons(entries)
    report.kept = {step: why for step, why in reasons.items() if why}
    for entry in entries:
        if not entry.complete or reasons[entry.step]:
            continue
        # Those before may have taken long, and somebody may want to keep this one now.
        if not dry_run and store.is_pinned(entry.step):
            report.kept[entry.step] = ["pinned"]
            continue
        _delete(store, entry, report)
    report.kept = dict(sorted(report.kept.items()))
    return report


def _require_metric(store: StepStore, retention: Retention) -> None:
    if retention.keep_best is None:
        return
    metrics = [entry.metrics for entry in store.entries(leftovers=False)]
    everything = {name: value for each in metrics for name, value in each.items()}
    problem = retention.lacks_metric(everything, metrics) if metrics else ""
    if problem:
        raise CheckpointError(f"{store.root}: {problem}")


def delete(store: StepStore, steps: Sequence[int], *, force: bool = False) -> GcReport:
    """Deletes steps by their numbers: all of them, but for those in use, or none.

    Args:
        store: where the steps are.
        steps: their numbers.
        force: delete the newest step, too, from which a run would go on.

    Returns:
        What went, and in ``busy`` what somebody is loading or saving.

    Raises:
        FileNotFoundError: one of them is not there, or is not complete.
        CheckpointError: one of them is pinned, is being saved again, or is the newest one and
            ``force`` is False.
        OSError: the root cannot be listed, or something in it not be deleted.
    """
    entries = store.entries()
    complete = {entry.step: entry for entry in entries if entry.complete}
    unfinished = {entry.step: entry for entry in entries if entry.state == "unfinished"}
    chosen = sorted(set(steps))
    for step in chosen:
        where = f"{store.root}: step {step}"
        if step in unfinished:
            raise CheckpointError(f"{where}{_about_unfinished(store, unfinished[step])}")
        _require(store, complete, step)
        if complete[step].pinned:
            raise CheckpointError(f"{where} is pinned: torch-ckpt unpin releases it")
        if step == max(complete) and not force:
            raise CheckpointError(
                f"{where} is the newest one, from which a run would go on: --force deletes it"
            )
    report = GcReport(store.root, dry_run=False)
    for step in chosen:
        _delete(store, complete[step], report)
    return report


def set_pinned(store: StepStore, steps: Sequence[int], pinned: bool) -> None:
    """Pins steps, which retention then leaves alone, or releases them: all or none.

    Raises:
        FileNotFoundError: one of them is not there, or is not complete.
        OSError: the root cannot be listed or written to.
    """
    complete = {entry.step: entry for entry in store.entries(leftovers=False)}
    for step in steps:
        _require(store, complete, step)
    for step in steps:
        store.set_pinned(step, pinned)


def _about_unfinished(store: StepStore, entry: StepInfo) -> str:
    if entry.lacks_marker and not store.sweeps_what_lacks_markers:
        return f" has no {MARKER_NAME}: no manager has saved it, so remove {entry.path} by hand"
    return (
        f" is being saved, or a save of it did not end: {entry.name}; torch-ckpt gc --sweep "
        "removes it where nobody saves there"
    )


def _require(store: StepStore, complete: dict[int, StepInfo], step: int) -> None:
    if step not in complete:
        newest = f"; the newest one is {max(complete)}" if complete else ""
        raise FileNotFoundError(
            errno.ENOENT, f"there is no complete step {step}{newest}", store.root
        )


def _delete(store: StepStore, entry: StepInfo, report: GcReport) -> None:
    contents = store.contents(entry.name)
    if report.dry_run or store.delete(entry.step):
        report.deleted.append(entry)
        report.add_freed(contents)
    else:
        report.busy.append(entry)


def step_lines(entries: Iterable[StepInfo], now: float | None = None) -> Iterator[str]:
    """One line for each step, below a header, then leftovers by name.

    Args:
        now: seconds since 1970, for the ages; None: the clock's.
    """
    now = time.time() if now is None else now
    entries = list(entries)
    complete = [entry for entry in entries if entry.complete]
    if complete:
        rows = [
            (
                str(entry.step),
                size(entry.bytes),
                "-" if entry.saved_at is None else duration(now - entry.saved_at),
                "yes" if entry.pinned else "-",
                printable(", ".join(f"{n}={v:.6g}" for n, v in entry.metrics.items())) or "-",
            )
            for entry in complete
        ]
        header = ("STEP", "SIZE", "AGE", "PINNED", "METRICS")
        yield from table(header, rows, right=frozenset({"STEP", "SIZE", "AGE"}))
        yield ""
    for entry in entries:
        if not entry.complete:
            yield printable(f"{entry.state}: {entry.name} ({size(entry.bytes)})")
    total = sum(entry.bytes for entry in entries)
    left = len(entries) - len(complete)
    leftovers = f", {plural(left, 'leftover')}" if left else ""
    yield f"total: {plural(len(complete), 'complete step')}{leftovers}, {size(total)}"


def steps_document(root: str, entries: Iterable[StepInfo]) -> dict[str, Any]:
    """All of it, for JSON, which has no infinity: that is a string there."""
    steps = [pytree.tree_map(_finite, asdict(entry)) for entry in entries]
    return {"root": root, "steps": steps}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
