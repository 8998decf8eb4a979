"""Table of a run of scripts/gpu_run.sh: ``python -m benchmarks.gpu_report --parts F --out FOLDER``.

Writes FOLDER/run.json and prints at most MOST_LINES lines: the parts and how they ended, then the
figures of FOLDER/figures.json. Exit status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MOST_LINES = 60
_GB = 1e9


def parts_of(text: str) -> list[dict[str, Any]]:
    """Parts of a run, from lines of name, outcome and seconds with tabs between them."""
    parts = []
    for line in text.splitlines():
        name, outcome, seconds = line.split("\t")
        parts.append({"name": name, "outcome": outcome, "seconds": int(seconds)})
    return parts


def lines_of(parts: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> list[str]:
    """Lines of the table.

    Args:
        parts: as :func:`parts_of` returns them.
        figures: content of figures.json; empty if the part did not get that far.
    """
    lines = [f"{part['name']:10} {part['seconds']:4} s  {part['outcome']}" for part in parts]
    lines += _figures(figures) if figures else ["no figures"]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} lines more"]
    return lines


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    parameters = figures["parameters"]
    limits = parameters.get("limits", {})
    if limits:
        yield "limits, GB/s: " + ", ".join(
            f"{name} {value / _GB:.1f}"
            for name, value in limits.items()
            if isinstance(value, float)
        )
    if parameters.get("io"):
        yield "I/O: " + ", ".join(f"{name} {value}" for name, value in parameters["io"].items())
    memory = parameters.get("device_memory_bytes", {})
    for group in figures["groups"]:
        yield f"{group['name']}: {group['title']}"
        if group["name"].startswith("loads"):
            yield from _loads(group, limits)
        else:
            yield from _saves(group, limits, memory)
    for skipped in figures.get("skipped", []):
        yield f"not measured: {skipped['what']}: {skipped['reason'].splitlines()[-1][:120]}"


def _saves(
    group: Mapping[str, Any], limits: Mapping[str, Any], memory: Mapping[str, int | None]
) -> Iterator[str]:
    labels = {info["name"]: info["label"] for info in group["contenders"]}
    pinned = limits.get("pinned_to_host")
    for sample in group["samples"]:
        rate = group["bytes"] / sample["staged_s"]
        parts = [
            f"call {sample['stall_s']:.3f} s",
            f"staged {sample['staged_s']:.3f} s ({rate / _GB:.1f} GB/s"
            + (f", {rate / pinned:.2f} of pinned)" if pinned else ")"),
            f"committed {sample['durable_s']:.2f} s",
        ]
        steps = _steps(sample["saves"])
        if steps:
            parts.append(steps)
        used = memory.get(f"{group['name']}.{sample['contender'].split('_', 1)[1]}")
        if used is not None:
            parts.append(f"device memory {used / 1e6:.0f} MB")
        yield f"  {labels[sample['contender']]}: {', '.join(parts)}"


def _steps(saves: Sequence[Mapping[str, Any]]) -> str:
    """Mean and 99th percentile of training steps in the background of saves."""
    beside = sorted(end - begin for save in saves for begin, end in save["steps"])
    if not beside:
        return ""
    percentile = beside[min(len(beside) - 1, int(0.99 * len(beside)))]
    text = f"steps {statistics.fmean(beside) * 1e3:.1f} ms, p99 {percentile * 1e3:.1f} ms"
    idle = [end - begin for save in saves for begin, end in save["idle_steps"]]
    return f"{text} (idle {statistics.fmean(idle) * 1e3:.1f} ms)" if idle else text


def _loads(group: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[str]:
    # A cold load cannot be faster than the disk, and none faster than the copy to the device.
    names = ["pinned_to_device"] + (["disk_read"] if group["name"].endswith("cold") else [])
    most = min((limits[name] for name in names if limits.get(name)), default=None)
    for info in group["contenders"]:
        seconds = statistics.median(
            sample["wall_s"] for sample in group["samples"] if sample["contender"] == info["name"]
        )
        rate = group["bytes"] / seconds
        share = f", {rate / most:.2f} of the limit" if most else ""
        yield f"  {info['label']}: {seconds:.3f} s ({rate / _GB:.2f} GB/s{share})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    parts = parts_of(options.parts.read_text())
    has_device = torch.cuda.is_available()
    record = {
        "device": torch.cuda.get_device_name() if has_device else "no device",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": parts,
    }
    (options.out / "run.json").write_text(json.dumps(record, indent=1))
    file = options.out / "figures.json"
    figures = json.loads(file.read_text()) if file.exists() else {}
    print("\n".join([f"device: {record['device']}", *lines_of(parts, figures)][:MOST_LINES]))
    return int(any(part["outcome"].startswith("failed") for part in parts))


if __name__ == "__main__":
    sys.exit(main())
