"""Reports and charts, made from the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import huggingface_report, report, results

pytestmark = pytest.mark.full

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Joins the newest results of each group into one document."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    runs = [content for content in found if "groups" in content]
    joined: dict[str, Any] = {}
    for run in runs:
        joined |= {key: value for key, value in run.items() if value}
    groups = {group["name"]: group for run in runs for group in run["groups"]}
    parameters: dict[str, Any] = {}
    for run in runs:
        parameters |= run["parameters"]
    # One result skipped what another has measured.
    return joined | {"groups": list(groups.values()), "parameters": parameters, "skipped": []}


def write(file: Path, document: dict[str, Any], **parameters: Any) -> str:
    content = document | {"parameters": document["parameters"] | parameters}
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def full_run(document: dict[str, Any], tmp_path: Path) -> str:
    return write(tmp_path / "full.json", document, quick=False, rounds=5, only=[])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def between(marker: str, lines: str = "") -> str:
    return f"before\n<!-- {marker}:begin -->\n{lines}<!-- {marker}:end -->\nafter\n"


def test_results_survive_writing_and_reading(full_run: str, tmp_path: Path) -> None:
    loaded = results.read(Path(full_run))
    for copy in (tmp_path / "copy.json", tmp_path / "copy of the copy.json"):
        loaded.write(copy)
        assert results.read(copy) == loaded
        loaded = results.read(copy)
    assert copy.read_text() == (tmp_path / "copy.json").read_text()


def test_the_report_names_every_contender(
    full_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([full_run, "--no-charts"])
    text = capsys.readouterr().out
    loaded = results.read(Path(full_run))
    assert loaded.machine.torch in text
    for group in loaded.groups:
        assert all(info.label in text for info in group.contenders)


def test_without_new_charts_a_document_links_those_that_exist(
    full_run: str, tmp_path: Path, page: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "async-timeline.png").touch()
    page.write_text(between("benchmark-async", ""))
    report.main([full_run, "--no-charts", "--images", str(images), "--doc", str(page)])
    assert re.findall(r"\]\((.*\.png)\)", page.read_text()) == ["images/async-timeline.png"]


MARKERS = [block.marker for block in report.BLOCKS]


def filled(page: Path, run: str, marker: str) -> str:
    """Fills a block of a document, whose other text must stay."""
    page.write_text(between(marker, "old numbers\n"))
    report.main([run, "--no-charts", "--doc", str(page)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"<!-- {marker}:end -->\nafter\n")
    assert "old numbers" not in text
    return text


@pytest.mark.parametrize("marker", MARKERS)
def test_a_full_run_fills_only_the_block_of_a_document(
    full_run: str, page: Path, marker: str
) -> None:
    assert "|" in filled(page, full_run, marker)


def test_the_numbers_of_the_readme_compare_with_the_default_and_the_best_of_stock(
    full_run: str,
) -> None:
    block = report.numbers_block(results.read(Path(full_run)))
    rows = [line for line in block.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 4
    for row in rows:
        default, best = row.split(" | ")[2:]
        assert " x (" in default
        assert " x (" in best or best == "the default |"


def test_the_list_of_missed_targets_has_each_comparison_that_misses(full_run: str) -> None:
    loaded = results.read(Path(full_run))
    missed = [entry for entry in loaded.comparisons if entry.met is False]
    rows = report.missed_block(loaded).splitlines()[2:]
    assert missed
    assert len(rows) == len(missed)


def test_the_last_of_several_runs_of_a_group_is_used(full_run: str, tmp_path: Path) -> None:
    run = json.loads(Path(full_run).read_text())
    first, *others = run["groups"]

    def run_of(date: str, title: str, *others: dict[str, Any]) -> results.Results:
        groups, machine = [first | {"title": title}, *others], run["machine"] | {"date": date}
        content = run | {"groups": groups, "machine": machine}
        return results.read(Path(write(tmp_path / "run.json", content)))

    older, newer = run_of("2026-01-01", "older", *others), run_of("2026-01-02", "newer")
    merged = results.merged([older, newer])
    assert merged.groups[0].title == "newer"
    assert len(merged.groups) == len(run["groups"])
    assert merged.machine.date == "2026-01-01 and 2026-01-02"


@pytest.mark.parametrize(
    ("marker", "only", "belongs"),
    [
        ("benchmark-async", ["async"], lambda group: group.background),
        (
            "benchmark-loading",
            ["load"],
            lambda group: group.name.startswith(("load", "partial", "reshard", "replicas")),
        ),
        ("benchmark-megatron", ["megatron"], lambda group: group.name.startswith("megatron")),
        ("benchmark-manager", ["manager"], lambda group: group.of_calls),
    ],
    ids=["async", "loads", "queues", "manager"],
)
def test_a_document_gets_only_the_numbers_of_its_groups(
    document: dict[str, Any],
    tmp_path: Path,
    page: Path,
    marker: str,
    only: list[str],
    belongs: Callable[[results.Group], bool],
) -> None:
    full = write(tmp_path / "full.json", document, quick=False, rounds=5, only=only)
    text = filled(page, full, marker)
    assert "trial run" not in text
    loaded = results.read(Path(full))
    for group in loaded.groups:
        assert (group.title in text) == belongs(group), group.name
        if only == ["megatron"] and belongs(group):
            assert all(info.label in text for info in group.contenders)
    if only == ["load"]:
        assert loaded.crossovers
        assert all(crossover.sentence in text for crossover in loaded.crossovers)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_trial_run_changes_no_document(
    document: dict[str, Any], tmp_path: Path, page: Path, marker: str
) -> None:
    trial = write(tmp_path / "trial.json", document, quick=True, rounds=1)
    page.write_text(between(marker))
    with pytest.raises(SystemExit, match="trial run"):
        report.main([trial, "--no-charts", "--doc", str(page)])
    assert page.read_text() == between(marker)


def test_a_document_without_a_block_is_refused(full_run: str, page: Path) -> None:
    page.write_text("no markers\n")
    with pytest.raises(SystemExit, match="benchmark-async"):
        report.main([full_run, "--no-charts", "--doc", str(page)])


def test_charts_are_drawn_for_every_group_and_an_overview(full_run: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.main([full_run, "--images", str(tmp_path / "images")])
    images = list((tmp_path / "images").glob("benchmark-*.png"))
    assert len(images) == len(results.read(Path(full_run)).groups) + len(["overview"])
    images.append(tmp_path / "images" / "async-timeline.png")
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)


def test_the_page_on_hugging_face_files_has_the_newest_figures() -> None:
    saves, publications = (
        json.loads(max(RESULTS.glob(f"*-{kind}.json")).read_text())
        for kind in ("huggingface", "publication")
    )
    page = (RESULTS.parents[1] / "docs" / "huggingface.md").read_text()
    assert huggingface_report.block(saves, publications) in page
