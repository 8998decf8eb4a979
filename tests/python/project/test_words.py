"""The wording rules of CONTRIBUTING.md.

``python -m tests.words FOLDER`` lists the breaches of a folder, with the terms to use.
"""

from __future__ import annotations

import pytest

from tests.words import Passage, advice, breaches, files, passages


def test_no_passage_breaks_a_wording_rule() -> None:
    found = [
        f"{passage.file}:{passage.line}: {', '.join(map(advice, broken))}"
        for file in files()
        for passage in passages(file)
        if (broken := breaches(passage))
    ]
    assert not found


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
