"""Measures everything and writes one JSON file: ``python -m benchmarks.run``.

All contenders of a group run in each round. The numbers are meaningful only on an otherwise idle
machine. --quick only checks that the benchmark works; do not quote its numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from . import machine, report, states, suites, targets
from .background import Effort
from .manager import CallEffort
from .queue_saves import SAVERS_BY_QUEUE
from .results import Results

GROUPS = (
    "save",
    "load",
    "partial",
    "replicas",
    "small",
    "memory",
    "async",
    "first",
    "manager",
    *suites.QUEUE_GROUPS,
)
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
# Loads need two checkpoints on disk at once; the margin is for headers and the file system.
_DISK_FACTOR = 2.2
_REPEATS = 3  # of measurements that need a fresh process each time
_LATER_QUEUE_SAVES = 3  # timed saves after the first one; each process makes two more
_QUEUES = tuple(SAVERS_BY_QUEUE)
_FEW_QUEUES = ("ours", "nvrx", "mcore")
_QUICK_QUEUES = ("ours", "nvrx_copies", "mcore")
_QUICK_FEW_QUEUES = ("ours", "mcore")
_RESHARD_RANKS = (2, 3, 8)
_QUICK_RESHARD_RANKS = (3,)
_REPLICA_RANKS = (1, 2, 4, 8)
_QUICK_REPLICA_RANKS = (1, 2)
_EFFORT = Effort(idle_steps=40, least_steps=15)
_QUICK_EFFORT = Effort(idle_steps=5, least_steps=3)
_CALL_EFFORT = CallEffort(steps=100, others=10)
_QUICK_CALL_EFFORT = CallEffort(steps=5, others=2)


def parse_size(text: str) -> int:
    """Parses a number of bytes, such as '2GB', '512 MiB' or '1000000'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (examples: 2GB, 512MiB)")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=parse_size, help="of the training state (default 2GB)")
    parser.add_argument(
        "--tensors",
        type=int,
        default=120,
        help="parameters and moments in the training state (default %(default)s)",
    )
    parser.add_argument("--small-tensors", type=int, help="tensors of 1 KiB (default 20,000)")
    parser.add_argument(
        "--rank-size",
        type=parse_size,
        help="of the state that several ranks load: in total if it is sharded, for each rank if "
        "all ranks load the same (default a quarter of --size)",
    )
    parser.add_argument(
        "--replica-ranks",
        type=int,
        nargs="+",
        metavar="RANKS",
        help="numbers of ranks that load the same tensors (default 1 2 4 8)",
    )
    parser.add_argument("--rounds", type=int, help="per group (default 5)")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("build/bench"),
        help="where checkpoints are written; decides which disk is measured (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>.json)"
    )
    parser.add_argument(
        "--only", choices=GROUPS, action="append", default=[], help="repeat for several groups"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="64 MB, 1,000 small tensors, 1 round, two or three ranks, unless other options set "
        "them",
    )
    return parser


def _print(line: str) -> None:
    print(line, flush=True)


def _require_room(directory: Path, state_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    needed = int(state_bytes * _DISK_FACTOR)
    if free < needed:
        sys.exit(
            f"{directory} has {free / 1e9:.1f} GB free, but the benchmark needs "
            f"{needed / 1e9:.1f} GB. Pass another --dir or a smaller --size."
        )


def measure(setup: suites.Setup, results: Results, only: Sequence[str]) -> None:
    """Runs the chosen groups and fills `results`."""
    chosen = only or GROUPS
    suites.warm_up(setup)
    if {"save", "load", "partial", "async"} & set(chosen):
        state = states.training_state(setup.state_bytes, setup.tensor_count)
        spare = states.blank_copy(state)
        if "save" in chosen:
            suites.save_training_state(setup, results, state, spare)
        if "load" in chosen:
            suites.load_training_state(setup, results, state, spare)
        if "partial" in chosen:
            suites.load_quarter_of_rows(setup, results, state)
        if "async" in chosen:
            suites.save_in_background(setup, results, state, spare)
        # The following measurements build their own states in other processes.
        del state, spare
    if "partial" in chosen:
        suites.load_on_other_ranks(setup, results)
    if "replicas" in chosen:
        suites.load_replicas(setup, results)
    if "small" in chosen:
        suites.save_and_load_small_tensors(setup, results)
    if "memory" in chosen:
        suites.measure_memory(setup, results)
    if "first" in chosen:
        suites.compare_first_saves(setup, results)
    if "manager" in chosen:
        suites.measure_manager(setup, results)
    if set(suites.QUEUE_GROUPS) & set(chosen):
        suites.save_through_queues(setup, results, chosen)
    results.comparisons = targets.compare_groups(results.groups)
    results.comparisons += targets.compare_memory(results.memory)
    results.crossovers = targets.crossovers(results.groups)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Runs the benchmark and returns the path of the JSON file."""
    options = _parser().parse_args(arguments)
    quick: bool = options.quick
    size: int = options.size or (64_000_000 if quick else 2_000_000_000)
    small: int = options.small_tensors or (1_000 if quick else 20_000)
    rank_size: int = options.rank_size or size // 4
    reshard_ranks = _QUICK_RESHARD_RANKS if quick else _RESHARD_RANKS
    replica_ranks = sorted(
        set(options.replica_ranks or (_QUICK_REPLICA_RANKS if quick else _REPLICA_RANKS))
    )
    rounds: int = options.rounds or (1 if quick else 5)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    out: Path = options.out or Path("benchmarks/results") / f"{today}.json"

    # Stock torch warns at every save and load of a single process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    options.dir.mkdir(parents=True, exist_ok=True)
    _require_room(options.dir, size)
    results = Results(
        machine=machine.describe(options.dir),
        parameters={
            "size_bytes": size,
            "tensors": options.tensors,
            "small_tensors": small,
            "rank_size_bytes": rank_size,
            "rounds": rounds,
            "only": options.only,
            "quick": quick,
            "load_average_before": os.getloadavg()[0],
        },
    )
    _print(f"Measuring on {results.machine.sentence()}")
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    try:
        setup = suites.Setup(
            directory=directory,
            state_bytes=size,
            tensor_count=options.tensors,
            small_tensor_count=small,
            rank_bytes=rank_size,
            reshard_worlds=reshard_ranks,
            replica_worlds=replica_ranks,
            rounds=rounds,
            repeats=1 if quick else _REPEATS,
            later_queue_saves=1 if quick else _LATER_QUEUE_SAVES,
            queues=_QUICK_QUEUES if quick else _QUEUES,
            few_queues=_QUICK_FEW_QUEUES if quick else _FEW_QUEUES,
            effort=_QUICK_EFFORT if quick else _EFFORT,
            call_effort=_QUICK_CALL_EFFORT if quick else _CALL_EFFORT,
            print_line=_print,
        )
        measure(setup, results, options.only)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    results.write(out)
    _print("\n" + report.full_report(results))
    _print(f"Raw samples are in {out}")
    return out


if __name__ == "__main__":
    main()
