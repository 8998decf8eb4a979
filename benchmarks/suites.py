"""The measurements. Each suite builds its contenders, times them alternately and cleans up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from . import (
    contenders,
    first_saves,
    limits,
    manager,
    memory,
    no_cuda,
    pagecache,
    peers,
    queue_saves,
    ranks,
    slow_storage,
    states,
)
from .background import BackgroundSample, Effort, measure_background_saves
from .contenders import SAVERS, STOCK_SAVERS, BackgroundSaver, Kind
from .manager import CallEffort
from .measure import Contender, ReadSample, Sample, measure_alternately, order_of_round
from .peers import PeerUnavailableError
from .queue_saves import SAVERS_BY_QUEUE, QueueSample, Work
from .results import ContenderInfo, Group, Results, Skipped, readable_size
from .states import State
from .training import Training, one_thread

# torch's checkpoint process is left out: it needs a file descriptor for each tensor.
_SMALL_BACKGROUND_SAVERS = ("stock_thread", "ours_writer", "ours_blocking", "ours_overlapped")

# For all ranks together. Each rank holds the expected values and the targets.
MAX_REPLICA_BYTES = 4 * 10**9
# A node's share of a shared file system.
SLOW_BYTES_PER_SECOND = 200_000_000

SetCache = Callable[[Sequence[Path]], None]


# The copy of a larger state would hide the time that a manager adds.
MANAGER_BYTES = 64_000_000


@dataclass(frozen=True)
class Setup:
    """Sizes and directory of one run.

    Attributes:
        directory: private to the run.
        state_bytes: size of the training state.
        rank_bytes: size of the state that several ranks load: in total if it is sharded, for each
            rank if all ranks load the same.
        reshard_worlds, replica_worlds: numbers of ranks.
        repeats: number of processes for measurements that need a fresh process each time.
        later_queue_saves: saves of each process through a queue after its first save.
        queues: names of the queues to measure.
        few_queues: names of the queues to measure with many small tensors and with several ranks.
        print_line: prints a line of the progress.
    """

    directory: Path
    state_bytes: int
    tensor_count: int
    small_tensor_count: int
    rank_bytes: int
    reshard_worlds: Sequence[int]
    replica_worlds: Sequence[int]
    rounds: int
    repeats: int
    later_queue_saves: int
    queues: Sequence[str]
    few_queues: Sequence[str]
    effort: Effort
    call_effort: CallEffort
    print_line: Callable[[str], None]


class WrongResultError(RuntimeError):
    """A contender did not do the work that it was timed for."""


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _files_below(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in _files_below(path))


@contextmanager
def _scratch(setup: Setup, name: str) -> Iterator[Path]:
    path = setup.directory / name
    path.mkdir()
    try:
        yield path
    finally:
        _remove(path)


def _print_sample(setup: Setup, label: str, sample: Sample) -> None:
    line = (
        f"  round {sample.round + 1}/{setup.rounds}  {label:<52}"
        f"{sample.wall_s:9.3f} s {sample.bytes / sample.wall_s / 1e9:7.2f} GB/s "
        f"{sample.cpu_s:8.3f} CPU s"
    )
    if isinstance(sample, ReadSample):
        line += f" {sample.read_bytes / sample.bytes:7.3f} read/wanted"
    setup.print_line(line)


def _measure(
    setup: Setup,
    name: str,
    title: str,
    bytes_moved: int,
    entries: list[Contender],
    *,
    count_reads: bool = False,
) -> Group:
    setup.print_line(f"\n{title}")
    labels = {entry.name: entry.label for entry in entries}
    samples = measure_alternately(
        entries,
        setup.rounds,
        bytes_moved,
        lambda sample: _print_sample(setup, labels[sample.contender], sample),
        count_reads=count_reads,
    )
    return Group(
        name=name,
        title=title,
        bytes=bytes_moved,
        contenders=[ContenderInfo(entry.name, entry.label, entry.kind) for entry in entries],
        samples=samples,
    )


def _skip(setup: Setup, results: Results, what: str, reason: str) -> None:
    results.skipped.append(Skipped(what, reason))
    setup.print_line(f"\n*** SKIPPED: {what}: {reason}")


def _saver_entry(name: str, state: State, target: Path) -> Contender:
    saver = (SAVERS | contenders.MAPPED_SAVERS)[name]
    return _save_entry(
        name, saver.label, saver.kind, saver.save, state, target, last_file=saver.last_file
    )


def _save_entry(
    name: str,
    label: str,
    kind: Kind,
    save: Callable[[State, Path], object],
    state: State,
    target: Path,
    *,
    last_file: str = ".metadata",
) -> Contender:
    least = states.payload_bytes(state)

    def check() -> None:
        if not (target / last_file).exists() or _bytes_below(target) < least:
            raise WrongResultError(f"{label} left no complete checkpoint in {target}")

    return Contender(
        name=name,
        label=label,
        kind=kind,
        run=lambda: save(state, target),
        prepare=lambda: _remove(target),
        check=check,
        target=target,
    )


def _limit_entry(
    name: str, label: str, run: Callable[[], object], prepare: Callable[[], None]
) -> Contender:
    return Contender(name=name, label=label, kind="limit", run=run, prepare=prepare)


def _raw_write_entry(
    writer: limits.RawWriter, name: str, shape: limits.WriteShape, total: int, target: Path
) -> Contender:
    return _limit_entry(
        name, shape.label, lambda: writer.write(target, total, shape), lambda: _remove(target)
    )


def warm_up(setup: Setup) -> None:
    """Runs every contender once on a tiny state, for imports, thread pools and caches."""
    state = states.small_tensors_state(4)
    with _scratch(setup, "warm-up") as scratch:
        for name, saver in SAVERS.items():
            saver.save(state, scratch / name)
            for loader in contenders.LOADERS.values():
                loader.load(states.blank_copy(state), scratch / name)
        for name, saver in contenders.MAPPED_SAVERS.items():
            saver.save(state, scratch / name)
            contenders.MAPPED_LOADERS[name].load(states.blank_copy(state), scratch / name)


def save_training_state(setup: Setup, results: Results, state: State, spare: State) -> None:
    """Times saves of a training state, raw writes, and memcpy into `spare`."""
    total = states.payload_bytes(state)
    with _scratch(setup, "save") as scratch:
        target = scratch / "checkpoint"
        names = [*SAVERS, *contenders.MAPPED_SAVERS]
        entries = [_saver_entry(name, state, target) for name in names]
        direct = limits.direct_io_works(scratch)
        if not direct:
            _skip(setup, results, "raw direct writes", "the file system refuses O_DIRECT")
        writer = limits.RawWriter()
        for name, shape in limits.WRITE_SHAPES.items():
            if direct or not shape.direct:
                entries.append(_raw_write_entry(writer, name, shape, total, target))
        entries.append(
            _limit_entry(
                "memcpy",
                "memcpy, 1 thread",
                lambda: limits.copy_memory(state, spare),
                lambda: _remove(target),
            )
        )
        title = f"Save {readable_size(total)}, {len(states.tensors(state))} tensors, fsync"
        results.groups.append(_measure(setup, "save", title, total, entries))


def _loader_entry(
    name: str,
    loader: contenders.Loader,
    expected: State,
    target: State,
    path: Path,
    set_cache: SetCache,
) -> Contender:
    def prepare() -> None:
        states.wipe(target)
        set_cache(_files_below(path))

    def check() -> None:
        difference = states.first_difference(expected, target)
        if difference is not None:
            raise WrongResultError(f"{loader.label} loaded a wrong value of {difference}")

    return Contender(
        name=name,
        label=loader.label,
        kind=loader.kind,
        run=lambda: loader.load(target, path),
        prepare=prepare,
        check=check,
    )


def _raw_read_entries(path: Path, set_cache: SetCache, *, direct: bool) -> list[Contender]:
    """Makes contenders that read through the page cache, and if `direct` also by direct I/O."""
    files = _files_below(path)
    return [
        _limit_entry(
            name,
            shape.label,
            partial(limits.RawReader(shape).read, files),
            partial(set_cache, files),
        )
        for name, shape in limits.READ_SHAPES.items()
        if direct or not shape.direct
    ]


def _memcpy_entries(state: State, target: State) -> list[Contender]:
    """Makes contenders that copy resident memory; the fastest differs between machines."""
    cores = len(os.sched_getaffinity(0))
    wipe = partial(states.wipe, target)
    return [
        _limit_entry(
            "memcpy_memmove",
            f"memcpy into the targets, {cores} threads",
            lambda: limits.copy_memory(state, target, threads=cores),
            wipe,
        ),
        _limit_entry(
            "memcpy_torch",
            "Tensor.copy_ into the targets",
            lambda: limits.copy_memory_by_torch(state, target),
            wipe,
        ),
    ]


def load_training_state(setup: Setup, results: Results, state: State, target: State) -> None:
    """Times loads of the training state into existing tensors, with a warm and a cold cache."""
    total = states.payload_bytes(state)
    with _scratch(setup, "load") as scratch:
        stock_path, our_path = scratch / "stock", scratch / "ours"
        SAVERS["stock_1"].save(state, stock_path)
        SAVERS["ours_dcp"].save(state, our_path)
        for name, saver in contenders.MAPPED_SAVERS.items():
            saver.save(state, scratch / name)
        direct = limits.direct_io_works(scratch)
        if not direct:
            _skip(setup, results, "raw direct reads", "the file system refuses O_DIRECT")
        loaders = contenders.LOADERS
        of_stock = replace(
            loaders["ours_dcp"], label="dcp.load with torch_ckpt, files of the stock writer"
        )
        pairs = [
            ("stock", loaders["stock"], stock_path),
            ("stock_threads", loaders["stock_threads"], stock_path),
            ("ours_dcp", loaders["ours_dcp"], our_path),
            ("ours_budget", loaders["ours_budget"], our_path),
            ("ours_call", loaders["ours_call"], our_path),
            ("ours_unverified", loaders["ours_unverified"], our_path),
            ("ours_dcp_of_stock", of_stock, stock_path),
            *((name, loader, scratch / name) for name, loader in contenders.MAPPED_LOADERS.items()),
        ]

        def measure(name: str, title: str, set_cache: SetCache) -> Group:
            cold = set_cache is pagecache.evict
            entries = [
                _loader_entry(name, loader, state, target, path, set_cache)
                for name, loader, path in pairs
            ]
            entries += _raw_read_entries(our_path, set_cache, direct=direct and cold)
            # A load from disk cannot reach the speed of memory.
            entries += [] if cold else _memcpy_entries(state, target)
            return _measure(setup, name, title, total, entries)

        _warm_and_cold(setup, results, "load", f"Load {readable_size(total)}", measure)


def _warm_and_cold(
    setup: Setup,
    results: Results,
    name: str,
    title: str,
    measure: Callable[[str, str, SetCache], Group],
) -> None:
    """Adds the groups NAME_warm and NAME_cold, as `measure(name, title, set_cache)` makes them."""
    for suffix, cache, set_cache in (
        ("warm", "warm page cache", pagecache.warm),
        ("cold", "cold page cache", pagecache.evict),
    ):
        try:
            group = measure(f"{name}_{suffix}", f"{title}, {cache}", set_cache)
        except pagecache.CacheStateError as error:
            _skip(setup, results, f"{title}, {cache}", str(error))
        else:
            results.groups.append(group)


def load_quarter_of_rows(setup: Setup, results: Results, state: State) -> None:
    """Times loads of one of four ranks' rows of every tensor, from unsharded tensors."""
    loaders = contenders.LOADERS
    with (
        _scratch(setup, "partial") as scratch,
        ranks.mesh_without_peers(world=4, rank=1) as mesh,
    ):
        stock_path, our_path = scratch / "stock", scratch / "ours"
        SAVERS["stock_1"].save(state, stock_path)
        SAVERS["ours_dcp"].save(state, our_path)
        expected = states.sharded(state, mesh)
        target = states.blank_copy(expected)
        wanted = states.payload_bytes(target)

        def measure(name: str, title: str, set_cache: SetCache) -> Group:
            entries = [
                _loader_entry(loader, loaders[loader], expected, target, path, set_cache)
                for loader, path in (
                    ("stock", stock_path),
                    ("stock_threads", stock_path),
                    ("ours_dcp", our_path),
                )
            ]
            return _measure(setup, name, title, wanted, entries, count_reads=True)

        whole = readable_size(states.payload_bytes(state))
        title = f"Load a quarter of the rows of every tensor of {whole}"
        _warm_and_cold(setup, results, "partial", title, measure)


