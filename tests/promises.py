"""The table of promises in the README, from the counts of ``make torture``.

    TORCH_CKPT_RESULTS=build/promises make torture SEED=1
    python -m tests.promises build/promises --out benchmarks/results/NAME.json --readme README.md

The first command leaves one JSON file for each kind of test; this one puts them together with a
description of the machine, and writes the block between the ``promises`` markers. Without --out the
counts are taken from a file that was put together before.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- promises:begin -->", "<!-- promises:end -->"

PARTS = ("powercut", "crash_states", "kills", "manager_kills", "faults", "early", "attacks")

Row = tuple[str, str, str]


def gathered(directory: Path) -> dict[str, Any]:
    """The files of one session of tests, as one document."""
    from benchmarks.machine import describe

    parts = {name: json.loads((directory / f"{name}.json").read_text()) for name in PARTS}
    for name in ("powercut", "crash_states", "manager_kills"):
        del parts[name]["rows"]  # what became of each is counted beside them
    for name in ("kills", "faults", "early"):
        del parts[name]["notes"]  # which points, for who looks for the cause
    return {"machine": vars(describe(Path.cwd())), "parts": parts}


def _of(part: dict[str, Any], engine: str, kinds: str = "") -> tuple[int, int]:
    found = [v for k, v in part["judged"].items() if k.startswith(f"{engine}, {kinds}")]
    return sum(v["broken"] for v in found), sum(v["cases"] for v in found)


def _share(counts: tuple[int, int]) -> str:
    broken, cases = counts
    return f"{broken:,} of {cases:,}"


def _swept(part: dict[str, Any], bad: tuple[str, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(bad, points) of ours and of stock's."""
    totals = {True: Counter[str](), False: Counter[str]()}
    for row, columns in part["rows"].items():
        totals[row.startswith("stock")].update(columns)
    ours, stock = (
        (sum(totals[is_stock][c] for c in bad), totals[is_stock]["points"])
        for is_stock in (False, True)
    )
    return ours, stock


def rows_of(parts: dict[str, Any]) -> list[Row]:
    """(what, torch_ckpt, stock) of each line of the table."""
    cuts, states = parts["powercut"], parts["crash_states"]
    kills, faults, attacks = parts["kills"], parts["faults"], parts["attacks"]
    killed = _swept(kills, ("a mix", "lost", "unreadable"))
    silent = _swept(faults, ("silent",))
    gone = _swept(faults, ("reported, nothing left to load",))
    tried, stopped, stock = attacked(attacks)
    return [
        (
            "reported saves that a power cut took away (ext4, xfs)",
            _share(_of(cuts, "torch_ckpt", "reported")),
            _share(_of(cuts, "stock", "reported")),
        ),
        (
            "crash states in which neither the old nor the new checkpoint loads, or a mix",
            _share(_of(states, "torch_ckpt")),
            _share(_of(states, "stock")),
        ),
        (
            "the process killed before each of its system calls: likewise",
            _share(killed[0]),
            _share(killed[1]),
        ),
        (
            "runs under a manager killed, by chance and before each call: a reported step is lost",
            _share(_of(parts["manager_kills"], "torch_ckpt")),
            "-",
        ),
        (
            "each system call failing once: the save is reported as done, and is not",
            _share(silent[0]),
            _share(silent[1]),
        ),
        ("likewise: no checkpoint is left, the old one included", _share(gone[0]), _share(gone[1])),
        ("hostile checkpoints that get what they want", _share((tried - stopped, tried)), stock),
    ]


def attacked(part: dict[str, Any]) -> tuple[int, int, str]:
    """Attacks tried, those that we stop, and what stock does, in words."""
    table = part["attacks"]
    stopped = sum(row["ours"].startswith("stopped") for row in table)
    stock = Counter(row["stock"].split()[0] for row in table if "stock" in row)
    harm = {name: stock[name] for name in ("executed", "read", "overwritten", "written", "hung")}
    harm["crashed"] = stock["died"]
    return len(table), stopped, ", ".join(f"{v} {k}" for k, v in harm.items() if v)


def block_of(document: dict[str, Any]) -> str:
    """What stands between the markers."""
    machine = document["machine"]
    seed = document["parts"]["kills"]["seed"]
    lines = [
        BEGIN,
        "| what was done to it | torch_ckpt | stock torch |",
        "| --- | ---: | ---: |",
        *(f"| {what} | **{ours}** | {stock} |" for what, ours, stock in rows_of(document["parts"])),
        "",
        f"`make torture SEED={seed}`, torch {machine['torch']}, Linux {machine['kernel']}, "
        f"{machine['date']}. [docs/durability.md](docs/durability.md) has the promises and their "
        "assumptions, [SECURITY.md](SECURITY.md) says who is trusted with what.",
        END,
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.promises",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("counts", type=Path, help="a directory of JSON files, or one file of all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    if arguments.counts.is_dir():
        document = gathered(arguments.counts)
    else:
        document = json.loads(arguments.counts.read_text())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    block = block_of(document)
    print(block)
    if arguments.readme is not None:
        text = arguments.readme.read_text()
        pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        assert pattern.search(text), f"{arguments.readme} has no {BEGIN} ... {END}"
        arguments.readme.write_text(pattern.sub(lambda _: block, text))


if __name__ == "__main__":
    main()
