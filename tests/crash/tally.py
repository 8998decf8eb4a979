"""Counts of the outcomes of all cases: lines at the end of the session, and JSON.

``TORCH_CKPT_TORTURE`` makes the tests of this directory try all cases instead of some.
``TORCH_CKPT_SEED`` is the seed of all random choices; the summary shows it.
``TORCH_CKPT_RESULTS`` is a directory for the JSON files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TORTURE = bool(os.environ.get("TORCH_CKPT_TORTURE"))

SEED = int(os.environ.get("TORCH_CKPT_SEED", "1"))


class Tally:
    """The cases of one kind of test. A pytest plugin, so that it needs no conftest.

    Args:
        name: name of the JSON file.
        title: first words of the summary's line.
        counted: noun for the cases, in the plural.
        missed: description of the cases that failed.
        in_full: True to write all cases to the JSON file, and not only those that failed.
    """

    def __init__(
        self, name: str, title: str, counted: str, missed: str, *, in_full: bool = True
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._name = name
        self._title = title
        self._counted = counted
        self._missed = missed
        self._in_full = in_full

    def joined(self, config: pytest.Config) -> Tally:
        """Registers this object with a session and returns it."""
        config.pluginmanager.register(self, f"torch_ckpt tally {self._name}")
        return self

    def add(self, engine: str, right: bool | None, **columns: Any) -> None:
        """Adds a case.

        Args:
            engine: "torch_ckpt" or "stock".
            right: True if the outcome is the promised one; None if nothing is promised.
        """
        self.rows.append({"engine": engine, "right": right, **columns})

    def summary(self) -> str:
        parts = []
        for engine in ("torch_ckpt", "stock"):
            judged = [r["right"] for r in self.rows if r["engine"] == engine]
            judged = [right for right in judged if right is not None]
            if judged:
                missed = judged.count(False)
                parts.append(f"{engine} {len(judged)} {self._counted}, {missed} {self._missed}")
        left = sum(row["right"] is None for row in self.rows)
        if left:
            parts.append(f"{left} only recorded")
        return f"{self._title}: {'; '.join(parts)} (seed {SEED})"

    def pytest_sessionfinish(self) -> None:
        directory = os.environ.get("TORCH_CKPT_RESULTS")
        if directory and self.rows:
            Path(directory).mkdir(parents=True, exist_ok=True)
            contents = {
                "seed": SEED,
                "everything": TORTURE,
                "summary": self.summary(),
                "judged": self._judged(),
                "outcomes": self._outcomes(),
                "rows": [row for row in self.rows if self._in_full or not row["right"]],
            }
            text = json.dumps(contents, indent=1)
            (Path(directory) / f"{self._name}.json").write_text(f"{text}\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.rows:
            terminalreporter.write_line(self.summary())

    def _judged(self) -> dict[str, dict[str, int]]:
        """Returns the number of cases, and of those that failed, by engine and test."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            if row["right"] is not None:
                key = f"{row['engine']}, {row['test']}"
                count = counts.setdefault(key, {"cases": 0, "broken": 0})
                count["cases"] += 1
                count["broken"] += not row["right"]
        return counts

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(f"{row['engine']}, {row['test']}: {row['outcome']}" for row in self.rows)
        return dict(sorted(counts.items()))
