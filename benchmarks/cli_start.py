"""Measures how long each command of torch-ckpt takes on a small checkpoint, from start to exit.

    python -m benchmarks.cli_start --out benchmarks/results/DATE-cli-start.json

Each round runs every command once, each in its own process, and starts with a different command.
For comparison a round also starts bare Python, and Python that imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import torch_ckpt

from . import machine

_MIN_ROUNDS = 5


def commands(root: Path) -> dict[str, list[str]]:
    """Returns the command line of each contender by its title."""
    step = str(root / "2")
    arguments_by_title = {
        "--version": ["--version"],
        "--help": ["--help"],
        "misspelled": ["lss"],
        "ls": ["ls", step],
        "steps": ["steps", str(root)],
        "verify": ["verify", step],
        "diff": ["diff", str(root / "1"), step],
        "show": ["show", step, "step"],
        "doctor": ["doctor", str(root), "--size", "1MB"],
    }
    return {
        "python": [sys.executable, "-c", "pass"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import torch_ckpt": [sys.executable, "-c", "import torch_ckpt"],
        **{
            title: [sys.executable, "-m", "torch_ckpt", *arguments]
            for title, arguments in arguments_by_title.items()
        },
    }


def save_steps(root: Path) -> None:
    """Saves the two steps that the commands inspect."""
    with torch_ckpt.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((256, 256), step), "step": step})


def measure(rounds: int, root: Path) -> dict[str, list[float]]:
    """Returns the milliseconds of each contender by round."""
    contenders = list(commands(root).items())
    milliseconds: dict[str, list[float]] = {title: [] for title, _ in contenders}
    # Round -1 is not counted: it reads the files of Python, torch and torch_ckpt from disk.
    for number in range(-1, rounds):
        first = number % len(contenders)
        for title, command in contenders[first:] + contenders[:first]:
            started_at = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if number >= 0:
                milliseconds[title].append(1e3 * (time.perf_counter() - started_at))
    return milliseconds


def main() -> None:
    """Measures all commands; prints or writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="the JSON file; default: print it")
    arguments = parser.parse_args()
    if arguments.rounds < _MIN_ROUNDS:
        parser.error(f"--rounds must be at least {_MIN_ROUNDS}")
    with tempfile.TemporaryDirectory() as root:
        save_steps(Path(root))
        measured = measure(arguments.rounds, Path(root))
    document = {
        "rounds": arguments.rounds,
        "milliseconds": {
            title: {
                "median": round(statistics.median(found), 1),
                "least": round(min(found), 1),
                "most": round(max(found), 1),
            }
            for title, found in measured.items()
        },
        "machine": dataclasses.asdict(machine.describe(Path.cwd())),
    }
    text = json.dumps(document, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
