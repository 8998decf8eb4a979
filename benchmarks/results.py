"""The result of a run, to and from JSON: raw samples, their summaries, comparisons made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .machine import Machine
from .measure import Sample
from .memory import MemorySample

FORMAT_VERSION = 1
# Fewer rounds than this say nothing on a shared disk.
REPRESENTATIVE_ROUNDS = 5


def readable_size(size: int) -> str:
    """A number of bytes in decimal units, such as '2.00 GB'."""
    return f"{size / 1e9:.2f} GB" if size >= 999_500_000 else f"{size / 1e6:.0f} MB"


@dataclass(frozen=True)
class Spread:
    """Five numbers that describe a set of measurements."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(min(values), lower, median, upper, max(values))


@dataclass(frozen=True)
class ContenderInfo:
    """How a contender is shown. `kind` is 'ours', 'stock' or 'limit'."""

    name: str
    label: str
    kind: str


@dataclass(frozen=True)
class Group:
    """Contenders that did the same work alternately."""

    name: str
    title: str
    bytes: int
    contenders: list[ContenderInfo]
    samples: list[Sample]

    def values(self, contender: str, quantity: str) -> list[float]:
        """A contender's 'wall_s' or 'cpu_s' in the order of the rounds."""
        own = sorted((s for s in self.samples if s.contender == contender), key=lambda s: s.round)
        return [float(getattr(sample, quantity)) for sample in own]

    def wall(self, contender: str) -> Spread:
        """The spread of a contender's wall seconds."""
        return spread(self.values(contender, "wall_s"))

    def cpu(self, contender: str) -> Spread:
        """The spread of a contender's CPU seconds."""
        return spread(self.values(contender, "cpu_s"))

    def fastest(self, prefix: str) -> str | None:
        """The contender with the lowest median wall time among those whose name starts so."""
        names = [info.name for info in self.contenders if info.name.startswith(prefix)]
        return min(names, key=lambda name: self.wall(name).median, default=None)

    def label(self, contender: str) -> str:
        """The label of a contender."""
        return next(info.label for info in self.contenders if info.name == contender)


@dataclass(frozen=True)
class Comparison:
    """One number per round with the target its median is held to, if any.

    `quantity` says what the numbers are: 'speed' (the baseline's wall seconds per second of ours,
    more is better), 'CPU time' (our CPU seconds per second of the baseline's, less is better) or
    'memory' (MiB, less is better, without a baseline). `ours` and `baseline` are labels, with the
    median seconds of each beside them. A headline is fit for the README.
    """

    key: str
    work: str
    quantity: str
    ours: str
    per_round: list[float]
    baseline: str | None = None
    ours_median: float | None = None
    baseline_median: float | None = None
    target: float | None = None
    headline: bool = True

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.quantity == "speed"

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.per_round)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True)
class Skipped:
    """Something that could not be measured here, and why."""

    what: str
    reason: str


@dataclass
class Results:
    """Everything one run found out."""

    machine: Machine
    parameters: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def representative(self) -> bool:
        """Whether the numbers may be quoted: enough rounds of everything at full size."""
        return (
            not self.parameters["quick"]
            and self.parameters["rounds"] >= REPRESENTATIVE_ROUNDS
            and not self.parameters["only"]
        )

    def to_json(self) -> dict[str, Any]:
        """Raw samples, and what was computed from them for readers without this module."""
        document = asdict(self)
        for group, entry in zip(self.groups, document["groups"], strict=True):
            entry["summary"] = {
                info.name: {
                    "wall_s": asdict(group.wall(info.name)),
                    "cpu_s": asdict(group.cpu(info.name)),
                    "bytes_per_s": group.bytes / group.wall(info.name).median,
                }
                for info in group.contenders
            }
        for comparison, entry in zip(self.comparisons, document["comparisons"], strict=True):
            entry |= {
                "value": comparison.value,
                "spread": asdict(spread(comparison.per_round)),
                "met": comparison.met,
            }
        for memory, entry in zip(self.memory, document["memory"], strict=True):
            entry["growth_bytes"] = memory.growth_bytes
        return {"format_version": FORMAT_VERSION, "representative": self.representative} | document

    def write(self, path: Path) -> None:
        """Writes the JSON file and the directories above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _from_fields(kind: type[Any], entry: dict[str, Any]) -> Any:
    """Makes a dataclass of the entry's fields, leaving out what was computed from them."""
    return kind(**{name: entry[name] for name in kind.__dataclass_fields__})


def read(path: Path) -> Results:
    """Reads what Results.write wrote. Summaries are computed anew from the raw samples."""
    document = json.loads(path.read_text())
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {version}, expected {FORMAT_VERSION}")
    groups = [
        Group(
            name=entry["name"],
            title=entry["title"],
            bytes=entry["bytes"],
            contenders=[_from_fields(ContenderInfo, info) for info in entry["contenders"]],
            samples=[_from_fields(Sample, sample) for sample in entry["samples"]],
        )
        for entry in document["groups"]
    ]
    return Results(
        machine=_from_fields(Machine, document["machine"]),
        parameters=document["parameters"],
        groups=groups,
        memory=[_from_fields(MemorySample, entry) for entry in document["memory"]],
        skipped=[_from_fields(Skipped, entry) for entry in document["skipped"]],
        comparisons=[_from_fields(Comparison, entry) for entry in document["comparisons"]],
    )
