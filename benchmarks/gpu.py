"""Measures saves and loads of a state on a CUDA device: ``python -m benchmarks.run gpu``.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_ckpt
from torch_ckpt._base.system import mount_of

from . import fresh_process, limits, machine, pagecache, states
from .background import Trace, summarize, trace_save
from .contenders import DEVICE_SAVERS, LOADERS, device_saver, our_background_saver
from .measure import Contender, Sample, settle
from .results import ContenderInfo, Group, Results
from .sizes import parse_size
from .states import State
from .training import Training, one_thread

#: Calls a function with arguments in a fresh process, within a time limit.
Runner = Callable[..., Any]

COPIES_TO_HOST, ON_DISK, LOADS = "copies_to_host", "on_disk", "loads"
PARTS = (COPIES_TO_HOST, LOADS, ON_DISK)
_LIMIT_BYTES = 2_000_000_000
# With less time left a process is not started.
_MIN_SECONDS = 8.0
_SPARE_HOST_BYTES = 1 << 30
_WARM_UP_STEPS = 10
_COPIES = 5


def build_state(shape: str, size: int, count: int, device: str) -> State:
    """Builds a training state of decoder shapes ("few"), or tensors of one size ("many")."""
    if shape == "few":
        return states.training_state(size, count, device=device)
    return states.small_tensors_state(count, size // count, device=device)


def synchronize(device: str) -> None:
    """Waits for the work of a CUDA device; does nothing for "cpu"."""
    if device != "cpu":
        torch.cuda.synchronize()


def _require_equal(what: object, expected: State, found: State) -> None:
    differing = states.first_difference(expected, found)
    if differing is not None:
        raise AssertionError(f"{what}: {differing} is not what was saved")


def make_round_trip(device: str) -> None:
    """Saves a small state from a device and loads it back. compute-sanitizer runs it."""
    state = build_state("few", 20_000_000, 60, device)
    found = states.blank_copy(state)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        torch_ckpt.async_save(state, path, staging="overlapped").result()
        torch_ckpt.load(found, path)
    _require_equal(device, state, found)


# --- measurements, each in a process of its own --------------------------------------------------


def measure_limits(device: str, size: int, directory: str) -> dict[str, Any]:
    """Returns the bytes per second of the best of a few large copies, and of the disk."""
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    on_device.random_()
    found: dict[str, Any] = {}
    for kind in ("pinned", "pageable"):
        pinned = kind == "pinned" and device != "cpu"
        on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        ways = {"to_host": (on_device, on_host), "to_device": (on_host, on_device)}
        for way, (source, target) in ways.items():
            copy = partial(_copy, source, target, device)
            found[f"{kind}_{way}"] = size / min(_seconds(copy) for _ in range(_COPIES))
        del on_host
    path = Path(directory) / "raw"
    if limits.direct_io_works(path.parent):
        write = partial(limits.RawWriter().write, path, size, limits.WRITE_SHAPES["raw_direct_2x2"])
        settle()
        found["disk_write"] = size / _seconds(write)
        read = limits.RawReader(limits.READ_SHAPES["raw_direct_8x4"]).read
        found["disk_read"] = size / _seconds(partial(read, sorted(path.iterdir())))
        shutil.rmtree(path)
    return found


def _copy(source: torch.Tensor, target: torch.Tensor, device: str) -> None:
    target.copy_(source, non_blocking=True)
    synchronize(device)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_saver(
    name: str,
    work: tuple[str, int, int, str],
    directory: str,
    saves: int,
    idle_steps: int,
    max_host_bytes: int | None,
) -> dict[str, Any]:
    """Traces the first save of the process and later saves.

    A checkpoint of our savers must load bit for bit.

    Args:
        work: arguments of build_state.
    """
    state, device = build_state(*work), work[3]
    target = Path(directory) / "measured"
    training = Training(device=device)

    def step() -> None:
        training.step()
        synchronize(device)

    with device_saver(name) as saver, one_thread():
        if max_host_bytes is not None and saver.kind == "ours":
            saver = our_background_saver(name.removeprefix("ours_"), max_host_bytes)
        for _ in range(_WARM_UP_STEPS):
            step()
        contender = Contender(
            name=name,
            label=saver.label,
            kind=saver.kind,
            run=lambda: saver.start(state, target),
            prepare=partial(shutil.rmtree, target, ignore_errors=True),
        )
        # The duration of idle steps drifts, so measure them before each save.
        traces = [trace_save(contender, step, idle_steps) for _ in range(saves)]
    if saver.kind == "ours":
        found = states.blank_copy(state)
        torch_ckpt.load(found, target)
        _require_equal(target, state, found)
    shutil.rmtree(target)
    return {
        "label": saver.label,
        "kind": saver.kind,
        "bytes": states.payload_bytes(state),
        "saves": [asdict(trace) for trace in traces],
    }


def measure_loads(work: tuple[str, int, int, str], directory: str, rounds: int) -> dict[str, Any]:
    """Times loads to the device, from the page cache and from the disk."""
    state, device = build_state(*work), work[3]
    path = Path(directory) / "loaded"
    torch_ckpt.save(state, path)
    files = sorted(path.glob("*.distcp"))
    targets = states.blank_copy(state)
    found: dict[str, Any] = {"bytes": states.payload_bytes(state), "warm": [], "cold": []}
    for cache, prepare in (("warm", pagecache.warm), ("cold", pagecache.evict)):
        for number in range(rounds):
            for name in ("ours_call", "stock"):
                states.wipe(targets)
                try:
                    prepare(files)
                except pagecache.CacheStateError:
                    continue  # tmpfs consists of page cache only
                synchronize(device)
                began = time.perf_counter()
                LOADERS[name].load(targets, path)
                synchronize(device)
                seconds = time.perf_counter() - began
                found[cache].append({"contender": name, "round": number, "wall_s": seconds})
                _require_equal(name, state, targets)
    shutil.rmtree(path)
    return found


# --- the process that starts the measurements ----------------------------------------------------


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

    def measure(
        self, what: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any | None:
        """Returns the result of a measurement; None, and the reason in the results, if it fails."""
        left = min(seconds, self.deadline - time.monotonic())
        if left < _MIN_SECONDS:
            self.skip(what, "there was no time left")
            return None
        print(f"{what} ...", flush=True)
        try:
            return self.run(function, *arguments, timeout=left)
        except Exception as error:
            self.skip(what, str(error))
            return None

    def skip(self, what: str, reason: str) -> None:
        """Records that something could not be measured, with the last line of the reason."""
        last = reason.strip().splitlines()[-1:]
        self.results.skipped.append({"what": what, "reason": "".join(last)})
        print(f"{what}: {reason}", flush=True)
        self.write()

    def work(self, shape: str, size: int) -> tuple[str, int, int, str]:
        """Returns arguments of build_state."""
        return shape, size, self.options.tensors[shape], self.options.device

    def add(
        self, group: str, shape: str, where: Path, size: int, info: ContenderInfo, sample: Sample
    ) -> None:
        """Adds a sample to a group. Makes the group if it does not exist."""
        if group not in self.groups:
            title = f"{size / 1e9:.3g} GB in {self.options.tensors[shape]} tensors, "
            title += mount_of(where).file_system
            title += f", {group.rpartition('_')[2]} page cache" if group.startswith(LOADS) else ""
            self.groups[group] = Group(group, title, size, [], [])
            self.results.groups.append(self.groups[group])
        if info not in self.groups[group].contenders:
            self.groups[group].contenders.append(info)
        self.groups[group].samples.append(sample)

    def write(self) -> None:
        """Writes the results so far."""
        self.results.write(self.options.out)


def _measure_saver(run: _Run, name: str, part: str, shape: str, size: int, where: Path) -> None:
    group, options = f"{part}_{shape}", run.options
    # The default, half of the free memory, may be less than the state.
    budget = size + _SPARE_HOST_BYTES if where == run.in_memory else None
    arguments = run.work(shape, size), where, options.saves, options.idle_steps, budget
    what = f"{group}: {name}"
    found = run.measure(what, options.seconds_each, measure_saver, name, *arguments)
    if found is None:
        return
    # One sample for each save: the second save of a process may still allocate memory, so a median
    # over the second and later saves describes neither.
    for number, trace in enumerate(found["saves"]):
        kind = "later" if number else "first"
        contender = f"{kind}_{name}"
        info = ContenderInfo(contender, f"{found['label']}: {kind}", found["kind"])
        sample = summarize(contender, [Trace(**trace)], number)
        run.add(group, shape, where, found["bytes"], info, sample)
    run.write()


def _measure_loads(run: _Run, shape: str, size: int) -> None:
    arguments = run.work(shape, size), run.directory, run.options.saves - 1
    found = run.measure(f"loads_{shape}", run.options.seconds_each, measure_loads, *arguments)
    if found is None:
        return
    for cache in ("warm", "cold"):
        for sample in found[cache]:
            loader = LOADERS[sample["contender"]]
            info = ContenderInfo(sample["contender"], loader.label, loader.kind)
            group = f"{LOADS}_{shape}_{cache}"
            run.add(group, shape, run.directory, found["bytes"], info, sample)
    run.write()


def _measure_all(run: _Run) -> None:
    options, parameters = run.options, run.results.parameters
    size = min(options.size, _LIMIT_BYTES)
    parameters["limits"] = (
        run.measure("limits", 60, measure_limits, options.device, size, run.directory) or {}
    )
    run.write()
    parts = options.only or PARTS
    if COPIES_TO_HOST in parts:
        for shape in options.tensors:
            _measure_saver(
                run, "ours_overlapped", COPIES_TO_HOST, shape, options.size, run.in_memory
            )
    if LOADS in parts:
        _measure_loads(run, "few", options.disk_size)
    if ON_DISK in parts:
        for shape in options.tensors:
            for name in options.savers:
                _measure_saver(run, name, ON_DISK, shape, options.disk_size, run.directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="of the state")
    parser.add_argument(
        "--disk-size", type=parse_size, default=parse_size("1GB"), help="of the state on the disk"
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
    parser.add_argument("--out", type=Path, default=Path("build/gpu-bench.json"), help="JSON file")
    parser.add_argument(
        "--round-trip", action="store_true", help="only save a small state and load it back"
    )
    return parser


def main(arguments: Sequence[str] | None = None, run: Runner = fresh_process.run) -> None:
    """Measures, and writes the results."""
    options = _parser().parse_args(arguments)
    if options.round_trip:
        make_round_trip(options.device)
        return
    deadline = time.monotonic() + options.seconds
    options.tensors = {"few": options.few, "many": options.many}
    options.dir.mkdir(parents=True, exist_ok=True)
    parameters = {
        "size_bytes": options.size,
        "tensors": options.tensors,
        "rounds": 1,
        "only": options.only,
        "quick": options.device == "cpu",
        "device": "cpu" if options.device == "cpu" else torch.cuda.get_device_name(0),
    }
    results = Results(machine.describe(options.dir), parameters)
    in_memory = options.dir
    # The checkpoint and the staging memory each hold the state once.
    if options.memory_dir.is_dir() and (
        shutil.disk_usage(options.memory_dir).free > 2 * options.size
    ):
        in_memory = options.memory_dir
    try:
        with _scratch(options.dir) as on_disk, _scratch(in_memory) as memory, ending_by_sigterm():
            _measure_all(_Run(options, results, run, on_disk, memory, deadline))
    finally:
        results.write(options.out)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="torch-ckpt-gpu-", dir=parent, ignore_cleanup_errors=True
    ) as made:
        yield Path(made).resolve()


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Raises SystemExit after SIGTERM, so that this process also ends those that it started."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
