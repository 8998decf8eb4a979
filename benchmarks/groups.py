"""The groups of contenders. Each function builds contenders, times them and cleans up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import torch_ckpt

from . import contenders, fresh_process, limits, memory, pagecache, ranks, states
from .background import Trace, summarize, trace_save, trace_saves
from .contenders import LOADERS, MAPPED_LOADERS, MAPPED_SAVERS, SAVERS, BackgroundSaver, Loader
from .measure import Contender, Sample, alternate, measure_alternately, time_once
from .results import ContenderInfo, Group, Results, readable_size
from .states import State
from .training import Training, one_thread

SetCache = Callable[[Sequence[Path]], None]


@dataclass(frozen=True)
class Effort:
    """Sizes and repetitions of a run.

    Attributes:
        rank_worlds: numbers of ranks that load a checkpoint of four ranks.
        replica_worlds: numbers of ranks that load the same state.
        processes: number of processes for measurements that need a fresh process each time.
        idle_steps: training steps before a background save.
        least_steps: minimum of training steps during the saves of a sample.
        later_saves: saves of a process after its first save.
    """

    state_bytes: int = 2_000_000_000
    tensors: int = 120
    small_tensors: int = 20_000
    rounds: int = 5
    rank_worlds: Sequence[int] = (2, 3, 8)
    replica_worlds: Sequence[int] = (1, 2, 4, 8)
    processes: int = 3
    idle_steps: int = 40
    least_steps: int = 15
    later_saves: int = 3


FULL = Effort()
QUICK = Effort(64_000_000, 120, 1_000, 1, (3,), (1, 2), 1, 5, 3, 1)


class WrongResultError(RuntimeError):
    """A contender did not do the work that it was timed for."""


class Run:
    """A run of some groups: its private directory, its effort, and its results so far."""

    def __init__(self, directory: Path, effort: Effort, results: Results) -> None:
        self.directory = directory
        self.effort = effort
        self._results = results

    @cached_property
    def state(self) -> State:
        """The training state."""
        return states.training_state(self.effort.state_bytes, self.effort.tensors)

    @cached_property
    def spare(self) -> State:
        """A state of the same structure, to load into."""
        return states.blank_copy(self.state)

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Makes a directory and removes it with the context."""
        path = self.directory / name
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def skip(self, what: str, reason: str) -> None:
        """Records what could not be measured."""
        self._results.skipped.append({"what": what, "reason": reason})
        print(f"\n*** SKIPPED: {what}: {reason}", flush=True)

    def begin(self, title: str) -> None:
        """Prints the title of a group."""
        print(f"\n{title}", flush=True)

    def show(self, label: str, sample: Sample) -> None:
        """Prints the numbers of a sample."""
        values = [
            f"{name} {value:.4g}"
            for name, value in sample.items()
            if isinstance(value, (int, float)) and name != "round"
        ]
        print(f"  round {sample['round'] + 1}  {label:<52} {', '.join(values)}", flush=True)

    def add(
        self,
        name: str,
        title: str,
        size: int,
        infos: Sequence[ContenderInfo],
        samples: Sequence[Sample],
    ) -> None:
        """Adds a group to the results."""
        self._results.groups.append(Group(name, title, size, [*infos], [*samples]))

    def measure(
        self,
        name: str,
        title: str,
        size: int,
        entries: Sequence[Contender],
        *,
        count_reads: bool = False,
    ) -> None:
        """Times contenders alternately and adds their group."""
        self.begin(title)
        labels = {entry.name: entry.label for entry in entries}
        samples = measure_alternately(
            entries,
            self.effort.rounds,
            lambda sample: self.show(labels[sample["contender"]], sample),
        )
        for sample in samples:
            if count_reads:
                sample["bytes"] = size
            else:
                del sample["read_bytes"]
        self.add(name, title, size, infos_of(entries), samples)

    def warm_and_cold(
        self, name: str, title: str, measure: Callable[[str, str, SetCache], None]
    ) -> None:
        """Adds the groups NAME_warm and NAME_cold, which `measure(name, title, set_cache)` adds."""
        for suffix, set_cache in (("warm", pagecache.warm), ("cold", pagecache.evict)):
            try:
                measure(f"{name}_{suffix}", f"{title}, {suffix} page cache", set_cache)
            except pagecache.CacheStateError as error:
                self.skip(f"{title}, {suffix} page cache", str(error))


