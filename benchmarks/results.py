"""The result of a run, to and from JSON: the machine, and the raw samples of each group."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .machine import Machine
from .measure import Sample

FORMAT_VERSION = 2
#: With fewer rounds, medians on a shared disk mean nothing.
LEAST_ROUNDS = 5
_NUMBER_LISTS = re.compile(r"\[[\[\]\s\d.,eE+-]*\]")


def readable_size(size: int) -> str:
    """Formats a number of bytes in decimal units, such as '2.00 GB'."""
    return f"{size / 1e9:.2f} GB" if size >= 999_500_000 else f"{size / 1e6:.0f} MB"


@dataclass(frozen=True)
class ContenderInfo:
    """A contender's name, label and kind: 'ours', 'stock', 'peer' or 'limit'."""

    name: str
    label: str
    kind: str


@dataclass(frozen=True)
class Group:
    """Contenders that did the same work alternately. `bytes` is the size of that work."""

    name: str
    title: str
    bytes: int
    contenders: list[ContenderInfo]
    samples: list[Sample]

    def values(self, contender: str, quantity: str) -> list[float]:
        """Returns a quantity of a contender's samples in the order of the rounds, without None."""
        own = sorted(
            (sample for sample in self.samples if sample["contender"] == contender),
            key=lambda sample: int(sample["round"]),
        )
        return [float(s[quantity]) for s in own if s.get(quantity) is not None]

    def median(self, contender: str, quantity: str) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self.values(contender, quantity))

    def ratios(self, contender: str, reference: str, quantity: str) -> list[float]:
        """Divides a contender's quantity by the reference's in each round."""
        pairs = zip(
            self.values(contender, quantity), self.values(reference, quantity), strict=False
        )
        return [one / other for one, other in pairs if other]

    def label(self, contender: str) -> str:
        """Returns the label of a contender."""
        return next(info.label for info in self.contenders if info.name == contender)


@dataclass
class Results:
    """All results of one run. `skipped` has what could not be measured, with the reason."""

    machine: Machine
    parameters: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def quotable(self) -> bool:
        """True if documents may show the results: enough rounds at full size."""
        return not self.parameters["quick"] and self.parameters["rounds"] >= LEAST_ROUNDS

    def write(self, path: Path) -> None:
        """Writes the JSON file and the directories above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format_version": FORMAT_VERSION} | asdict(self), indent=1)
        # With a line for each number, the times of the steps would take thousands of lines.
        path.write_text(_NUMBER_LISTS.sub(_on_one_line, text) + "\n")


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]")


def from_document(document: dict[str, Any]) -> Results:
    """Makes results of the content of a file of Results.write.

    Raises:
        ValueError: another version wrote the file.
    """
    if document.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"no results of format version {FORMAT_VERSION}")
    groups = [
        Group(**entry | {"contenders": [ContenderInfo(**info) for info in entry["contenders"]]})
        for entry in document["groups"]
    ]
    return Results(
        Machine(**document["machine"]), document["parameters"], groups, document["skipped"]
    )


def read_all(files: Sequence[Path]) -> list[Results]:
    """Reads results in the order of their dates. Ignores files of other benchmarks."""
    documents = [json.loads(file.read_text()) for file in files]
    found = [from_document(one) for one in documents if "format_version" in one]
    return sorted(found, key=lambda results: results.machine.date)
