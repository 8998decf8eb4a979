"""Makes tables, charts and the README's numbers of a result: ``python -m benchmarks.report``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from . import charts
from . import results as results_module
from .results import Comparison, Group, Results

BEGIN = "<!-- benchmark:begin -->"
END = "<!-- benchmark:end -->"
# The groups whose charts the README shows; the others lie beside them.
HEADLINE_CHARTS = ("save", "load_warm", "small_save")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int) -> str:
    """A markdown table whose columns from `numeric_from` on are aligned to the right."""
    rule = ["---" if column < numeric_from else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def _number(value: float, quantity: str) -> str:
    return f"{value:.0f} MiB" if quantity == "memory" else f"{value:.2f} x"


def _with_seconds(label: str | None, seconds: float | None) -> str:
    return " ".join([label or "", "" if seconds is None else f"({seconds:.3g} s)"]).strip()


def _comparison_row(comparison: Comparison) -> list[str]:
    quantity = comparison.quantity
    low, high = min(comparison.per_round), max(comparison.per_round)
    return [
        comparison.work,
        _with_seconds(comparison.ours, comparison.ours_median),
        _with_seconds(comparison.baseline, comparison.baseline_median),
        quantity,
        f"**{_number(comparison.value, quantity)}**",
        f"{_number(low, quantity)} to {_number(high, quantity)}",
    ]


def _target_cells(comparison: Comparison) -> list[str]:
    if comparison.target is None:
        return ["", ""]
    sign = "≥" if comparison.at_least else "≤"
    target = f"{sign} {_number(comparison.target, comparison.quantity)}"
    return [target, "yes" if comparison.met else "**no**"]


_COMPARISON_HEADER = ["work", "measured", "against", "what", "median", "min to max"]


def _rate(group: Group, seconds: float) -> str:
    rate = group.bytes / seconds
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def _group_table(group: Group) -> str:
    rows = []
    for info in sorted(group.contenders, key=lambda info: group.wall(info.name).median):
        wall = group.wall(info.name)
        rows.append(
            [
                f"**{info.label}**" if info.kind == "ours" else info.label,
                f"{wall.median:.3f}",
                f"{wall.lower_quartile:.3f} to {wall.upper_quartile:.3f}",
                f"{wall.minimum:.3f} to {wall.maximum:.3f}",
                _rate(group, wall.median),
                f"{group.cpu(info.name).median:.3f}",
            ]
        )
    header = [group.title, "seconds", "quartiles", "min to max", "rate", "CPU s"]
    return _table(header, rows, numeric_from=1)


def _introduction(results: Results) -> list[str]:
    paragraphs = [f"Measured on {results.machine.sentence()}."]
    if not results.representative:
        paragraphs.append("**A trial run, not to be quoted:** too small, too short or incomplete.")
    paragraphs.append(
        f"Rounds: {results.parameters['rounds']}. In each, all contenders of a group run one after "
        "the other; the order changes from round to round. A ratio is the median of the ratios "
        "within the rounds, seconds are medians. Speed compares wall seconds, CPU time the user "
        "and system seconds of the saving or loading process."
    )
    return paragraphs


def _skipped_list(results: Results) -> list[str]:
    if not results.skipped:
        return []
    lines = [f"- {skipped.what}: {skipped.reason}" for skipped in results.skipped]
    return ["Not measured:\n\n" + "\n".join(lines)]


def full_report(results: Results) -> str:
    """Every comparison with its target and every contender, in markdown."""
    paragraphs = _introduction(results)
    if results.comparisons:
        rows = [_comparison_row(entry) + _target_cells(entry) for entry in results.comparisons]
        paragraphs.append(_table([*_COMPARISON_HEADER, "target", "met"], rows, numeric_from=4))
    paragraphs += [_group_table(group) for group in results.groups]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


def readme_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """The headline comparisons and charts, in markdown."""
    rows = [_comparison_row(entry) for entry in results.comparisons if entry.headline]
    paragraphs = _introduction(results)
    paragraphs.append(_table(_COMPARISON_HEADER, rows, numeric_from=4))
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


def replace_block(text: str, block: str) -> str:
    """`text` with everything between the two markers replaced by `block`."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END} to replace")
    return f"{head}{BEGIN}\n{block.strip()}\n{END}{tail}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file of benchmarks.run")
    parser.add_argument("--readme", type=Path, help="file whose benchmark block is replaced")
    parser.add_argument(
        "--images", type=Path, default=Path("docs/images"), help="for charts (default %(default)s)"
    )
    parser.add_argument("--no-charts", action="store_true", help="tables only")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report, writes the charts, updates the README."""
    options = _parser().parse_args(arguments)
    results = results_module.read(options.results)
    if options.readme and not results.representative:
        raise SystemExit(f"{options.results} is a trial run; a README quotes full runs only")
    images = {} if options.no_charts else charts.write(results, options.images)
    print(full_report(results))
    if options.readme:
        base = options.readme.resolve().parent
        links = [
            Path(os.path.relpath(images[name].resolve(), base)).as_posix()
            for name in HEADLINE_CHARTS
            if name in images
        ]
        text = options.readme.read_text()
        options.readme.write_text(replace_block(text, readme_block(results, links)))


if __name__ == "__main__":
    main()
