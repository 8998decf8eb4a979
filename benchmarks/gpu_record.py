"""Makes the record and the table of a run of scripts/gpu_run.sh. Imports no package.

`python -m benchmarks.gpu_record FOLDER DEVICE` reads parts.tsv, figures.json and training.json in
FOLDER, writes record.json there, and prints the table. DEVICE is "none" if there is no CUDA device.
The exit status is 0 if all parts passed, 3 if they passed without a device, and 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MAX_LINES = 60
_WIDTH = 150
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


def outcome(status: int) -> str:
    """Describes the exit status of a part."""
    if status == 0:
        return "passed"
    return "out of time" if status in _TIMED_OUT else f"FAILED ({status})"


def _tests_line(log: Path) -> str:
    """Returns pytest's last line, which has the counts of tests."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    counts = [line for line in lines if " in " in line and ("passed" in line or "failed" in line)]
    return counts[-1].strip("= ") if counts else ""


def _rate(value: Any) -> str:
    return f"{value / 1e9:.1f}" if value else "-"


def describe_limits(parameters: dict[str, Any]) -> list[str]:
    """Formats the limits of the machine, and which ways of I/O work there."""
    limits = parameters.get("limits") or {}
    found = [
        f"{kind} to host {_rate(limits.get(f'{kind}_to_host'))}, "
        f"to device {_rate(limits.get(f'{kind}_to_device'))}"
        for kind in ("pinned", "pageable")
    ]
    disk = f"disk writes {_rate(limits.get('disk_write'))}, reads {_rate(limits.get('disk_read'))}"
    io = parameters.get("io") or {}
    known = "; ".join(f"{name}: {io.get(name)}" for name in ("io_uring", "cufile", "nvidia_fs"))
    return [f"limits, GB/s: {'; '.join([*found, disk])}", known]


def _lengths(steps: list[list[float]]) -> list[float]:
    return sorted(end - start for start, end in steps)


def _steps(saves: list[dict[str, Any]], kind: str) -> str:
    """Formats the mean and the 99th percentile of the steps, in milliseconds."""
    lengths = _lengths([step for save in saves for step in save[kind]])
    if not lengths:
        return "-"
    high = lengths[min(len(lengths) - 1, int(len(lengths) * 0.99))]
    return f"{1e3 * sum(lengths) / len(lengths):.1f}/{1e3 * high:.1f}"


def saves_by_saver(group: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the saves of each saver in a group, in the order in which they were made.

    A group has a contender for the first save and another one for the later saves of a saver.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in group["samples"]:
        found.setdefault(sample["contender"].partition("_")[2], []).extend(sample["saves"])
    return found


def label_of(group: dict[str, Any], saver: str) -> str:
    """Returns the label of a saver, without the suffix for the kind of its saves."""
    labels = {info["name"]: info["label"] for info in group["contenders"]}
    return str(labels[f"first_{saver}"]).removesuffix(": first")


def staging_rate(group: dict[str, Any], save: dict[str, Any]) -> float:
    """Returns the bytes per second of a save's staging; 0 if the time is too short to measure."""
    return float(group["bytes"] / save["staged_s"] if save["staged_s"] else 0.0)


def _saves(group: dict[str, Any], parameters: dict[str, Any]) -> list[str]:
    pinned = (parameters.get("limits") or {}).get("pinned_to_host")
    lines = [
        f"{group['name']}: {group['title']}",
        f"  {'saver (each save of a process)':34} {'call ms':>17} {'staged s':>17} {'GB/s':>14} "
        f"{'/pinned':>14} {'commit s':>14} {'steps':>9} {'without':>9} {'MB':>6}",
    ]
    for saver, saves in saves_by_saver(group).items():
        rates = [staging_rate(group, save) for save in saves]
        ratios = "/".join(f"{rate / pinned:.2f}" for rate in rates) if pinned else "-"
        used = parameters["device_memory_bytes"].get(f"{group['name']}.{saver}")
        memory = "-" if used is None else f"{used / 1e6:.0f}"
        calls = "/".join(f"{1e3 * save['stall_s']:.1f}" for save in saves)
        staged = "/".join(f"{save['staged_s']:.3f}" for save in saves)
        durable = "/".join(f"{save['durable_s']:.2f}" for save in saves)
        lines.append(
            f"  {label_of(group, saver)[:34]:34} {calls:>17} {staged:>17} "
            f"{'/'.join(f'{rate / 1e9:.1f}' for rate in rates):>14} {ratios:>14} {durable:>14} "
            f"{_steps(saves, 'steps'):>9} {_steps(saves, 'idle_steps'):>9} {memory:>6}"
        )
    return lines


def _loads(group: dict[str, Any], parameters: dict[str, Any]) -> list[str]:
    limits = parameters.get("limits") or {}
    bounds = [limits.get("pinned_to_device")]
    if group["name"].endswith("_cold"):
        bounds.append(limits.get("disk_read"))
    known = [bound for bound in bounds if bound]
    line = f"{group['name']}: {group['title']}, GB/s:"
    for info in group["contenders"]:
        rate = group["summary"][info["name"]]["bytes_per_s"]
        share = f" ({rate / min(known):.2f} of the limit)" if known else ""
        line += f" {info['label']} {rate / 1e9:.2f}{share};"
    return [line]


def not_measured(skipped: dict[str, Any]) -> str:
    """Describes an entry of the figures that were skipped."""
    return f"not measured: {skipped['what']}: {skipped['reason']}"


def table(record: dict[str, Any]) -> list[str]:
    """Formats the record in at most MAX_LINES lines."""
    lines = [f"device: {record['device']}"]
    for part in record["parts"]:
        ended = outcome(part["status"])
        note = record["tests"] if part["part"] == "tests" else ""
        lines.append(
            f"{part['part']:10} {ended:14} {part['seconds']:4} s of {part['limit']:3}  {note}"
        )
    for training in record["training"] or []:
        verdict = training["failure"] or "losses are equal bit for bit"
        lines.append(
            f"  {training['variant']:20} killed after step {training['killed_after']}, restored "
            f"{training['restored']} of {training['steps']}: {verdict.splitlines()[0]}"
        )
    figures = record["figures"]
    if figures is not None:
        parameters = figures["parameters"]
        lines += describe_limits(parameters)
        for group in figures["groups"]:
            is_load = group["name"].startswith("loads_")
            lines += (_loads if is_load else _saves)(group, parameters)
        for skipped in figures["skipped"]:
            lines.append(not_measured(skipped))
    return [line[:_WIDTH] for line in lines[:MAX_LINES]]


def main(folder: Path, device: str) -> int:
    """Writes the record, prints the table and returns the exit status."""
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
    print("\n".join(table(record)), flush=True)
    if any(part["status"] for part in parts):
        return 1
    return _NO_DEVICE if device == "none" else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