def infos_of(entries: Sequence[Contender]) -> list[ContenderInfo]:
    """Returns the descriptions of contenders."""
    return [ContenderInfo(entry.name, entry.label, entry.kind) for entry in entries]


def files_below(path: Path) -> list[Path]:
    """Returns the files of a checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


# --- contenders ----------------------------------------------------------------------------------


def _saver(
    name: str,
    saver: contenders.Saver | BackgroundSaver,
    state: State,
    target: Path,
) -> Contender:
    save = saver.save if isinstance(saver, contenders.Saver) else saver.start
    last_file = saver.last_file if isinstance(saver, contenders.Saver) else ".metadata"
    least = states.payload_bytes(state)

    def check() -> None:
        written = sum(file.stat().st_size for file in files_below(target))
        if not (target / last_file).exists() or written < least:
            raise WrongResultError(f"{saver.label} left no complete checkpoint in {target}")

    return Contender(
        name,
        saver.label,
        saver.kind,
        run=lambda: save(state, target),
        prepare=lambda: _remove(target),
        check=check,
    )


def _loader(
    name: str, loader: Loader, expected: State, target: State, path: Path, set_cache: SetCache
) -> Contender:
    def prepare() -> None:
        states.wipe(target)
        set_cache(files_below(path))

    def check() -> None:
        difference = states.first_difference(expected, target)
        if difference is not None:
            raise WrongResultError(f"{loader.label} loaded a wrong value of {difference}")

    return Contender(
        name, loader.label, loader.kind, lambda: loader.load(target, path), prepare, check
    )


def _limit(
    name: str, label: str, run: Callable[[], object], prepare: Callable[[], object]
) -> Contender:
    return Contender(name, label, "limit", run, prepare)


def warm_up(run: Run) -> None:
    """Runs every contender once on a tiny state, for imports, thread pools and caches."""
    state = states.small_tensors_state(4)
    with run.scratch("warm-up") as scratch:
        for name, saver in SAVERS.items():
            saver.save(state, scratch / name)
            for loader in LOADERS.values():
                loader.load(states.blank_copy(state), scratch / name)
        for name, saver in MAPPED_SAVERS.items():
            saver.save(state, scratch / name)
            MAPPED_LOADERS[name].load(states.blank_copy(state), scratch / name)


# --- saves and loads -----------------------------------------------------------------------------


def save_training_state(run: Run) -> None:
    """Times saves of a training state, raw writes, and memcpy."""
    total = states.payload_bytes(run.state)
    with run.scratch("save") as scratch:
        target = scratch / "checkpoint"
        remove = partial(_remove, target)
        entries = [
            _saver(name, saver, run.state, target)
            for name, saver in (SAVERS | MAPPED_SAVERS).items()
        ]
        direct = limits.direct_io_works(scratch)
        if not direct:
            run.skip("raw direct writes", "the file system refuses O_DIRECT")
        writer = limits.RawWriter()
        for name, shape in limits.WRITE_SHAPES.items():
            if direct or not shape.direct:
                write = partial(writer.write, target, total, shape)
                entries.append(_limit(name, shape.label, write, remove))
        copy = partial(limits.copy_memory, run.state, run.spare)
        entries.append(_limit("memcpy", "memcpy, 1 thread", copy, remove))
        title = f"Save {readable_size(total)}, {len(states.tensors(run.state))} tensors, fsync"
        run.measure("save", title, total, entries)


def load_training_state(run: Run) -> None:
    """Times loads of the training state into existing tensors, with a warm and a cold cache."""
    total = states.payload_bytes(run.state)
    with run.scratch("load") as scratch:
        stock_path, our_path = scratch / "stock", scratch / "ours"
        SAVERS["stock_1"].save(run.state, stock_path)
        SAVERS["ours_dcp"].save(run.state, our_path)
        for name, saver in MAPPED_SAVERS.items():
            saver.save(run.state, scratch / name)
        direct = limits.direct_io_works(scratch)
        if not direct:
            run.skip("raw direct reads", "the file system refuses O_DIRECT")
        of_stock = replace(
            LOADERS["ours_dcp"], label="dcp.load with torch_ckpt, files of the stock writer"
        )
        loads = [
            *((name, LOADERS[name], stock_path) for name in ("stock", "stock_threads")),
            *((name, one, our_path) for name, one in LOADERS.items() if name.startswith("ours")),
            ("ours_dcp_of_stock", of_stock, stock_path),
            *((name, loader, scratch / name) for name, loader in MAPPED_LOADERS.items()),
        ]
        files = files_below(our_path)

        def measure(name: str, title: str, set_cache: SetCache) -> None:
            cold = set_cache is pagecache.evict
            entries = [
                _loader(name, loader, run.state, run.spare, path, set_cache)
                for name, loader, path in loads
            ]
            entries += [
                _limit(
                    name,
                    shape.label,
                    partial(limits.RawReader(shape).read, files),
                    partial(set_cache, files),
                )
                for name, shape in limits.READ_SHAPES.items()
                if (direct and cold) or not shape.direct
            ]
            # A load from disk cannot reach the speed of memory.
            entries += [] if cold else _memory_copies(run)
            run.measure(name, title, total, entries)

        run.warm_and_cold("load", f"Load {readable_size(total)}", measure)


def _memory_copies(run: Run) -> list[Contender]:
    """Makes contenders that copy resident memory; the fastest differs between machines."""
    cores = len(os.sched_getaffinity(0))
    wipe = partial(states.wipe, run.spare)
    by_threads = partial(limits.copy_memory, run.state, run.spare, threads=cores)
    by_torch = partial(limits.copy_memory_by_torch, run.state, run.spare)
    return [
        _limit("memcpy_memmove", f"memcpy into the targets, {cores} threads", by_threads, wipe),
        _limit("memcpy_torch", "Tensor.copy_ into the targets", by_torch, wipe),
    ]


def load_parts(run: Run) -> None:
    """Times loads of one of four ranks' rows of every tensor, and loads on other ranks."""
    with (
        run.scratch("partial") as scratch,
        ranks.mesh_without_peers(world=4, rank=1) as mesh,
    ):
        stock_path, our_path = scratch / "stock", scratch / "ours"
        SAVERS["stock_1"].save(run.state, stock_path)
        SAVERS["ours_dcp"].save(run.state, our_path)
        expected = states.sharded(run.state, mesh)
        target = states.blank_copy(expected)
        loads = (("stock", stock_path), ("stock_threads", stock_path), ("ours_dcp", our_path))

        def measure(name: str, title: str, set_cache: SetCache) -> None:
            entries = [
                _loader(loader, LOADERS[loader], expected, target, path, set_cache)
                for loader, path in loads
            ]
            run.measure(name, title, states.payload_bytes(target), entries, count_reads=True)

        whole = readable_size(states.payload_bytes(run.state))
        title = f"Load a quarter of the rows of every tensor of {whole}"
        run.warm_and_cold("partial", title, measure)
    size = run.effort.state_bytes // 4
    title = f"Load {readable_size(size)}, saved by 4 ranks, onto others"
    content = ranks.Content(size, run.effort.tensors, sharded=True)
    loaders = {"stock": ("stock", "stock"), "ours": ("ours", "ours_dcp")}
    _load_by_ranks(run, "reshard", title, 4, content, run.effort.rank_worlds, loaders)


