"""The result of a run, to and from JSON: raw samples, their summaries, and comparisons."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .background import BackgroundSample, Trace
from .machine import Machine
from .measure import CallSample, ReadSample, Sample
from .memory import MemorySample
from .queue_saves import QueueSample, QueueSave

FORMAT_VERSION = 1

#: The groups of docs/benchmarks.md, as arguments of `--only`; other pages show other groups.
HEADLINE_GROUPS = frozenset({"save", "load", "partial", "small", "memory"})

# With fewer rounds, medians on a shared disk mean nothing.
REPRESENTATIVE_ROUNDS = 5
_NUMBER_LISTS = re.compile(r"\[[\[\]\s\d.,eE+-]*\]")


def readable_size(size: int) -> str:
    """Formats a number of bytes in decimal units, such as '2.00 GB'."""
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
    """Computes the spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(min(values), lower, median, upper, max(values))


@dataclass(frozen=True)
class ContenderInfo:
    """A contender's name, label and kind: 'ours', 'stock', 'peer' or 'limit'."""

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

    @property
    def background(self) -> bool:
        """True if the samples are background saves."""
        return isinstance(self.samples[0], BackgroundSample)

    @property
    def queued(self) -> bool:
        """True if the samples are saves through a queue."""
        return isinstance(self.samples[0], QueueSample)

    @property
    def of_calls(self) -> bool:
        """True if each sample has many calls."""
        return isinstance(self.samples[0], CallSample)

    @property
    def counts_reads(self) -> bool:
        """True if the samples are loads that counted the bytes read."""
        return isinstance(self.samples[0], ReadSample)

    def has(self, contender: str) -> bool:
        """Returns True if the contender was measured."""
        return any(info.name == contender for info in self.contenders)

    def background_samples(self, contender: str) -> list[BackgroundSample]:
        """Returns a contender's background saves in the order of the rounds."""
        own = [
            sample
            for sample in self.samples
            if isinstance(sample, BackgroundSample) and sample.contender == contender
        ]
        return sorted(own, key=lambda sample: sample.round)

    def queue_samples(self, contender: str) -> list[QueueSample]:
        """Returns a contender's saves through a queue in the order of the rounds."""
        own = [
            sample
            for sample in self.samples
            if isinstance(sample, QueueSample) and sample.contender == contender
        ]
        return sorted(own, key=lambda sample: sample.round)

    def values(self, contender: str, quantity: str) -> list[float]:
        """Returns a field of a contender's samples, such as 'wall_s', in the order of the rounds.

        Omits None, for example a ratio of steps in a sample without steps.
        """
        own = sorted((s for s in self.samples if s.contender == contender), key=lambda s: s.round)
        values = [getattr(sample, quantity) for sample in own]
        return [float(value) for value in values if value is not None]

    def wall(self, contender: str) -> Spread:
        """Computes the spread of a contender's wall seconds."""
        return spread(self.values(contender, "wall_s"))

    def cpu(self, contender: str) -> Spread:
        """Computes the spread of a contender's CPU seconds."""
        return spread(self.values(contender, "cpu_s"))

    def read_per_wanted(self, contender: str) -> list[float]:
        """Returns the bytes read per byte loaded. Only for groups that count reads."""
        pairs = zip(
            self.values(contender, "read_bytes"), self.values(contender, "bytes"), strict=True
        )
        return [read / wanted for read, wanted in pairs]

    def fastest(self, prefix: str) -> str | None:
        """Returns the contender of lowest median wall time whose name starts with `prefix`."""
        names = [info.name for info in self.contenders if info.name.startswith(prefix)]
        return min(names, key=lambda name: self.wall(name).median, default=None)

    def label(self, contender: str) -> str:
        """Returns the label of a contender."""
        return next(info.label for info in self.contenders if info.name == contender)


