"""Implements ``torch-ckpt steps``, ``gc``, ``delete``, ``pin`` and ``unpin``."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt._base.formatting import Block, Report, Table, duration, plural, printable, size
from torch_ckpt._base.progress import Progress
from torch_ckpt.checkpoint.lineage import by_lineage, describe_mixture, newest_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.steps import MARKER_NAME, StepInfo, StepStore
from torch_ckpt.steps.retention import Retention
from torch_ckpt.steps.step_store import info_of

_OnProgress = Callable[[Progress], None] | None


@dataclass
class GcReport(Report):
    """The outcome of :func:`collect` or :func:`delete`, or of a dry run.

    In a dry run, ``deleted``, ``freed_files`` and ``freed_bytes`` describe what would be deleted.
    """

    root: str  # directory or URL
    dry_run: bool  # True if nothing was deleted
    # The reasons for keeping each step, by ascending step number.
    kept: dict[int, list[str]] = field(default_factory=dict)
    deleted: list[StepInfo] = field(default_factory=list)
    # Steps that were not deleted because a process is loading or saving them.
    busy: list[StepInfo] = field(default_factory=list)
    # Names of leftovers that were deleted or, in a dry run, would be examined.
    swept: list[str] = field(default_factory=list)
    left: list[StepInfo] = field(default_factory=list)  # leftovers that the sweep did not delete
    freed_files: int = 0
    freed_bytes: int = 0

    @property
    def found_nothing(self) -> bool:
        """True if there were no steps and, for a sweep, no leftovers."""
        return not (self.kept or self.deleted or self.busy or self.swept or self.left)

    def add_freed(self, contents: tuple[int, int]) -> None:
        """Counts the files and bytes of a deleted directory."""
        self.freed_files += contents[0]
        self.freed_bytes += contents[1]

    def lines(self) -> Iterator[str]:
        """Yields the report as text, with escaped names; the last line has the totals."""
        would = "would be " if self.dry_run else ""
        for number, reasons in self.kept.items():
            yield printable(f"kept: {number} ({', '.join(reasons)})")
        for step in self.deleted:
            yield f"{would}deleted: {step.step} ({size(step.bytes)})"
        for step in self.busy:
            yield f"in use: {step.step}; try again when no process is loading or saving it"
        for name in self.swept:
            outcome = "that would be examined" if self.dry_run else "removed"
            yield printable(f"leftover {outcome}: {name}")
        for entry in self.left:
            why = (
                f"it has no {MARKER_NAME} file"
                if entry.lacks_marker
                else "in use, or it could not be removed"
            )
            yield printable(f"not removed: {entry.name} ({why})")
        parts = [
            *([f"{plural(len(self.kept), 'step')} kept"] if self.kept else []),
            f"{plural(len(self.deleted), 'step')} {would}deleted",
            *([f"{plural(len(self.swept), 'leftover')} {would}removed"] if self.swept else []),
            f"{plural(self.freed_files, 'file')} and {size(self.freed_bytes)} {would}freed",
        ]
        yield printable(f"{self.root}: {', '.join(parts)}")

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        return {
            **vars(self),
            "kept": [{"step": step, "reasons": reasons} for step, reasons in self.kept.items()],
            "deleted": [step.step for step in self.deleted],
            "busy": [step.step for step in self.busy],
            "left": [entry.name for entry in self.left],
        }


def collect(
    store: StepStore,
    retention: Retention,
    *,
    sweep: bool = False,
    dry_run: bool = False,
    progress: _OnProgress = None,
) -> GcReport:
    """Deletes the complete steps that no rule keeps, but never the newest step or a pinned one.

    Args:
        store: the steps.
        retention: the rules. Without any rule, every step is kept.
        sweep: also delete leftovers of crashes; see :meth:`StepStore.sweep`.
        dry_run: report what would be deleted, but delete nothing.
        progress: called after each step.

    Raises:
        OSError: the root cannot be listed, or something below it cannot be deleted.
        CheckpointError: no step has the metric by which the best steps are kept. Nothing is
            deleted in this case.
    """
    _require_metric(store, retention)
    report = GcReport(store.root, dry_run)
    contents: dict[str, tuple[int, int]] = {}
    if sweep:
        leftovers = [entry.name for entry in store.entries() if not entry.complete]
        contents = {name: store.contents(name) for name in leftovers}
    if sweep and not dry_run:
        # A sweep may complete a step. List the steps afterwards, so that the rules apply to it.
        report.swept = store.sweep()
    entries = store.entries()
    if sweep:
        report.left = [entry for entry in entries if not entry.complete]
    if sweep and dry_run:
        keeps_unmarked = not store.sweeps_what_lacks_markers
        examined = [entry for entry in report.left if not (keeps_unmarked and entry.lacks_marker)]
        report.swept = [entry.name for entry in examined]
        report.left = [entry for entry in report.left if entry not in examined]
    for name in report.swept:
        # A leftover that appeared after the listing has unknown contents.
        report.add_freed(contents.get(name, (0, 0)))
    reasons = retention.reasons(entries)
    report.kept = {step: why for step, why in reasons.items() if why}
    doomed = [entry for entry in entries if entry.complete and not reasons[entry.step]]
    for entry in _show_progress(doomed, progress):
        # A user may have pinned this step during the earlier deletions.
        if not dry_run and store.is_pinned(entry.step):
            report.kept[entry.step] = ["pinned"]
        else:
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


def delete(
    store: StepStore, steps: Sequence[int], *, force: bool = False, progress: _OnProgress = None
) -> GcReport:
    """Deletes steps by number: all of them except those in use, or none if one is refused.

    Args:
        store: the steps.
        steps: numbers of the steps to delete.
        force: also delete the newest step, from which a run would resume.
        progress: called after each step.

    Returns:
        The deleted steps and, in ``busy``, the steps that a process is loading or saving.

    Raises:
        FileNotFoundError: one of the steps does not exist or is not complete.
        CheckpointError: one of the steps is pinned, is being saved again, or is the newest one and
            ``force`` is False.
        OSError: the root cannot be listed, or something below it cannot be deleted.
    """
    entries = store.entries()
    complete = {entry.step: entry for entry in entries if entry.complete}
    unfinished = {entry.step: entry for entry in entries if entry.state == "unfinished"}
    newest = newest_of(complete.values())
    chosen = sorted(set(steps))
    for step in chosen:
        where = f"{store.root}: step {step}"
        if step in unfinished:
            raise CheckpointError(f"{where} {_explain_unfinished(store, unfinished[step])}")
        _require_complete(store, complete, step)
        if complete[step].pinned:
            raise CheckpointError(
                f"{where} is pinned; unpin it first (torch-ckpt unpin {store.root} {step})"
            )
        if complete[step] is newest and not force:
            raise CheckpointError(
                f"{where} is the newest step, from which a run would resume; pass --force to "
                "delete it"
            )
    report = GcReport(store.root, dry_run=False)
    for entry in _show_progress([complete[step] for step in chosen], progress):
        _delete(store, entry, report)
    return report


def set_pinned(store: StepStore, steps: Sequence[int], pinned: bool) -> None:
    """Pins or unpins steps: all of them, or none if one does not exist.

    Raises:
        FileNotFoundError: one of the steps does not exist or is not complete.
        OSError: the root cannot be listed or written to.
    """
    complete = {entry.step: entry for entry in store.entries(leftovers=False)}
    for step in steps:
        _require_complete(store, complete, step)
    for step in steps:
        store.set_pinned(step, pinned)


def _explain_unfinished(store: StepStore, entry: StepInfo) -> str:
    if entry.lacks_marker and not store.sweeps_what_lacks_markers:
        return (
            f"has no {MARKER_NAME} file, so no manager saved it; if you do not need it, delete "
            f"{entry.path} by hand"
        )
    return (
        f"is being saved, or its save was interrupted ({entry.name}); if no process is saving it, "
        f"delete it with torch-ckpt gc --sweep {store.root}"
    )


def _require_complete(store: StepStore, complete: dict[int, StepInfo], step: int) -> None:
    if step not in complete:
        newest = newest_of(complete.values())
        hint = f"; the newest step is {newest.step}" if newest is not None else ""
        raise FileNotFoundError(errno.ENOENT, f"there is no complete step {step}{hint}", store.root)


def _show_progress(entries: Sequence[StepInfo], progress: _OnProgress) -> Iterator[StepInfo]:
    """Yields the steps; counts the bytes of a step as done when the next step is requested."""
    total = sum(entry.bytes for entry in entries)
    done = 0
    for entry in entries:
        yield entry
        done += entry.bytes
        if progress is not None:
            progress(Progress(total, 0, done))


def _delete(store: StepStore, entry: StepInfo, report: GcReport) -> None:
    contents = store.contents(entry.name)
    if report.dry_run or (_is_as_listed(store, entry) and store.delete(entry.step)):
        report.deleted.append(entry)
        report.add_freed(contents)
    else:
        report.busy.append(entry)


@dataclass
class StepListing(Report):
    """The steps and leftovers in a root directory or URL."""

    root: str
    steps: list[StepInfo]

    def blocks(self, now: float | None = None) -> Iterator[Block]:
        """Yields a table of the complete steps, a line for each leftover, a warning if the steps of
        several runs are mixed, and the totals.

        Args:
            now: the current time as a Unix timestamp, for the ages; None reads the clock.
        """
        now = time.time() if now is None else now
        complete = [entry for entry in self.steps if entry.complete]
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
            yield Table(header, rows, right=frozenset({"STEP", "SIZE", "AGE"}))
            yield ""
        for entry in self.steps:
            if not entry.complete:
                yield printable(f"{entry.state}: {entry.name} ({size(entry.bytes)})")
        mixture = describe_mixture(*by_lineage(complete))
        if mixture:
            yield printable(f"warning: {mixture}")
        total = sum(entry.bytes for entry in self.steps)
        left = len(self.steps) - len(complete)
        leftovers = f", {plural(left, 'leftover')}" if left else ""
        yield f"total: {plural(len(complete), 'complete step')}{leftovers}, {size(total)}"


def _is_as_listed(store: StepStore, entry: StepInfo) -> bool:
    """Returns False if a run has saved the step again since the step was listed."""
    marker = store.marker_of(entry.step)
    if marker is None:
        return True  # The step has been deleted.
    found = info_of(entry.step, entry.path, marker, entry.pinned, lambda: entry.bytes)
    return (found.saved_at, found.epoch, found.run) == (entry.saved_at, entry.epoch, entry.run)
