"""Tables of results, and the documents that show the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, results

pytestmark = pytest.mark.full

_REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def committed() -> list[results.Results]:
    """All committed results of groups."""
    return results.read_all(sorted(report.RESULTS.glob("*.json")))


@pytest.fixture(scope="module")
def blocks() -> dict[tuple[str, str], str]:
    """The content of all blocks, from the committed results."""
    return report.blocks()


def test_results_survive_writing_and_reading(
    committed: list[results.Results], tmp_path: Path
) -> None:
    for number, found in enumerate(committed):
        found.write(tmp_path / f"{number}.json")
    assert results.read_all(sorted(tmp_path.iterdir())) == committed


def test_all_documents_show_the_committed_results(blocks: dict[tuple[str, str], str]) -> None:
    for (document, block), content in blocks.items():
        text = (_REPOSITORY / document).read_text()
        assert report.filled(text, block, content) == text, "python -m benchmarks.report fills it"


def test_each_committed_group_is_shown_with_all_its_contenders(
    committed: list[results.Results], blocks: dict[tuple[str, str], str]
) -> None:
    text = "\n".join(blocks.values())
    for group in (group for found in committed for group in found.groups):
        assert group.title in text
        assert all(info.label in text for info in group.contenders)


def test_the_numbers_of_the_readme_compare_with_the_default_and_the_best_of_stock(
    blocks: dict[tuple[str, str], str],
) -> None:
    rows = [line for line in blocks["README.md", "numbers"].splitlines() if line.startswith("| ")]
    assert len(rows[2:]) == 4
    for row in rows[2:]:
        default, best = row.split(" | ")[2:]
        assert " x (" in default
        assert " x (" in best or best == "the default |"


def _write(directory: Path, name: str, **changes: Any) -> None:
    """Writes results with one group of two contenders, `ours_dcp` and `stock_1`."""
    machine = dict.fromkeys(results.Machine.__dataclass_fields__, "x") | {"memory_bytes": 0}
    seconds = {"ours_dcp": [1.0, 2.0, 9.0], "stock_1": [2.0, 2.0, 9.9]}
    group = {
        "name": "save",
        "title": name,
        "bytes": 10**9,
        "contenders": [{"name": one, "label": one, "kind": "ours"} for one in seconds],
        "samples": [
            {"contender": one, "round": index, "wall_s": wall, "cpu_s": 0.5}
            for one, walls in seconds.items()
            for index, wall in enumerate(walls)
        ],
    }
    document = {
        "format_version": results.FORMAT_VERSION,
        "machine": machine | {"date": changes.pop("date", "2026")},
        "parameters": {"quick": False, "rounds": 5} | changes,
        "groups": [group],
        "skipped": [],
    }
    (directory / f"{name}.json").write_text(json.dumps(document))


def test_a_ratio_is_the_median_of_the_rounds_and_not_of_the_times(tmp_path: Path) -> None:
    _write(tmp_path, "title")
    (found,) = results.read_all([tmp_path / "title.json"])
    assert "| **stock_1** | 2.000 | 0.500 | 1.10 (1.00 to 2.00) |" in report.group_table(
        found.groups[0]
    )


def test_the_newest_results_of_a_group_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "BLOCKS", {("page", "block"): ("save",)})
    monkeypatch.setattr(report, "numbers", lambda _found: "")
    _write(tmp_path, "a newer run", date="2026-02")
    _write(tmp_path, "older run", date="2026-01")
    assert "a newer run" in report.blocks(tmp_path)["page", "block"]


@pytest.mark.parametrize("parameters", [{"quick": True}, {"rounds": 4}], ids=["quick", "short"])
def test_a_trial_run_fills_no_document(tmp_path: Path, parameters: dict[str, Any]) -> None:
    _write(tmp_path, "trial", **parameters)
    with pytest.raises(KeyError):
        report.blocks(tmp_path)


def test_a_document_without_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="benchmark-async"):
        report.filled("no markers\n", "async", "new")