def load_replicas(run: Run) -> None:
    """Times loads of the same state on each rank, with and without read_once."""
    size = run.effort.state_bytes // 4
    title = f"Load the same {readable_size(size)} on every rank"
    content = ranks.Content(size, run.effort.tensors, sharded=False)
    loaders = {
        "stock": ("stock", "stock"),
        "each": ("ours", "ours_each"),
        "once": ("ours", "ours_once"),
        "direct": ("ours", "ours_direct"),
    }
    _load_by_ranks(run, "replicas", title, 1, content, run.effort.replica_worlds, loaders)


def _load_by_ranks(
    run: Run,
    group: str,
    title: str,
    saving: int,
    content: ranks.Content,
    worlds: Sequence[int],
    loaders: dict[str, tuple[str, str]],
) -> None:
    """Times loads by several numbers of ranks of checkpoints that `saving` ranks save.

    Args:
        loaders: the saver and the loader of each contender.
    """
    with run.scratch(group) as scratch:
        ranks.save(saving, content, {name: scratch / name for name in contenders.RANK_SAVERS})

        def measure(name: str, title: str, set_cache: SetCache) -> None:
            run.begin(title)
            infos: list[ContenderInfo] = []
            samples: list[Sample] = []
            for world in worlds:
                loads = [
                    ranks.RankLoad(f"{short}_{world}", loader, scratch / saver)
                    for short, (saver, loader) in loaders.items()
                ]
                for load in loads:
                    loader = contenders.RANK_LOADERS[load.loader]
                    label = f"{world} rank{'s' if world > 1 else ''}: {loader.label}"
                    infos.append(ContenderInfo(load.contender, label, loader.kind))
                rounds = run.effort.rounds
                samples += ranks.load(world, content, loads, rounds, set_cache, scratch)
            for sample in samples:
                run.show(sample["contender"], sample)
            run.add(name, title, content.size, infos, samples)

        run.warm_and_cold(group, title, measure)


