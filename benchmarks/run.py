"""Runs groups of benchmarks and writes one JSON file: ``python -m benchmarks.run [GROUP ...]``.

``python -m benchmarks.run TOOL ...`` runs a benchmark that has options and output of its own, such
as ``planning --ranks 1024``; ``TOOL --help`` describes it. All contenders of a group run in each
round. The numbers are meaningful only on an otherwise idle machine. --quick only checks that the
benchmarks work; do not quote its numbers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from . import groups, huggingface, machine, megatron, report
from .groups import FULL, QUICK, Run
from .results import Results
from .sizes import parse_size


def _use_object_stores(run: Run) -> None:
    importlib.import_module("benchmarks.object_stores").use_object_stores(run)


def _use_shared_file_systems(run: Run) -> None:
    importlib.import_module("benchmarks.cluster").use_shared_file_systems(run)


GROUPS: dict[str, Callable[[Run], None]] = {
    "save": groups.save_training_state,
    "load": groups.load_training_state,
    "partial": groups.load_parts,
    "replicas": groups.load_replicas,
    "small": groups.save_and_load_small_tensors,
    "many": groups.save_and_load_many_tensors,
    "memory": groups.measure_memory,
    "async": groups.save_in_background,
    "first": groups.compare_first_saves,
    "megatron": megatron.save_through_queues,
    "huggingface": huggingface.save_and_load_files,
    "objects": _use_object_stores,
    "cluster": _use_shared_file_systems,
}
#: Groups that need servers, and run only by name.
WITH_SERVERS = ("objects", "cluster")
#: Modules whose ``main`` accepts the arguments.
TOOLS = ("planning", "gpu")
# Loads need several checkpoints on disk at once; the margin is for headers and the file system.
_DISK_FACTOR = 4.2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "groups",
        nargs="*",
        metavar="GROUP",
        help=f"some of: {', '.join(GROUPS)} (default all but {' and '.join(WITH_SERVERS)}); or "
        f"one of: {', '.join(TOOLS)}",
    )
    parser.add_argument("--size", type=parse_size, help="of the training state (default 2GB)")
    parser.add_argument(
        "--tensors", type=int, help="parameters and moments in the training state (default 120)"
    )
    parser.add_argument("--small-tensors", type=int, help="tensors of 1 KiB (default 20,000)")
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
        "--quick",
        action="store_true",
        help="64 MB, 1,000 small tensors, 1 round, two or three ranks, unless other options set "
        "them",
    )
    return parser


def _require_room(directory: Path, state_bytes: int) -> None:
    free, needed = shutil.disk_usage(directory).free, int(state_bytes * _DISK_FACTOR)
    if free < needed:
        sys.exit(
            f"{directory} has {free / 1e9:.1f} GB free, but the benchmark needs "
            f"{needed / 1e9:.1f} GB. Pass another --dir or a smaller --size."
        )


def measure(arguments: Sequence[str]) -> Path:
    """Measures groups and returns the path of the JSON file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - GROUPS.keys():
        parser.error(f"unknown groups: {', '.join(sorted(unknown))}")
    given = {
        "state_bytes": options.size,
        "tensors": options.tensors,
        "small_tensors": options.small_tensors,
        "rounds": options.rounds,
    }
    effort = QUICK if options.quick else FULL
    effort = replace(effort, **{name: value for name, value in given.items() if value is not None})
    today = time.strftime("%Y-%m-%d", time.gmtime())
    out: Path = options.out or report.RESULTS / f"{today}.json"

    # Stock torch warns at every save and load of a single process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    options.dir.mkdir(parents=True, exist_ok=True)
    _require_room(options.dir, effort.state_bytes)
    parameters = {
        "size_bytes": effort.state_bytes,
        "tensors": effort.tensors,
        "small_tensors": effort.small_tensors,
        "rounds": effort.rounds,
        "only": options.groups,
        "quick": options.quick,
        "load_average_before": os.getloadavg()[0],
    }
    results = Results(machine.describe(options.dir), parameters)
    print(f"Measuring on {results.machine.sentence()}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.dir)).resolve()
    try:
        run = Run(directory, effort, results)
        groups.warm_up(run)
        for name in options.groups or [name for name in GROUPS if name not in WITH_SERVERS]:
            GROUPS[name](run)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    results.write(out)
    print(f"\n{report.describe(results, results.groups)}\n\nRaw samples are in {out}", flush=True)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a tool, or measures groups."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in TOOLS:
        importlib.import_module(f"benchmarks.{given[0]}").main(given[1:])
    else:
        measure(given)


if __name__ == "__main__":
    main()