@dataclass(frozen=True)
class Comparison:
    """One number per round, and the target of their median, if any.

    `quantity` defines the number:

    - 'speed', 'staging speed': the baseline's seconds divided by ours. More is better only here.
    - 'bytes read': per byte wanted.
    - 'memory': MiB. 'time in the call', 'time per GB': milliseconds. These have no baseline.
    - 'added time': our milliseconds minus the baseline's.
    - 'step time': a step during a save divided by a step without a save.
    - all others, such as 'CPU time', 'stall', 'time until durable': our seconds divided by the
      baseline's.

    `ours` and `baseline` are labels; `ours_median` and `baseline_median` are their median seconds.
    docs/benchmarks.md shows the comparisons with `headline`.
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
        """True if more is better."""
        return self.quantity in ("speed", "staging speed")

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.per_round)

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True)
class Crossover:
    """The number of ranks from which `read_once` is faster than a read by each rank.

    `world` is the smallest number of ranks such that `read_once` is faster for it and for every
    larger measured number, or None. `largest` is the largest measured number.
    """

    work: str
    world: int | None
    largest: int

    @property
    def sentence(self) -> str:
        """The crossover as a sentence, for reports."""
        if self.world is None:
            return f"{self.work}: read_once is not faster with {self.largest} or fewer ranks"
        return f"{self.work}: read_once is faster with {self.world} or more ranks"


@dataclass(frozen=True)
class Skipped:
    """A measurement that could not be made, and the reason."""

    what: str
    reason: str


@dataclass
class Results:
    """All results of one run."""

    machine: Machine
    parameters: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    crossovers: list[Crossover] = field(default_factory=list)

    @property
    def thorough(self) -> bool:
        """True if the results may be quoted: enough rounds at full size."""
        return not self.parameters["quick"] and self.parameters["rounds"] >= REPRESENTATIVE_ROUNDS

    @property
    def representative(self) -> bool:
        """True if each group of docs/benchmarks.md was measured thoroughly."""
        only = set(self.parameters["only"])
        return self.thorough and (not only or only >= HEADLINE_GROUPS)

    def to_json(self) -> dict[str, Any]:
        """Returns the raw samples, and summaries for readers without this module."""
        document = asdict(self)
        for group, entry in zip(self.groups, document["groups"], strict=True):
            entry["summary"] = {
                info.name: {
                    "wall_s": asdict(group.wall(info.name)),
                    "cpu_s": asdict(group.cpu(info.name)),
                    "bytes_per_s": group.bytes / group.wall(info.name).median,
                }
                | _background_summary(group, info.name)
                | _queue_summary(group, info.name)
                | _read_summary(group, info.name)
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
        text = json.dumps(self.to_json(), indent=1)
        # With a line for each number, the times of the steps would take thousands of lines.
        path.write_text(_NUMBER_LISTS.sub(_on_one_line, text) + "\n")


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]")


def _background_summary(group: Group, contender: str) -> dict[str, Any]:
    if not group.background:
        return {}
    quantities = ("stall_s", "staged_s", "durable_s", "step_median_ratio", "step_mean_ratio")
    values = {quantity: group.values(contender, quantity) for quantity in quantities}
    return {quantity: asdict(spread(own)) for quantity, own in values.items() if own}


def _queue_summary(group: Group, contender: str) -> dict[str, Any]:
    if not group.queued:
        return {}
    quantities = ("first_call_s", "call_s", "stall_s", "durable_s", "memory_bytes")
    return {quantity: asdict(spread(group.values(contender, quantity))) for quantity in quantities}


def _read_summary(group: Group, contender: str) -> dict[str, Any]:
    if not group.counts_reads:
        return {}
    return {"read_per_wanted": asdict(spread(group.read_per_wanted(contender)))}


def _from_fields(kind: type[Any], entry: dict[str, Any]) -> Any:
    """Makes a dataclass of the entry's fields, without the computed ones."""
    return kind(**{name: entry[name] for name in kind.__dataclass_fields__})


def _sample(entry: dict[str, Any]) -> Sample:
    if "read_bytes" in entry:
        return ReadSample(**entry)
    if "calls" in entry:
        return CallSample(**entry)
    if "saves" not in entry:
        return Sample(**entry)
    if "first_call_s" in entry:
        return QueueSample(**entry | {"saves": [QueueSave(**save) for save in entry["saves"]]})
    return BackgroundSample(**entry | {"saves": [Trace(**save) for save in entry["saves"]]})


def read(path: Path) -> Results:
    """Reads a file of Results.write. Summaries are computed again from the raw samples."""
    document = json.loads(path.read_text())
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version is {version}, expected {FORMAT_VERSION}")
    groups = [
        Group(
            name=entry["name"],
            title=entry["title"],
            bytes=entry["bytes"],
            contenders=[_from_fields(ContenderInfo, info) for info in entry["contenders"]],
            samples=[_sample(sample) for sample in entry["samples"]],
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
        # Old results have no crossovers.
        crossovers=[_from_fields(Crossover, entry) for entry in document.get("crossovers", [])],
    )


def merged(runs: Sequence[Results]) -> Results:
    """Merges the groups of several runs. If several runs have a group, the last one counts.

    Texts that differ in the descriptions of the machine, such as dates, are joined.

    Raises:
        ValueError: the machines of the runs have different sizes.
    """
    if len(runs) == 1:
        return runs[0]
    machines = [asdict(run.machine) for run in runs]
    if len({(machine["cores"], machine["memory_bytes"] >> 30) for machine in machines}) > 1:
        raise ValueError("the results are from machines with different cores or memory")
    machine = machines[-1] | {
        name: " and ".join(dict.fromkeys(machine[name] for machine in machines))
        for name, value in machines[-1].items()
        if isinstance(value, str)
    }
    parameters: dict[str, Any] = {}
    for run in runs:
        parameters |= run.parameters
    only = [name for run in runs for name in run.parameters["only"]]
    parameters |= {
        "quick": any(run.parameters["quick"] for run in runs),
        "rounds": min(run.parameters["rounds"] for run in runs),
        "only": only if all(run.parameters["only"] for run in runs) else [],
    }
    groups = {group.name: group for run in runs for group in run.groups}
    comparisons = {entry.key: entry for run in runs for entry in run.comparisons}
    return Results(
        machine=Machine(**machine),
        parameters=parameters,
        groups=list(groups.values()),
        memory=next((run.memory for run in reversed(runs) if run.memory), []),
        comparisons=list(comparisons.values()),
        crossovers=[entry for run in runs for entry in run.crossovers],
    )