def load_on_other_ranks(setup: Setup, results: Results) -> None:
    """Times loads of a checkpoint of four ranks on other numbers of ranks."""
    content = ranks.Content(setup.rank_bytes, setup.tensor_count, sharded=True)
    kinds = ("stock", "stock"), ("ours", "ours_dcp")
    with _scratch(setup, "reshard") as scratch:
        paths = {name: scratch / name for name in contenders.RANK_SAVERS}
        ranks.save(4, content, paths)

        def measure(name: str, title: str, set_cache: SetCache) -> Group:
            loads = {
                world: [
                    ranks.RankLoad(f"{short}_{world}", loader, paths[short])
                    for short, loader in kinds
                ]
                for world in setup.reshard_worlds
            }
            return _measure_ranks(setup, name, title, content, loads, set_cache, scratch)

        title = f"Load {readable_size(setup.rank_bytes)}, saved by 4 ranks, onto others"
        _warm_and_cold(setup, results, "reshard", title, measure)


def load_replicas(setup: Setup, results: Results) -> None:
    """Times loads of the same tensors on every rank.

    Each rank reads them, through the page cache or with direct I/O, or one rank reads them for all.
    """
    size = min(setup.rank_bytes, MAX_REPLICA_BYTES // max(setup.replica_worlds))
    content = ranks.Content(size, setup.tensor_count, sharded=False)
    with _scratch(setup, "replicas") as scratch:
        path = scratch / "checkpoint"
        SAVERS["ours_call"].save(states.training_state(size, setup.tensor_count), path)

        def measure(name: str, title: str, set_cache: SetCache) -> Group:
            loaders = {"each": "ours_each", "once": "ours_once"}
            if name != "replicas_slow":
                loaders["stock"] = "stock"
            if name == "replicas_cold" and limits.direct_io_works(scratch):
                loaders["direct"] = "ours_direct"
            loads = {
                world: [
                    ranks.RankLoad(f"{short}_{world}", loader, path)
                    for short, loader in loaders.items()
                ]
                for world in setup.replica_worlds
            }
            return _measure_ranks(setup, name, title, content, loads, set_cache, scratch)

        title = f"Load the same {readable_size(size)} on every rank"
        _warm_and_cold(setup, results, "replicas", title, measure)
        slow = f"{title}, from storage of {readable_size(SLOW_BYTES_PER_SECOND)}/s"
        try:
            with slow_storage.limited_reads(scratch, SLOW_BYTES_PER_SECOND):
                results.groups.append(measure("replicas_slow", slow, pagecache.evict))
        except (slow_storage.NoLimitError, pagecache.CacheStateError) as error:
            _skip(setup, results, slow, str(error))


def _measure_ranks(
    setup: Setup,
    name: str,
    title: str,
    content: ranks.Content,
    loads: Mapping[int, Sequence[ranks.RankLoad]],
    set_cache: SetCache,
    scratch: Path,
) -> Group:
    """Times loads on each number of ranks. Only contenders on the same number alternate."""
    setup.print_line(f"\n{title}")
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    for world, of_world in loads.items():
        for load in of_world:
            loader = contenders.RANK_LOADERS[load.loader]
            label = f"{world} rank{'s' if world > 1 else ''}: {loader.label}"
            infos.append(ContenderInfo(load.contender, label, loader.kind))
        labels = {info.name: info.label for info in infos}
        for sample in ranks.load(
            world,
            content,
            of_world,
            rounds=setup.rounds,
            cold=set_cache is pagecache.evict,
            directory=scratch,
        ):
            _print_sample(setup, labels[sample.contender], sample)
            samples.append(sample)
    # The size in total if it is sharded, or else on each rank. `bytes` is a sum over the ranks.
    total = samples[0].bytes // (1 if content.sharded else next(iter(loads)))
    return Group(name, title, total, infos, samples)


def save_and_load_small_tensors(setup: Setup, results: Results) -> None:
    """Times saves and loads of many tensors of 1 KiB, which show the cost per tensor."""
    state = states.small_tensors_state(setup.small_tensor_count)
    total = states.payload_bytes(state)
    what = f"{setup.small_tensor_count:,} tensors of 1 KiB"
    with _scratch(setup, "small") as scratch:
        names = [*STOCK_SAVERS, "ours_dcp", "ours_call"]
        entries = [_saver_entry(name, state, scratch / "checkpoint") for name in names]
        results.groups.append(_measure(setup, "small_save", f"Save {what}, fsync", total, entries))

        target = states.blank_copy(state)
        entries = []
        # Each loader reads the checkpoint of its own library.
        for saver_name, loader_name in (
            ("stock_1", "stock"),
            ("ours_dcp", "ours_dcp"),
            ("ours_call", "ours_call"),
        ):
            path = scratch / saver_name
            SAVERS[saver_name].save(state, path)
            loader = contenders.LOADERS[loader_name]
            entries.append(_loader_entry(loader_name, loader, state, target, path, pagecache.warm))
        results.groups.append(
            _measure(setup, "small_load", f"Load {what}, warm page cache", total, entries)
        )


def measure_memory(setup: Setup, results: Results) -> None:
    """Measures the memory of synchronous saves and loads beyond the state, in fresh processes."""
    _memory(setup, results, memory.MEASURED_SAVERS)
    with _scratch(setup, "memory-source") as scratch:
        source = scratch / "checkpoint"
        state = states.training_state(setup.state_bytes, setup.tensor_count)
        SAVERS["ours_call"].save(state, source)
        del state
        _memory(setup, results, memory.MEASURED_LOADERS, source)


def _memory(
    setup: Setup,
    results: Results,
    names: Sequence[tuple[str, int | None]],
    source: Path | None = None,
) -> None:
    """Adds samples of savers with their budgets, or of loaders if there is a `source`."""
    doing = "saving" if source is None else "loading"
    setup.print_line(f"\nMemory beyond the state while {doing}")
    with _scratch(setup, "memory-runs") as scratch:
        for repeat in range(setup.repeats):
            for name, budget in names:
                try:
                    sample = memory.sample_in_fresh_process(
                        name,
                        budget_bytes=budget,
                        state_bytes=setup.state_bytes,
                        tensor_count=setup.tensor_count,
                        directory=scratch,
                        round_index=repeat,
                        source=source,
                    )
                except memory.PeakResetError as error:
                    _skip(setup, results, f"memory beyond the state while {doing}", str(error))
                    return
                results.memory.append(sample)
                setup.print_line(f"  {sample.label:<60}{sample.growth_bytes / 2**20:9.1f} MiB")


def _print_background_sample(setup: Setup, label: str, sample: BackgroundSample) -> None:
    ratio = sample.step_median_ratio
    steps = "" if ratio is None else f"  {sample.steps:4} steps x {ratio:.3f}"
    setup.print_line(
        f"  round {sample.round + 1}  {label:<52}{sample.stall_s * 1e3:9.1f} ms in the call"
        f"{sample.durable_s:9.3f} s until durable {sample.cpu_s:8.3f} CPU s{steps}"
    )


def _measure_background(
    setup: Setup, name: str, title: str, bytes_moved: int, entries: list[Contender]
) -> Group:
    setup.print_line(f"\n{title}")
    labels = {entry.name: entry.label for entry in entries}
    with one_thread():
        training = Training()
        for _ in range(setup.effort.idle_steps):
            training.step()
        samples = measure_background_saves(
            entries,
            setup.rounds,
            bytes_moved,
            training.step,
            setup.effort,
            lambda sample: _print_background_sample(setup, labels[sample.contender], sample),
        )
    infos = [ContenderInfo(entry.name, entry.label, entry.kind) for entry in entries]
    return Group(name, title, bytes_moved, infos, [*samples])


@contextmanager
def _usable_background_savers(
    setup: Setup, results: Results
) -> Iterator[dict[str, BackgroundSaver]]:
    with contenders.background_savers() as savers:
        # torch passes the state to its process through /dev/shm. If that is full, we are killed.
        free = shutil.disk_usage("/dev/shm").free
        if free < 1.1 * setup.state_bytes:
            reason = f"/dev/shm has only {readable_size(free)} free"
            _skip(setup, results, savers.pop("stock_process").label, reason)
        yield savers


def _warm_up_background(setup: Setup, savers: dict[str, BackgroundSaver]) -> None:
    """Runs each saver once on a tiny state, and checks the checkpoint."""
    state = states.small_tensors_state(4)
    with _scratch(setup, "warm-up") as scratch:
        for name, saver in savers.items():
            path = scratch / name
            # Only stock_process needs a group. Our savers would coordinate over it.
            group = contenders.single_rank_group if name == "stock_process" else nullcontext
            with group():
                running = saver.start(state, path)
                running.committed.result()
            loaded = states.blank_copy(state)
            contenders.LOADERS["stock"].load(loaded, path)
            if states.first_difference(state, loaded) is not None:
                raise WrongResultError(f"{saver.label} saved a wrong value")


def save_in_background(setup: Setup, results: Results, state: State, spare: State) -> None:
    """Times saves in the background of training, synchronous saves, and memcpy into `spare`."""
    total = states.payload_bytes(state)
    small = states.small_tensors_state(setup.small_tensor_count)
    with (
        _scratch(setup, "async") as scratch,
        _usable_background_savers(setup, results) as savers,
    ):
        _warm_up_background(setup, savers)
        target = scratch / "checkpoint"

        def entry(name: str, of: State) -> Contender:
            saver = savers[name]
            return _save_entry(name, saver.label, saver.kind, saver.start, of, target)

        entries = [entry(name, state) for name in savers]
        entries += [_saver_entry(name, state, target) for name in ("stock_1", "ours_call")]
        entries.append(
            _limit_entry(
                "memcpy_2",
                "memcpy, 2 threads",
                lambda: limits.copy_memory(state, spare, threads=2),
                lambda: _remove(target),
            )
        )
        count = len(states.tensors(state))
        title = f"Save {readable_size(total)}, {count} tensors, in the background of training"
        results.groups.append(_measure_background(setup, "async", title, total, entries))

        entries = [entry(name, small) for name in _SMALL_BACKGROUND_SAVERS]
        title = f"Save {setup.small_tensor_count:,} tensors of 1 KiB in the background of training"
        small_total = states.payload_bytes(small)
        results.groups.append(
            _measure_background(setup, "async_small", title, small_total, entries)
        )


def compare_first_saves(setup: Setup, results: Results) -> None:
    """Times the first and later background saves of a process, and measures their memory."""
    title = f"First and later saves of a process, {readable_size(setup.state_bytes)}"
    setup.print_line(f"\n{title}")
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    with (
        _scratch(setup, "first-saves") as scratch,
        _usable_background_savers(setup, results) as savers,
    ):
        for repeat in range(setup.repeats):
            for name in first_saves.MEASURED_SAVERS:
                saver = savers.get(first_saves.base_saver(name))
                if saver is None:
                    continue
                pair = first_saves.sample_in_fresh_process(
                    name,
                    state_bytes=setup.state_bytes,
                    tensor_count=setup.tensor_count,
                    directory=scratch,
                    round_index=repeat,
                )
                for sample, which in zip(pair, ("first save", "later saves"), strict=True):
                    label = f"{first_saves.make_label(name, saver)}: {which}"
                    if repeat == 0:
                        infos.append(ContenderInfo(sample.contender, label, saver.kind))
                    samples.append(sample)
                    _print_background_sample(setup, label, sample)
    total = samples[0].bytes
    results.groups.append(Group("async_first", title, total, infos, samples))
    _memory(setup, results, memory.MEASURED_BACKGROUND_SAVERS)


# About one rank's share of a model.
_MAX_QUEUE_BYTES = 500_000_000
# A rank of a large model has some thousands of such small tensors.
_QUEUE_PART_OF_SMALL_TENSORS = 1 / 4


#: One rank, one rank with many small tensors, two ranks.
QUEUE_GROUPS = ("megatron", "megatron_small", "megatron_ranks")


def save_through_queues(
    setup: Setup, results: Results, chosen: Sequence[str] = QUEUE_GROUPS
) -> None:
    """Times saves in Megatron's flow, with this package and with Megatron's own packages.

    Args:
        chosen: names of groups in ``QUEUE_GROUPS``.
    """
    size = min(setup.state_bytes, _MAX_QUEUE_BYTES)
    usable = _usable_queues(setup, results, size)
    cuda = [] if torch.cuda.is_available() else [f"torch.cuda.{n}" for n in no_cuda.REPLACEMENTS]
    results.parameters["megatron"] = {
        "thread_count": queue_saves.THREAD_COUNT,
        "later_saves": setup.later_queue_saves,
        "replaced_for_peers": cuda,
        "sharing_strategy_of_small_tensors": queue_saves.SHARING_OF_SMALL,
    }
    small = max(1, int(setup.small_tensor_count * _QUEUE_PART_OF_SMALL_TENSORS))
    few = [name for name in usable if name in setup.few_queues]
    shown = readable_size(size)
    work = Work(
        size=size,
        tensors=setup.tensor_count,
        small=0,
        later_saves=setup.later_queue_saves,
        idle_steps=setup.effort.idle_steps,
        least_steps=setup.effort.least_steps,
    )
    with _scratch(setup, "megatron") as scratch:
        for name, title, names, of_group, world in (
            ("megatron", f"Save {shown} through Megatron's queue", usable, work, 1),
            (
                "megatron_small",
                f"Save {small:,} tensors of 1 KiB through Megatron's queue",
                few,
                replace(work, small=small),
                1,
            ),
            (
                "megatron_ranks",
                f"Save {shown} by 2 ranks through Megatron's queue",
                few,
                work,
                2,
            ),
        ):
            if name in chosen:
                group = _measure_queues(setup, name, title, names, of_group, scratch, world)
                results.groups.append(group)


def measure_manager(setup: Setup, results: Results) -> None:
    """Times a CheckpointManager's calls in steps and saves, on one rank and on two."""
    total = min(setup.state_bytes, MANAGER_BYTES)
    title = f"CheckpointManager, {readable_size(total)} in 200 tensors"
    setup.print_line(f"\n{title}")
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    for world in (1, 2):
        infos += manager.contenders(world)
        labels = {info.name: info.label for info in infos}
        with _scratch(setup, f"manager-{world}") as scratch:
            for sample in manager.measure(
                world, total, setup.call_effort, rounds=setup.rounds, directory=scratch
            ):
                samples.append(sample)
                label = labels[sample.contender]
                setup.print_line(
                    f"  round {sample.round + 1}/{setup.rounds}  {label:<52}"
                    f"{sample.wall_s * 1e3:9.3f} ms in each of {sample.calls} calls"
                )
    results.groups.append(Group("manager", title, total, infos, samples))


def _usable_queues(setup: Setup, results: Results, size: int) -> list[str]:
    """Returns the savers that can save `size` bytes here. Records why other savers cannot."""
    missing: set[peers.Peer] = set()
    # torch passes CPU tensors to workers through /dev/shm. If that is full, the process is killed.
    free = shutil.disk_usage("/dev/shm").free
    for peer in (peers.NVRX, peers.MEGATRON_CORE):
        try:
            if free < 1.1 * size:
                raise PeerUnavailableError(f"/dev/shm has only {readable_size(free)} free")
            peer.install()
        except PeerUnavailableError as error:
            missing.add(peer)
            _skip(setup, results, peer.title, str(error))
    return [name for name in setup.queues if SAVERS_BY_QUEUE[name].peer not in missing]


def _measure_queues(
    setup: Setup,
    name: str,
    title: str,
    names: Sequence[str],
    work: Work,
    scratch: Path,
    world: int,
) -> Group:
    setup.print_line(f"\n{title}")
    samples: list[Sample] = []
    for round_index in range(setup.rounds):
        for position, index in enumerate(order_of_round(len(names), round_index, setup.rounds)):
            sample = queue_saves.sample_in_fresh_processes(
                names[index],
                work,
                scratch,
                world=world,
                round_index=round_index,
                position=position,
            )
            samples.append(sample)
            _print_queue_sample(setup, SAVERS_BY_QUEUE[names[index]].label, sample)
    infos = [
        ContenderInfo(saver, SAVERS_BY_QUEUE[saver].label, SAVERS_BY_QUEUE[saver].kind)
        for saver in names
    ]
    return Group(name, title, samples[0].bytes, infos, samples)


def _print_queue_sample(setup: Setup, label: str, sample: QueueSample) -> None:
    setup.print_line(
        f"  round {sample.round + 1}/{setup.rounds}  {label:<38}"
        f"{sample.first_call_s * 1e3:9.1f} ms in the first call {sample.call_s * 1e3:8.1f} later"
        f"{sample.durable_s:8.3f} s until durable {sample.cpu_s:7.3f} CPU s"
        f"{sample.memory_bytes / 2**20:7.0f} MiB  steps x {sample.step_median_ratio:.3f}"
    )