def save_and_load_small_tensors(run: Run) -> None:
    """Times saves and loads of many tensors of 1 KiB, which show the cost per tensor."""
    state = states.small_tensors_state(run.effort.small_tensors)
    total = states.payload_bytes(state)
    what = f"{run.effort.small_tensors:,} tensors of 1 KiB"
    with run.scratch("small") as scratch:
        savers = [name for name in SAVERS if name != "ours_buffered"]
        entries = [_saver(name, SAVERS[name], state, scratch / "checkpoint") for name in savers]
        run.measure("small_save", f"Save {what}, fsync", total, entries)
        target = states.blank_copy(state)
        entries = []
        # Each loader reads the checkpoint of its own library.
        for saver, loader in (
            ("stock_1", "stock"),
            ("ours_dcp", "ours_dcp"),
            ("ours_call", "ours_call"),
        ):
            SAVERS[saver].save(state, scratch / saver)
            entries.append(
                _loader(loader, LOADERS[loader], state, target, scratch / saver, pagecache.warm)
            )
        run.measure("small_load", f"Load {what}, warm page cache", total, entries)


_MANY = 50  # times as many as in the group of small tensors


def save_and_load_many_tensors(run: Run) -> None:
    """Times a save and a load of a million tensors without fsync, and measures their memory.

    Also measures for how long the thread of a background save of fewer tensors holds the GIL, first
    for a new state and then for the same state.
    """
    few, many = run.effort.small_tensors, _MANY * run.effort.small_tensors
    options = torch_ckpt.WriteOptions(sync_files=False)
    state = states.small_tensors_state(many)
    title = f"{many:,} tensors of 1 KiB, without fsync, warm page cache"
    run.begin(title)
    samples: list[Sample] = []
    held: list[Sample] = []
    with run.scratch("many") as path:
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: torch_ckpt.save(state, path / "many", options=options),
            "load": lambda: torch_ckpt.load(state, path / "many"),
        }
        for number in range(run.effort.rounds):
            for name, call in calls.items():
                if name == "load":
                    states.wipe(state)
                samples.append({"contender": name, "round": number, **_time_and_memory(call)})
                run.show(name, samples[-1])
            if not all(map(torch.count_nonzero, states.tensors(state))):
                raise WrongResultError("torch_ckpt.load left a tensor at zero")
            shutil.rmtree(path / "many")
            # A new name prevents the reuse of the previous round's plan.
            small = {f"round {number}": torch.zeros(1), **dict(islice(state.items(), few))}
            for name in ("new", "unchanged"):
                handle = torch_ckpt.async_save(
                    small, path / "few", options=options, warn_unchanged=False
                )
                handle.result()
                seconds = handle.metrics().python_s
                held.append({"contender": name, "round": number, "python_s": seconds})
    infos = [ContenderInfo(name, f"torch_ckpt.{name}", "ours") for name in calls]
    run.add("many", title, states.payload_bytes(state), infos, samples)
    title = f"async_save of {few:,} tensors of 1 KiB"
    infos = [ContenderInfo(name, f"{name} state", "ours") for name in ("new", "unchanged")]
    run.add("many_background", title, 1024 * few, infos, held)


