"""The result of ``torch-ckpt doctor``, and the times of the actions that it measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt._base.formatting import Block, Report, Table, printable, size
from torch_ckpt.stores.probe import Check

_REPETITIONS = 20


@dataclass
class Diagnosis(Report):
    """The result of an examination.

    Attributes:
        path: the directory or URL.
        facts: properties of the file system or the store, and of the ranks; None if unknown.
        measured: figures. A name ends with its unit: ``_ms``, ``_s``, ``_bytes_per_second``.
        checks: the statements on which saves rely.
        options: recommended options, by class.
        lifecycle_rule: the rule to add to the bucket; None if it has such a rule, or needs none.
    """

    path: str
    facts: dict[str, Any]
    measured: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    lifecycle_rule: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True unless a check fails."""
        return all(check.state != "fails" for check in self.checks)

    def blocks(self) -> Iterator[Block]:
        """Yields a table of all results, and the recommendations."""
        rows = [_row(*item) for item in (self.facts | self.measured).items()]
        rows += [[*map(printable, check)] for check in self.checks]
        yield printable(self.path)
        yield Table(["CHECK", "STATE", "RESULT"], rows)
        for name, options in self.options.items():
            yield f"{name}(..., {', '.join(f'{key}={value!r}' for key, value in options.items())})"
        if self.lifecycle_rule is not None:
            yield f"Add this lifecycle rule to the bucket: {json.dumps(self.lifecycle_rule)}"

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        checks = [check._asdict() for check in self.checks]
        return {**asdict(self), "checks": checks, "ok": self.ok}


def _row(name: str, value: Any) -> list[str]:
    """Formats a fact or a figure, whose name ends with its unit."""
    if value is None:
        text = "unknown"
    elif name.endswith("_bytes_per_second"):
        text = f"{size(value)}/s"
    elif name.endswith("_bytes"):
        text = size(value)
    elif name.endswith(("_ms", "_s")):
        text = f"{value:.2f} {name.rpartition('_')[2]}"
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    for unit in ("_bytes_per_second", "_bytes", "_ms", "_s"):
        name = name.removesuffix(unit)
    return [name.replace("_", " "), "", printable(text)]


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the time of an action, in seconds."""
    started_at = time.perf_counter()
    action()
    return time.perf_counter() - started_at


def median_ms_of(action: Callable[[], object]) -> float:
    """Returns the median time of an action that is repeated, in milliseconds."""
    return 1000 * statistics.median(seconds_of(action) for _ in range(_REPETITIONS))
