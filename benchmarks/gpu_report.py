"""Fills the block with the results of a GPU in a document.

`python -m benchmarks.gpu_report RECORD... --doc DOCUMENT` reads records of scripts/gpu_run.sh.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .blocks import replace_block
from .gpu_record import (
    describe_limits,
    label_of,
    not_measured,
    outcome,
    saves_by_saver,
    staging_rate,
)

BEGIN = "<!-- benchmark-gpu:begin -->"
END = "<!-- benchmark-gpu:end -->"


def _milliseconds(steps: list[list[float]]) -> str:
    return f"{1e3 * fmean(end - start for start, end in steps):.0f}" if steps else "-"


def _parts(record: dict[str, Any]) -> list[str]:
    lines = [f"- `{part['part']}` {outcome(part['status'])}" for part in record["parts"]]
    if record["tests"]:
        lines.append(f"- tests: {record['tests']}")
    for training in record["training"] or []:
        found = training["failure"] or "the losses are equal bit for bit"
        lines.append(f"- training, {training['variant'].replace('_', ' ')}: {found}")
    return lines


def _saves(groups: list[dict[str, Any]]) -> list[str]:
    if not groups:
        return []
    lines = [
        "",
        "| save | saver | number | call | staged after | durable after | GB/s of staging | step, "
        "before and during the save |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for group in groups:
        for saver, saves in saves_by_saver(group).items():
            for number, save in enumerate(saves, 1):
                idle = _milliseconds(save["idle_steps"])
                lines.append(
                    f"| {group['title']} | {label_of(group, saver)} | {number} | "
                    f"{1e3 * save['stall_s']:.1f} ms | {1e3 * save['staged_s']:.0f} ms | "
                    f"{save['durable_s']:.2f} s | {staging_rate(group, save) / 1e9:.1f} | "
                    f"{idle} and {_milliseconds(save['steps'])} ms |"
                )
    return lines


def _loads(groups: list[dict[str, Any]]) -> list[str]:
    lines = ["", "| load | loader | GB/s |", "|---|---|---:|"] if groups else []
    for group in groups:
        for info in group["contenders"]:
            rate = group["summary"][info["name"]]["bytes_per_s"] / 1e9
            lines.append(f"| {group['title']} | {info['label']} | {rate:.2f} |")
    return lines


def _figures(figures: dict[str, Any]) -> list[str]:
    machine, groups = figures["machine"], figures["groups"]
    lines = [
        f"- {machine['cores']} cores, {machine['file_system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['date']}",
        *(f"- {line}" for line in describe_limits(figures["parameters"])),
    ]
    lines += _saves([group for group in groups if not group["name"].startswith("loads_")])
    lines += _loads([group for group in groups if group["name"].startswith("loads_")])
    skipped = [
        f"- {not_measured(entry)}"
        for entry in figures["skipped"]
        if "no time left" not in entry["reason"]
    ]
    return [*lines, *([""] if skipped else []), *skipped]


def block(records: Sequence[dict[str, Any]]) -> str:
    """Formats records as Markdown."""
    lines: list[str] = []
    for number, record in enumerate(records, 1):
        lines += [f"**Run {number}, {record['device']}**", "", *_parts(record)]
        if record["figures"] is not None:
            lines += _figures(record["figures"])
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the block."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="JSON files of scripts/gpu_run.sh")
    parser.add_argument("--doc", type=Path, required=True, help="Markdown file with the block")
    options = parser.parse_args(arguments)
    text = block([json.loads(file.read_text()) for file in options.records])
    options.doc.write_text(replace_block(options.doc.read_text(), BEGIN, END, text))


if __name__ == "__main__":
    main()
