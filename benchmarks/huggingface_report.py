"""Writes the figures of benchmarks.huggingface and benchmarks.publication into docs/huggingface.md.

python -m benchmarks.huggingface_report SAVES.json PUBLICATIONS.json --doc docs/huggingface.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .blocks import replace_block
from .machine import Machine

BEGIN = "<!-- huggingface-numbers: begin -->"
END = "<!-- huggingface-numbers: end -->"

#: Seconds and CPU seconds of each round, by contender.
Samples = dict[str, list[list[float]]]


def _rows(samples: Samples, first: str) -> list[str]:
    rows = []
    for name, rounds in samples.items():
        wall, cpu = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        ratios = [one[0] / base[0] for one, base in zip(rounds, samples[first], strict=False)]
        rows.append(f"| {name} | {wall:.2f} s | {cpu:.2f} s | {statistics.median(ratios):.2f} x |")
    return rows


def _table(title: str, samples: Samples) -> list[str]:
    first = next(iter(samples))
    head = [f"| {title} | time | CPU time | ratio |", "|---|---:|---:|---:|"]
    return ["", *head, *_rows(samples, first)]


def _memory(saves: dict[str, Any]) -> list[str]:
    budget = saves["memory_budget"] >> 20
    growths = [
        f"| {name} | {growth / (1 << 20):.0f} MiB |" for name, growth in saves["memory"].items()
    ]
    return [
        "",
        f"| `max_host_bytes` of {budget} MiB in torch_ckpt | memory per rank beyond the state |",
        "|---|---:|",
        *growths,
    ]


def block(saves: dict[str, Any], publications: dict[str, Any]) -> str:
    """Formats both results as Markdown."""
    size, ranks = saves["bytes"] / 1e9, saves["ranks"]
    lines = [
        f"Medians of {len(saves['saves']['checkpoint'])} rounds, two of torch's writer "
        f"({Machine(**saves['machine']).sentence()}). A ratio compares the times of a round with "
        "the first line of its table. The CPU time is the sum over all ranks.",
        *_table(f"save of {size:.0f} GB of bfloat16 by {ranks} ranks", saves["saves"]),
        *_memory(saves),
        *_table("load from the page cache, one process", saves["loads"]),
        "",
        "| elements changed | size of the delta | publish | with a delta | apply to tensors | "
        "against a copy of all tensors |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for percent, deltas in publications["deltas"].items():
        samples: Samples = deltas["samples"]

        def wall(name: str, samples: Samples = samples) -> str:
            return f"{statistics.median(one[0] for one in samples[name]):.2f} s"

        ratio = statistics.median(
            one[0] / base[0]
            for one, base in zip(
                samples["apply the delta"], samples["copy all tensors"], strict=True
            )
        )
        share = 100 * deltas["delta_bytes"] / publications["bytes"]
        lines.append(
            f"| {percent} % | {share:.1f} % | {wall('publish')} | {wall('publish with a delta')} | "
            f"{wall('apply the delta')} | {ratio:.2f} x |"
        )
    return "\n".join([*lines, *_table("time in the call", publications["stalls"])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the block."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.huggingface_report", description=__doc__
    )
    parser.add_argument("saves", type=Path, help="JSON file of benchmarks.huggingface")
    parser.add_argument("publications", type=Path, help="JSON file of benchmarks.publication")
    parser.add_argument("--doc", type=Path, required=True, help="Markdown file with the block")
    options = parser.parse_args(arguments)
    text = block(*(json.loads(file.read_text()) for file in (options.saves, options.publications)))
    options.doc.write_text(replace_block(options.doc.read_text(), BEGIN, END, text))


if __name__ == "__main__":
    main()
