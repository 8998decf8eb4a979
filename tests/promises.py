"""The tables of faults in README.md and docs/durability.md, from the counts of ``make torture``.

    TORCH_CKPT_RESULTS=build/promises make torture SEED=1
    python -m tests.promises build/promises --out benchmarks/results/NAME.json --doc README.md
    python -m tests.promises benchmarks/results/NAME.json --doc docs/durability.md

The first command writes one JSON file for each kind of test. The second joins these files, adds a
description of the machine, and fills the block between the markers of the document: ``promises``
for the short table, ``promises-all`` for all rows.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.blocks import replace_block

PARTS = ("powercut", "crash_states", "kills", "manager_kills", "faults", "early", "attacks")

Row = tuple[str, str, str, str]


def gathered(directory: Path) -> dict[str, Any]:
    """Joins the files of one test session into one document."""
    from benchmarks.machine import describe

    parts = {name: json.loads((directory / f"{name}.json").read_text()) for name in PARTS}
    for name in ("powercut", "crash_states", "manager_kills"):
        del parts[name]["rows"]  # the judged outcomes are counted separately
    for name in ("kills", "faults", "early"):
        del parts[name]["notes"]  # the points that failed, for debugging
    return {"machine": vars(describe(Path.cwd())), "parts": parts}


def _of(part: dict[str, Any], engine: str, kinds: str = "") -> tuple[int, int]:
    found = [v for k, v in part["judged"].items() if k.startswith(f"{engine}, {kinds}")]
    return sum(v["broken"] for v in found), sum(v["cases"] for v in found)


def _share(counts: tuple[int, int]) -> str:
    broken, cases = counts
    return f"{broken:,} of {cases:,}"


def _swept(part: dict[str, Any], bad: tuple[str, ...]) -> tuple[str, str]:
    """Returns the counts of torch_ckpt, and of stock for each of its settings."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row, columns in part["rows"].items():
        is_stock = row.startswith("stock")
        totals[row.rpartition(", ")[2] if is_stock else "torch_ckpt"].update(columns)
    shares = {
        name: _share((sum(total[column] for column in bad), total["points"]))
        for name, total in totals.items()
    }
    ours = shares.pop("torch_ckpt")
    return ours, "; ".join(f"{share} ({setting})" for setting, share in shares.items())


def rows_of(parts: dict[str, Any]) -> list[Row]:
    """Returns the rows of the full table: fault, outcome, counts of torch_ckpt, counts of stock."""
    cuts, states = parts["powercut"], parts["crash_states"]
    kills, faults, attacks = parts["kills"], parts["faults"], parts["attacks"]
    tried, stopped, stock = attacked(attacks)
    return [
        (
            "Simulated power cut right after a save reports success (ext4, xfs)",
            "Saves lost",
            _share(_of(cuts, "torch_ckpt", "reported")),
            _share(_of(cuts, "stock", "reported")) + " (thread_count=2)",
        ),
        (
            "Simulated crash at any write of a save (ext4, xfs)",
            "Disk states from which no checkpoint loads, or one that mixes old and new data",
            _share(_of(states, "torch_ckpt")),
            _share(_of(states, "stock")) + " (thread_count=2)",
        ),
        (
            "Process killed before each system call of a save",
            "Kills that leave no loadable checkpoint, or a mix of old and new data",
            *_swept(kills, ("a mix", "lost", "unreadable")),
        ),
        (
            "Training with a manager killed at random moments and before each system call",
            "Steps lost that were reported as complete",
            _share(_of(parts["manager_kills"], "torch_ckpt")),
            "-",
        ),
        (
            "Each system call of a save fails once",
            "Incomplete saves reported as successful",
            *_swept(faults, ("silent",)),
        ),
        (
            "Each system call of a save fails once",
            "Failed saves after which no checkpoint loads, not even the old one",
            *_swept(faults, ("reported, nothing left to load",)),
        ),
        (
            "Malicious or damaged checkpoint loaded",
            "Harmful outcomes",
            _share((tried - stopped, tried)),
            stock,
        ),
    ]


#: Indexes of the rows that the README shows.
SHORT = (0, 1, 4, 6)


#: Successful attacks on stock, by the first word of their outcome in the counts.
_HARM = {
    "executed": "ran code",
    "read": "loaded without an error",
    "overwritten": "overwrote files",
    "written": "created files elsewhere",
    "hung": "hung",
    "died": "crashed",
}


def attacked(part: dict[str, Any]) -> tuple[int, int, str]:
    """Returns the number of attacks, the number stopped, and the outcomes with stock in words."""
    table = part["attacks"]
    stopped = sum(row["ours"].startswith("stopped") for row in table)
    stock = Counter(row["stock"].split()[0] for row in table if "stock" in row)
    harm = {text: stock[outcome] for outcome, text in _HARM.items() if stock[outcome]}
    share = _share((sum(harm.values()), stock.total()))
    return len(table), stopped, f"{share}: {', '.join(f'{v} {k}' for k, v in harm.items())}"


def block_of(document: dict[str, Any], rows: list[Row]) -> str:
    """Makes the table and its source in Markdown."""
    machine = document["machine"]
    seed = document["parts"]["kills"]["seed"]
    return "\n".join(
        [
            "| fault injected | outcome counted | torch_ckpt | stock torch |",
            "| --- | --- | ---: | --- |",
            *(
                f"| {fault} | {outcome} | **{ours}** | {stock} |"
                for fault, outcome, ours, stock in rows
            ),
            "",
            "Stock torch ran with the given `thread_count`, if any, and otherwise by default, with "
            f"`sync_files=True`. `make torture SEED={seed}` reproduces the counts. "
            f"Measured with torch {machine['torch']}, Linux {machine['kernel']}, on "
            f"{machine['date']}.",
        ]
    )


def sentence_of(rows: list[Row]) -> str:
    """Makes a sentence of the first row, for the head of a document."""
    _fault, _outcome, ours, stock = rows[0]
    return (
        "A simulated power cut right after each save reported success lost "
        f"{ours} saves of torch_ckpt, and\n{stock.replace('thread_count=2', '`thread_count=2`')} "
        "of stock torch: [faults](#why-believe-it-injected-faults), "
        "[times](#save-and-load-times-cpu)."
    )


def filled(text: str, document: dict[str, Any]) -> str:
    """Replaces the blocks of counts in a text.

    Raises:
        ValueError: the text has no such block.
    """
    rows = rows_of(document["parts"])
    blocks = {
        "promises-sentence": sentence_of(rows),
        "promises": block_of(document, [rows[index] for index in SHORT]),
        "promises-all": block_of(document, rows),
    }
    present = {marker: block for marker, block in blocks.items() if f"<!-- {marker}:begin" in text}
    if not present:
        raise ValueError(
            "the document has no block <!-- promises:begin --> ... <!-- promises:end -->"
        )
    for marker, block in present.items():
        text = replace_block(text, f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->", block)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.promises",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("counts", type=Path, help="a directory of JSON files, or one file of all")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--doc", type=Path, help="Markdown file whose block is filled")
    arguments = parser.parse_args()
    if arguments.counts.is_dir():
        document = gathered(arguments.counts)
    else:
        document = json.loads(arguments.counts.read_text())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(block_of(document, rows_of(document["parts"])))
    if arguments.doc is not None:
        arguments.doc.write_text(filled(arguments.doc.read_text(), document))


if __name__ == "__main__":
    main()
