"""Reports and charts: made here of the results that are committed, instead of a run's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, results

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """One document with the newest results of each group."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    runs = [content for content in found if "groups" in content]
    whole: dict[str, Any] = {}
    for run in runs:
        whole |= {key: value for key, value in run.items() if value}
    groups = {group["name"]: group for run in runs for group in run["groups"]}
    parameters: dict[str, Any] = {}
    for run in runs:
        parameters |= run["parameters"]
    # One of them skipped what another has measured.
    return whole | {"groups": list(groups.values()), "parameters": parameters, "skipped": []}


def write(file: Path, document: dict[str, Any], **parameters: Any) -> str:
    content = document | {"parameters": document["parameters"] | parameters}
    file.write_text(json.dumps(content))
    return str(file)


@pytest.fixture
def full_run(document: dict[str, Any], tmp_path: Path) -> str:
    return write(tmp_path / "full.json", document, quick=False, rounds=5, only=[])


def between(begin: str, end: str, lines: str = "") -> str:
    return f"before\n{begin}\n{lines}{end}\nafter\n"


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


def test_a_full_run_replaces_only_the_block_of_the_readme(
    document: dict[str, Any], full_run: str, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(between(report.BEGIN, report.END, "old numbers\n"))
    report.main([full_run, "--no-charts", "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old numbers" not in text
    assert document["machine"]["cpu"] in text


def is_of_loads(group: results.Group) -> bool:
    return group.name.startswith(("load", "partial", "reshard", "replicas"))


def is_of_queues(group: results.Group) -> bool:
    return group.name.startswith("megatron")


@pytest.mark.parametrize(
    ("begin", "end", "only", "belongs"),
    [
        (report.ASYNC_BEGIN, report.ASYNC_END, ["async"], lambda group: group.background),
        (report.BEGIN, report.END, ["load"], is_of_loads),
        (report.QUEUE_BEGIN, report.QUEUE_END, ["megatron"], is_of_queues),
        (report.MANAGER_BEGIN, report.MANAGER_END, ["manager"], lambda group: group.of_calls),
    ],
    ids=["async", "loads", "queues", "manager"],
)
def test_a_document_gets_the_numbers_of_its_groups_alone(
    document: dict[str, Any],
    tmp_path: Path,
    begin: str,
    end: str,
    only: list[str],
    belongs: Callable[[results.Group], bool],
) -> None:
    full = write(tmp_path / "full.json", document, quick=False, rounds=5, only=only)
    page = tmp_path / "page.md"
    page.write_text(between(begin, end, "old numbers\n"))
    report.main([full, "--no-charts", "--doc", str(page)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "old numbers" not in text
    assert "trial run" not in text
    loaded = results.read(Path(full))
    for group in loaded.groups:
        assert (group.title in text) == belongs(group), group.name
        if is_of_queues(group) and belongs(group):
            assert all(info.label in text for info in group.contenders)
    if only == ["load"]:
        assert loaded.crossovers
        assert all(crossover.sentence in text for crossover in loaded.crossovers)


@pytest.mark.parametrize(
    ("option", "begin", "end"),
    [
        ("--readme", report.BEGIN, report.END),
        ("--doc", report.BEGIN, report.END),
        ("--doc", report.MANAGER_BEGIN, report.MANAGER_END),
        ("--doc", report.ASYNC_BEGIN, report.ASYNC_END),
        ("--doc", report.QUEUE_BEGIN, report.QUEUE_END),
    ],
)
def test_a_trial_run_reaches_no_document(
    document: dict[str, Any], tmp_path: Path, option: str, begin: str, end: str
) -> None:
    trial = write(tmp_path / "trial.json", document, quick=True, rounds=1)
    page = tmp_path / "page.md"
    page.write_text(between(begin, end))
    with pytest.raises(SystemExit, match="trial run"):
        report.main([trial, "--no-charts", option, str(page)])
    assert page.read_text() == between(begin, end)


def test_a_readme_without_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="benchmark:begin"):
        report.replace_block("no markers here", "numbers")


def test_charts_are_drawn_for_every_group(full_run: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.main([full_run, "--images", str(tmp_path / "images")])
    images = list((tmp_path / "images").glob("benchmark-*.png"))
    assert len(images) == len(results.read(Path(full_run)).groups)
    images.append(tmp_path / "images" / "async-timeline.png")
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)
