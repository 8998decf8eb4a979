"""The wording rules of CONTRIBUTING.md: no folder breaks them more often than it did.

A count in word_counts.json may only fall: ``python -m tests.words --write`` commits a lower one.
``python -m tests.words FOLDER`` lists the breaches of a folder.
"""

from __future__ import annotations

import json

import pytest

from tests.words import COUNTS, Passage, breaches, count


def test_no_folder_breaks_more_rules_than_its_committed_count() -> None:
    committed = json.loads(COUNTS.read_text())
    risen = {
        f"{folder}, {kind}": f"{number}, committed {committed.get(folder, {}).get(kind, 0)}"
        for folder, kinds in count().items()
        for kind, number in kinds.items()
        if number > committed.get(folder, {}).get(kind, 0)
    }
    assert not risen, "`python -m tests.words FOLDER --kind KIND` lists the breaches"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("docstring", "Whether the file exists.", ["Whether"]),
        ("docstring", "True if the file exists.", []),
        ("comment", "What a rank sends.", []),
        ("comment", "Of a record the ends are read.", ["Of "]),
        ("comment", "Of course.", []),
        ("message", "a rank that nobody waits for", ["nobody"]),
        ("message", "the rank has told the others", ["told"]),
        ("comment", "Skips the copy where there is no device.", ["copy where there"]),
        ("comment", "Starts at the offset where it ended.", []),
        ("test name", "a save goes on", ["goes"]),
    ],
)
def test_a_breach_is_found_by_its_pattern(kind: str, text: str, expected: list[str]) -> None:
    assert breaches(Passage("a.py", 1, kind, text)) == expected
