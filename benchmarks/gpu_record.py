"""Makes the record and the tables of a run of scripts/gpu_run.sh. Imports no package.

`python -m benchmarks.gpu_record FOLDER DEVICE` reads parts.tsv, figures.json and training.json in
FOLDER, writes record.json there, and prints the tables. DEVICE is "none" if there is no CUDA
device. The exit status is 0 if all parts passed, 3 if they passed without a device, and 1
otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

MAX_LINES = 60
_NO_DEVICE = 3
_TIMED_OUT = (124, 137)


def _read(path: Path) -> Any:
    """Reads a JSON file; returns None if its part was stopped before writing it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _parts(path: Path) -> list[dict[str, Any]]:
    parts = []
    for line in path.read_text().splitlines():
        name, status, seconds, limit = line.split("\t")
        parts.append(
            {"part": name, "status": int(status), "seconds": int(seconds), "limit": int(limit)}
        )
    return parts


def _tests_line(log: Path) -> str:
    """Returns pytest's last line, which has the counts of tests."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    counts = [line for line in lines if " in " in line and ("passed" in line or "failed" in line)]
    return counts[-1].strip("= ") if counts else ""


def _outcome(status: int) -> str:
    if status == 0:
        return "passed"
    return "out of time" if status in _TIMED_OUT else f"FAILED ({status})"


def _outcomes(record: dict[str, Any]) -> list[str]:
    lines = [f"- `{part['part']}` {_outcome(part['status'])}" for part in record["parts"]]
    if record["tests"]:
        lines.append(f"- tests: {record['tests']}")
    for training in record["training"] or []:
        found = training["failure"] or "the losses are equal bit for bit"
        lines.append(f"- training, {training['variant'].replace('_', ' ')}: {found}")
    return lines


def _limits(parameters: dict[str, Any]) -> str:
    limits = parameters.get("limits") or {}

    def rate(name: str) -> str:
        return f"{limits[name] / 1e9:.1f}" if limits.get(name) else "-"

    found = [
        f"{kind} to host {rate(f'{kind}_to_host')}, to device {rate(f'{kind}_to_device')}"
        for kind in ("pinned", "pageable")
    ]
    return f"limits, GB/s: {'; '.join(found)}; disk writes {rate('disk_write')}, " + (
        f"reads {rate('disk_read')}"
    )


def _milliseconds(steps: list[list[float]]) -> str:
    return f"{1e3 * fmean(end - start for start, end in steps):.0f}" if steps else "-"


def _save_rows(group: dict[str, Any]) -> list[str]:
    """Formats each save of each saver, in the order in which they were made.

    A group has a contender for the first save and another one for the later saves of a saver.
    """
    labels = {info["name"]: info["label"] for info in group["contenders"]}
    by_saver: dict[str, list[dict[str, Any]]] = {}
    for sample in group["samples"]:
        by_saver.setdefault(sample["contender"].partition("_")[2], []).extend(sample["saves"])
    rows = []
    for saver, saves in by_saver.items():
        label = labels[f"first_{saver}"].removesuffix(": first")
        for number, save in enumerate(saves, 1):
            rate = group["bytes"] / save["staged_s"] if save["staged_s"] else 0.0
            idle = _milliseconds(save["idle_steps"])
            rows.append(
                f"| {group['title']} | {label} | {number} | {1e3 * save['stall_s']:.1f} ms | "
                f"{1e3 * save['staged_s']:.0f} ms | {save['durable_s']:.2f} s | {rate / 1e9:.1f} | "
                f"{idle} and {_milliseconds(save['steps'])} ms |"
            )
    return rows


def _load_rows(group: dict[str, Any]) -> list[str]:
    rows = []
    for info in group["contenders"]:
        own = [s["wall_s"] for s in group["samples"] if s["contender"] == info["name"]]
        rate = group["bytes"] / median(own) / 1e9
        rows.append(f"| {group['title']} | {info['label']} | {rate:.2f} |")
    return rows


def _figures(figures: dict[str, Any]) -> list[str]:
    machine = figures["machine"]
    loads = [group for group in figures["groups"] if group["name"].startswith("loads_")]
    saves = [group for group in figures["groups"] if group not in loads]
    skipped = [one for one in figures["skipped"] if "no time left" not in one["reason"]]
    return [
        f"- {machine['cores']} cores, {machine['file_system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['date']}",
        f"- {_limits(figures['parameters'])}",
        *(f"- not measured: {one['what']}: {one['reason']}" for one in skipped),
        "",
        "| save | saver | number | call | staged after | durable after | GB/s of staging | step, "
        "before and during the save |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(row for group in saves for row in _save_rows(group)),
        "",
        "| load | loader | GB/s |",
        "|---|---|---:|",
        *(row for group in loads for row in _load_rows(group)),
    ]


def table(record: dict[str, Any]) -> list[str]:
    """Formats a record as lines of Markdown."""
    return [*_outcomes(record), *(_figures(record["figures"]) if record["figures"] else [])]


def block(records: Sequence[dict[str, Any]]) -> str:
    """Formats records as Markdown, for a document."""
    runs = [
        "\n".join([f"**Run {number}, {record['device']}**", "", *table(record)])
        for number, record in enumerate(records, 1)
    ]
    return "\n\n".join(runs)


def main(folder: Path, device: str) -> int:
    """Writes the record, prints the tables and returns the exit status."""
    parts = _parts(folder / "parts.tsv")
    record = {
        "device": "no device" if device == "none" else device,
        "parts": parts,
        "tests": _tests_line(folder / "tests.log"),
        "training": _read(folder / "training.json"),
        "figures": _read(folder / "figures.json"),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    # The record contains these files.
    for name in ("parts.tsv", "figures.json", "training.json"):
        (folder / name).unlink(missing_ok=True)
    print("\n".join(table(record)[:MAX_LINES]), flush=True)
    if any(part["status"] for part in parts):
        return 1
    return _NO_DEVICE if device == "none" else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