def _time_and_memory(call: Callable[[], object]) -> dict[str, float]:
    found: dict[str, float] = {}

    def timed() -> None:
        found["wall_s"], found["cpu_s"] = time_once(call)

    before, peak = memory.measure_growth(timed)
    return {**found, "growth_bytes": peak - before}


def measure_memory(run: Run) -> None:
    """Measures the memory of synchronous saves and loads beyond the state, in fresh processes."""
    size = readable_size(run.effort.state_bytes)
    title = f"Memory beyond the state while saving {size}"
    _measure_memory(run, "memory_save", title, memory.SAVERS_MEASURED)
    with run.scratch("memory-source") as scratch:
        SAVERS["ours_call"].save(run.state, scratch / "checkpoint")
        title = f"Memory beyond the targets while loading {size}"
        source = scratch / "checkpoint"
        _measure_memory(run, "memory_load", title, memory.LOADERS_MEASURED, source)


def _measure_memory(
    run: Run,
    group: str,
    title: str,
    names: Sequence[tuple[str, int | None]],
    source: Path | None = None,
) -> None:
    """Measures savers with their budgets, or loaders if there is a `source`."""
    run.begin(title)
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    size, tensors = run.effort.state_bytes, run.effort.tensors
    with run.scratch(group) as scratch:
        for repeat in range(run.effort.processes):
            for name, budget in names:
                try:
                    found = fresh_process.run(
                        memory.measure, name, budget, size, tensors, scratch, source
                    )
                except fresh_process.FreshProcessError as error:
                    if memory.PeakResetError.__name__ not in str(error):
                        raise
                    run.skip(title, str(error).strip().splitlines()[-1])
                    return
                contender = name if budget is None else f"{name}_budget"
                if repeat == 0:
                    infos.append(ContenderInfo(contender, found["label"], found["kind"]))
                growth = found["growth_bytes"]
                samples.append({"contender": contender, "round": repeat, "growth_bytes": growth})
                run.show(found["label"], samples[-1])
    run.add(group, title, size, infos, samples)


# --- background saves ----------------------------------------------------------------------------


@contextmanager
def _background_savers(run: Run) -> Iterator[dict[str, BackgroundSaver]]:
    with contenders.background_savers() as savers:
        # torch passes the state to its process through /dev/shm. If that is full, we are killed.
        free = shutil.disk_usage("/dev/shm").free
        if free < 1.1 * run.effort.state_bytes:
            reason = f"/dev/shm has only {readable_size(free)} free"
            run.skip(savers.pop("stock_process").label, reason)
        yield savers


def save_in_background(run: Run) -> None:
    """Times saves in the background of training, synchronous saves, and memcpy."""
    with run.scratch("async") as scratch, _background_savers(run) as savers:
        _warm_up_background(scratch, savers)
        target = scratch / "checkpoint"
        entries = [_saver(name, saver, run.state, target) for name, saver in savers.items()]
        entries += [_saver(n, SAVERS[n], run.state, target) for n in ("stock_1", "ours_call")]
        copy = partial(limits.copy_memory, run.state, run.spare, threads=2)
        entries.append(_limit("memcpy_2", "memcpy, 2 threads", copy, partial(_remove, target)))
        total, count = states.payload_bytes(run.state), len(states.tensors(run.state))
        title = f"Save {readable_size(total)}, {count} tensors, in the background of training"
        _measure_background(run, "async", title, total, entries)

        # torch's checkpoint process is left out: it needs a file descriptor for each tensor.
        small = states.small_tensors_state(run.effort.small_tensors)
        names = ("stock_thread", "ours_writer", "ours_blocking", "ours_overlapped")
        entries = [_saver(name, savers[name], small, target) for name in names]
        title = f"Save {run.effort.small_tensors:,} tensors of 1 KiB in the background of training"
        _measure_background(run, "async_small", title, states.payload_bytes(small), entries)


