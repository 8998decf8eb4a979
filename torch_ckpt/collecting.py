"""What ``torch-ckpt steps`` and ``torch-ckpt gc`` do: list the steps of a run, and delete some."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt.errors import CheckpointError
from torch_ckpt.retention import Retention
from torch_ckpt.steps import MARKER_NAME, StepInfo, StepStore
from torch_ckpt.text import duration, plural, printable, size, table


@dataclass
class GcReport:
    """What :func:`collect` did, or would do.

    Attributes:
        root: of the steps.
        dry_run: whether nothing was done.
        kept: steps that stay, ascending, and why.
        deleted: steps that went, or would go.
        busy: steps that were to go and are being loaded or saved.
        swept: names of leftovers that went, or would be looked at.
        left: leftovers that a sweep leaves alone.
    """

    root: str
    dry_run: bool
    kept: dict[int, list[str]] = field(default_factory=dict)
    deleted: list[StepInfo] = field(default_factory=list)
    busy: list[StepInfo] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    left: list[StepInfo] = field(default_factory=list)

    @property
    def found_nothing(self) -> bool:
        """Whether there was nothing that the rules, or the sweep, are about."""
        return not (self.kept or self.deleted or self.busy or self.swept or self.left)

    @property
    def freed_bytes(self) -> int:
        """Of the steps that went, or would go."""
        return sum(step.bytes for step in self.deleted)

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
        yield printable(
            f"{self.root}: {plural(len(self.kept), 'step')} kept, {len(self.deleted)} {would}"
            f"deleted, {size(self.freed_bytes)} {would}freed"
        )

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
    reasons = retention.reasons(entries)
    report.kept = {step: why for step, why in reasons.items() if why}
    for entry in entries:
        if not entry.complete or reasons[entry.step]:
            continue
        # Those before may have taken long, and somebody may want to keep this one now.
        if not dry_run and store.is_pinned(entry.step):
            report.kept[entry.step] = ["pinned"]
            continue
        has_gone = dry_run or store.delete(entry.step)
        (report.deleted if has_gone else report.busy).append(entry)
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
    steps = [_finite(asdict(entry)) for entry in entries]
    return {"root": root, "steps": steps}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
