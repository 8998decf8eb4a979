"""What is measured. Each suite builds its contenders, times them alternately and cleans up."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from . import contenders, limits, memory, pagecache, states
from .contenders import SAVERS, STOCK_SAVERS
from .measure import Contender, Sample, measure_alternately
from .results import ContenderInfo, Group, Results, Skipped, readable_size
from .states import State


@dataclass(frozen=True)
class Setup:
    """Sizes and places of one run. `directory` is private to the run; `state_bytes` are bytes."""

    directory: Path
    state_bytes: int
    tensor_count: int
    small_tensor_count: int
    rounds: int
    say: Callable[[str], None]


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


def _measure(
    setup: Setup, name: str, title: str, bytes_moved: int, entries: list[Contender]
) -> Group:
    setup.say(f"\n{title}")

    def on_sample(sample: Sample) -> None:
        setup.say(
            f"  round {sample.round + 1}/{setup.rounds}  {labels[sample.contender]:<52}"
            f"{sample.wall_s:9.3f} s {sample.bytes / sample.wall_s / 1e9:7.2f} GB/s "
            f"{sample.cpu_s:8.3f} CPU s"
        )

    labels = {entry.name: entry.label for entry in entries}
    return Group(
        name=name,
        title=title,
        bytes=bytes_moved,
        contenders=[ContenderInfo(entry.name, entry.label, entry.kind) for entry in entries],
        samples=measure_alternately(entries, setup.rounds, bytes_moved, on_sample),
    )


def _skip(setup: Setup, results: Results, what: str, reason: str) -> None:
    results.skipped.append(Skipped(what, reason))
    setup.say(f"\n*** SKIPPED: {what}: {reason}")


def _saver_entry(name: str, state: State, target: Path) -> Contender:
    saver = SAVERS[name]
    least = states.payload_bytes(state)

    def check() -> None:
        if not (target / ".metadata").exists() or _bytes_below(target) < least:
            raise WrongResultError(f"{saver.label} left no whole checkpoint")

    return Contender(
        name=name,
        label=saver.label,
        kind=saver.kind,
        run=lambda: saver.save(state, target),
        prepare=lambda: _remove(target),
        check=check,
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
    """Lets every contender work once on next to nothing: imports, thread pools, caches."""
    state = states.small_tensors_state(4)
    with _scratch(setup, "warm-up") as scratch:
        for name, saver in SAVERS.items():
            saver.save(state, scratch / name)
            for loader in contenders.LOADERS.values():
                loader.load(states.blank_copy(state), scratch / name)


def save_training_state(setup: Setup, results: Results, state: State, spare: State) -> None:
    """Saves of a training state, and the limits of disk and memory; memcpy goes to `spare`."""
    total = states.payload_bytes(state)
    with _scratch(setup, "save") as scratch:
        target = scratch / "checkpoint"
        entries = [_saver_entry(name, state, target) for name in SAVERS]
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
    set_cache: Callable[[list[Path]], None],
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


def _raw_read_entries(
    path: Path, set_cache: Callable[[list[Path]], None], *, direct: bool
) -> list[Contender]:
    files = _files_below(path)
    ways = [("buffered", False, 1), ("buffered", False, 2)]
    if direct:
        ways += [("direct", True, 2), ("direct", True, 4)]
    entries = []
    for way, is_direct, threads in ways:
        reader = limits.RawReader(threads=threads, direct=is_direct)
        entries.append(
            _limit_entry(
                f"raw_{way}_{threads}",
                f"raw {way} read, {threads} in flight",
                partial(reader.read, files),
                partial(set_cache, files),
            )
        )
    return entries


def load_training_state(setup: Setup, results: Results, state: State, target: State) -> None:
    """Loads of the training state into existing tensors, from the page cache and from the disk."""
    total = states.payload_bytes(state)
    with _scratch(setup, "load") as scratch:
        stock_path, our_path = scratch / "stock", scratch / "ours"
        SAVERS["stock_1"].save(state, stock_path)
        SAVERS["ours_dcp"].save(state, our_path)
        direct = limits.direct_io_works(scratch)
        loaders = contenders.LOADERS
        of_stock = replace(
            loaders["ours_dcp"], label="dcp.load with torch_ckpt, files of the stock writer"
        )
        pairs = [
            ("stock", loaders["stock"], stock_path),
            ("ours_dcp", loaders["ours_dcp"], our_path),
            ("ours_call", loaders["ours_call"], our_path),
            ("ours_dcp_of_stock", of_stock, stock_path),
        ]

        def entries(set_cache: Callable[[list[Path]], None]) -> list[Contender]:
            return [
                _loader_entry(name, loader, state, target, path, set_cache)
                for name, loader, path in pairs
            ] + _raw_read_entries(our_path, set_cache, direct=direct)

        title = f"Load {readable_size(total)}"
        for name, suffix, set_cache in (
            ("load_warm", "warm page cache", pagecache.warm),
            ("load_cold", "cold page cache", pagecache.evict),
        ):
            try:
                group = _measure(setup, name, f"{title}, {suffix}", total, entries(set_cache))
            except pagecache.CacheStateError as error:
                _skip(setup, results, f"{title}, {suffix}", str(error))
            else:
                results.groups.append(group)


def small_tensors(setup: Setup, results: Results) -> None:
    """Saves and loads of many tensors of 1 KiB, where the cost per tensor is everything."""
    state = states.small_tensors_state(setup.small_tensor_count)
    total = states.payload_bytes(state)
    what = f"{setup.small_tensor_count:,} tensors of 1 KiB"
    with _scratch(setup, "small") as scratch:
        names = [*STOCK_SAVERS, "ours_dcp", "ours_call"]
        entries = [_saver_entry(name, state, scratch / "checkpoint") for name in names]
        results.groups.append(_measure(setup, "small_save", f"Save {what}, fsync", total, entries))

        target = states.blank_copy(state)
        entries = []
        # Each loader reads what the saver of its kind wrote.
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


def memory_beyond_state(setup: Setup, results: Results, repeats: int) -> None:
    """Memory that saving needs beyond the state, in fresh processes."""
    setup.say("\nMemory beyond the state while saving")
    with _scratch(setup, "memory-runs") as scratch:
        for repeat in range(repeats):
            for name, budget in memory.MEASURED_SAVERS:
                try:
                    sample = memory.sample_in_fresh_process(
                        name,
                        budget_bytes=budget,
                        state_bytes=setup.state_bytes,
                        tensor_count=setup.tensor_count,
                        directory=scratch,
                        round_index=repeat,
                    )
                except memory.PeakResetError as error:
                    _skip(setup, results, "memory beyond the state", str(error))
                    return
                results.memory.append(sample)
                setup.say(f"  {sample.label:<60}{sample.growth_bytes / 2**20:9.1f} MiB")