def _warm_up_background(scratch: Path, savers: dict[str, BackgroundSaver]) -> None:
    """Runs each saver once on a tiny state, and checks the checkpoint."""
    state = states.small_tensors_state(4)
    for name, saver in savers.items():
        # Only stock_process needs a group. Our savers would coordinate over it.
        with contenders.single_rank_group() if name == "stock_process" else nullcontext():
            saver.start(state, scratch / name).committed.result()
        loaded = states.blank_copy(state)
        LOADERS["stock"].load(loaded, scratch / name)
        if states.first_difference(state, loaded) is not None:
            raise WrongResultError(f"{saver.label} saved a wrong value")


def _measure_background(
    run: Run, name: str, title: str, size: int, entries: Sequence[Contender]
) -> None:
    """Samples every contender once per round.

    Each contender saves once before its sample, because the previous contender may have freed the
    memory for copies. compare_first_saves measures first saves.
    """
    run.begin(title)
    samples: list[Sample] = []
    with one_thread():
        training = Training()
        for _ in range(run.effort.idle_steps):
            training.step()
        for round_index, entry in alternate(entries, run.effort.rounds):
            trace_save(entry, training.step, 0)
            traces = trace_saves(
                entry, training.step, run.effort.idle_steps, run.effort.least_steps
            )
            samples.append(summarize(entry.name, traces, round_index))
            run.show(entry.label, samples[-1])
    run.add(name, title, size, infos_of(entries), samples)


_RESERVED = "_reserved"
_FIRST_SAVERS = (
    *("stock_thread", "stock_process", "ours_blocking", f"ours_blocking{_RESERVED}"),
    *("ours_overlapped", f"ours_overlapped{_RESERVED}"),
)
# No saver of ours makes more files. The last chunk of each file may be partly unused.
_MAX_FILES, _CHUNK_BYTES = 16, 4 << 20
_WARM_UP_STEPS = 3


def compare_first_saves(run: Run) -> None:
    """Times the first and later background saves of a process, and measures their memory."""
    size, tensors = run.effort.state_bytes, run.effort.tensors
    title = f"First and later saves of a process, {readable_size(size)}"
    run.begin(title)
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    with run.scratch("first-saves") as scratch, _background_savers(run) as savers:
        for repeat in range(run.effort.processes):
            for name in _FIRST_SAVERS:
                saver = savers.get(name.removesuffix(_RESERVED))
                if saver is None:
                    continue
                later = run.effort.later_saves
                found = fresh_process.run(trace_first_saves, name, size, tensors, scratch, later)
                traces = [Trace(**entry) for entry in found]
                for which, own in (("first", traces[:1]), ("later", traces[1:])):
                    label = saver.label
                    label += ", reserve_pool before" if name.endswith(_RESERVED) else ""
                    if repeat == 0:
                        info = f"{which}_{name}", f"{label}: {which} saves", saver.kind
                        infos.append(ContenderInfo(*info))
                    samples.append(summarize(f"{which}_{name}", own, repeat))
                    run.show(f"{label}: {which} saves", samples[-1])
    run.add("async_first", title, size, infos, samples)
    title = f"Memory beyond the state while saving {readable_size(size)} in the background"
    _measure_memory(run, "memory_async", title, memory.BACKGROUND_SAVERS_MEASURED)


def trace_first_saves(name: str, size: int, tensors: int, directory: str, later: int) -> list[Any]:
    """Traces the first and later saves of this process.

    Before, only stock code has saved in the process, and synchronously. So the first save makes the
    buffers, threads and processes that a saver keeps between saves. For a saver whose name ends in
    "_reserved", torch_ckpt.reserve_pool reserves the memory before.
    """
    state = states.training_state(size, tensors)
    path = Path(directory) / "first"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        saver = stack.enter_context(contenders.background_savers())[name.removesuffix(_RESERVED)]
        if name.endswith(_RESERVED):
            torch_ckpt.reserve_pool(states.payload_bytes(state) + _MAX_FILES * _CHUNK_BYTES)
        if name == "stock_process":
            stack.enter_context(contenders.single_rank_group())
        stack.enter_context(one_thread())
        SAVERS["stock_1"].save(states.small_tensors_state(2), path / "warm-up")
        training = Training()
        for _ in range(_WARM_UP_STEPS):
            training.step()
        contender = _saver(name, saver, state, path / "measured")
        return [asdict(trace_save(contender, training.step, 0)) for _ in range(1 + later)]
