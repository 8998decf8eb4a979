"""Measures saves and loads of a state on a CUDA device: ``python -m benchmarks.gpu``.

Each measurement runs in its own process with a time limit, and the results are written after each
one, so a hang or a crash costs one measurement. Copies to the host are measured with a checkpoint
directory in memory, where no disk delays them; savers are compared on the disk. With
`--device cpu` and a small `--size` the same code runs without a device.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_ckpt._base.system import mount_of

from . import fresh_process, machine
from .background import Trace, summarize
from .contenders import DEVICE_SAVERS
from .measure import Sample
from .results import ContenderInfo, Group, Results, Skipped
from .run import parse_size

#: Runs a module of this package with arguments, for at most so many seconds.
Runner = Callable[[str, Sequence[str], float], Any]

COPIES_TO_HOST = "copies_to_host"
ON_DISK = "on_disk"
LOADS = "loads"
PARTS = (COPIES_TO_HOST, LOADS, ON_DISK)
_LIMIT_BYTES = 2_000_000_000
# The state for the disk is as large as the disk writes in _DISK_SECONDS, within these bounds.
_DISK_SECONDS = 1.0
_DISK_BYTES = (200_000_000, 1_000_000_000)
# With less time left a process is not started.
_MIN_SECONDS = 8.0
_SPARE_HOST_BYTES = 1 << 30


@dataclass
class _Run:
    """State of a run: the options, the results so far, and the deadline."""

    options: argparse.Namespace
    results: Results
    run: Runner
    directory: Path
    in_memory: Path
    deadline: float
    groups: dict[str, Group] = field(default_factory=dict)

    def measure(self, what: str, arguments: Sequence[object], seconds: float) -> Any | None:
        """Returns the measurement of a process; None, and a reason in the results, if it fails."""
        left = min(seconds, self.deadline - time.monotonic())
        if left < _MIN_SECONDS:
            self.skip(what, "there was no time left")
            return None
        command = [*map(str, arguments), "--device", self.options.device]
        print(f"{what} ...", flush=True)
        try:
            return self.run("gpu_process", command, left)
        except Exception as error:
            self.skip(what, str(error))
            return None

    def skip(self, what: str, reason: str) -> None:
        """Records that something could not be measured, with the last line of the reason."""
        last = reason.strip().splitlines()[-1:]
        self.results.skipped.append(Skipped(what, *last or [""]))
        print(f"{what}: {reason}", flush=True)
        self.write()

    def add(self, group: str, title: str, total: int, info: ContenderInfo, sample: Sample) -> None:
        """Adds a sample to a group. Makes the group if it does not exist."""
        if group not in self.groups:
            self.groups[group] = Group(group, title, total, [], [])
            self.results.groups.append(self.groups[group])
        if not self.groups[group].has(info.name):
            self.groups[group].contenders.append(info)
        self.groups[group].samples.append(sample)

    def write(self) -> None:
        """Writes the results so far."""
        self.results.write(self.options.out)


def _sizes(run: _Run, shape: str, total: int) -> list[object]:
    count = run.options.tensors[shape]
    return ["--shape", shape, "--size", total, "--tensors", count]


def _describe_work(run: _Run, shape: str, total: int, where: Path) -> str:
    return (
        f"{total / 1e9:.3g} GB in {run.options.tensors[shape]} tensors, "
        f"{mount_of(where).file_system}"
    )


def _measure_machine(run: _Run) -> None:
    parameters = run.results.parameters
    common: list[object] = ["--dir", run.directory]
    size = min(run.options.size, _LIMIT_BYTES)
    parameters["limits"] = run.measure("limits", ["limits", *common, "--size", size], 60) or {}
    parameters["io"] = run.measure("io", ["io", *common], 30) or {}
    run.write()


def _measure_saver(run: _Run, name: str, group: str, shape: str, total: int, where: Path) -> None:
    arguments: list[object] = [name, *_sizes(run, shape, total), "--dir", where]
    arguments += ["--saves", run.options.saves, "--idle-steps", run.options.idle_steps]
    if where == run.in_memory:
        # The default, half of the free memory, may be less than the state.
        arguments += ["--max-host-bytes", total + _SPARE_HOST_BYTES]
    found = run.measure(f"{group}_{shape}: {name}", arguments, run.options.seconds_each)
    if found is None:
        return
    traces = [Trace(**trace) for trace in found["saves"]]
    work = _describe_work(run, shape, total, where)
    # One sample for each save: the second save of a process may still allocate memory, so a median
    # over the second and later saves describes neither.
    for number, trace in enumerate(traces):
        kind = "first" if number == 0 else "later"
        contender = f"{kind}_{name}"
        info = ContenderInfo(contender, f"{found['label']}: {kind}", found["kind"])
        sample = summarize(contender, [trace], found["bytes"], round_index=number)
        run.add(f"{group}_{shape}", work, found["bytes"], info, sample)
    memory = run.results.parameters["device_memory_bytes"]
    memory[f"{group}_{shape}.{name}"] = found["device_memory_bytes"]
    run.write()


def _measure_loads(run: _Run, shape: str, total: int) -> None:
    arguments: list[object] = ["loads", *_sizes(run, shape, total), "--dir", run.directory]
    arguments += ["--saves", run.options.saves - 1]
    found = run.measure(f"loads_{shape}", arguments, run.options.seconds_each)
    if found is None:
        return
    for reason in sorted(set(found["skipped"])):
        run.skip(f"loads_{shape}", reason)
    for entry in found["samples"]:
        name, group = entry["contender"], f"loads_{shape}_{entry['cache']}"
        kind = "ours" if name.startswith("ours") else "stock"
        label = {"ours_call": "torch_ckpt.load", "stock": "stock dcp.load"}[name]
        sample = Sample(name, entry["round"], 0, entry["wall_s"], 0.0, found["bytes"])
        work = f"{_describe_work(run, shape, total, run.directory)}, {entry['cache']} page cache"
        run.add(group, work, found["bytes"], ContenderInfo(name, label, kind), sample)
    run.write()


def _disk_bytes(run: _Run) -> int:
    """Returns the size of the states to write to the disk, in bytes."""
    if run.options.disk_size is not None:
        return int(run.options.disk_size)
    least, most = _DISK_BYTES
    rate = run.results.parameters["limits"].get("disk_write", 0.0)
    size: int = run.options.size
    return min(size, max(least, min(most, int(rate * _DISK_SECONDS))))


def _measure_all(run: _Run) -> None:
    _measure_machine(run)
    parts = run.options.only or PARTS
    if COPIES_TO_HOST in parts:
        for shape in run.options.tensors:
            _measure_saver(
                run, "ours_overlapped", COPIES_TO_HOST, shape, run.options.size, run.in_memory
            )
    disk_bytes = run.results.parameters["disk_bytes"] = _disk_bytes(run)
    if LOADS in parts:
        _measure_loads(run, "few", disk_bytes)
    if ON_DISK in parts:
        for shape in run.options.tensors:
            for name in run.options.savers:
                _measure_saver(run, name, ON_DISK, shape, disk_bytes, run.directory)


def _device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="of the state")
    parser.add_argument(
        "--disk-size",
        type=parse_size,
        help="on the disk (default what it writes in a second, at most 1 GB)",
    )
    parser.add_argument("--few", type=int, default=300, help="tensors (default %(default)s)")
    parser.add_argument("--many", type=int, default=20_000, help="tensors (default %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="of each saver, the first included")
    parser.add_argument("--idle-steps", type=int, default=30, help="of training, before a save")
    parser.add_argument("--savers", nargs="+", choices=DEVICE_SAVERS, default=DEVICE_SAVERS)
    parser.add_argument("--only", choices=PARTS, action="append", default=[])
    parser.add_argument("--seconds", type=float, default=600.0, help="for all that is measured")
    parser.add_argument("--seconds-each", type=float, default=60.0, help="for one process")
    parser.add_argument("--dir", type=Path, default=Path("build/gpu-bench"), help="on the disk")
    parser.add_argument("--memory-dir", type=Path, default=Path("/dev/shm"), help="in memory")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    return parser


def main(arguments: Sequence[str] | None = None, run: Runner = fresh_process.run) -> Results:
    """Measures, and writes the results."""
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    options.tensors = {"few": options.few, "many": options.many}
    options.dir.mkdir(parents=True, exist_ok=True)
    results = Results(
        machine=machine.describe(options.dir),
        parameters={
            "size_bytes": options.size,
            "tensors": options.tensors,
            "rounds": 1,
            "only": options.only,
            "quick": options.device == "cpu",
            "device": _device(options.device),
            "device_memory_bytes": {},
        },
    )
    directories: list[Path] = []
    try:
        in_memory = options.dir
        # The checkpoint and the staging memory each hold the state once.
        if options.memory_dir.is_dir() and (
            shutil.disk_usage(options.memory_dir).free > 2 * options.size
        ):
            in_memory = options.memory_dir
        for parent in (options.dir, in_memory):
            made = tempfile.mkdtemp(prefix="torch-ckpt-gpu-", dir=parent)
            directories.append(Path(made).resolve())
        _measure_all(_Run(options, results, run, directories[0], directories[1], deadline))
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        results.write(options.out)
    return results


def end_by_signal(number: int, _frame: object) -> None:
    """Raises SystemExit, so that this process also ends the processes that it started."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_by_signal)
    main()
