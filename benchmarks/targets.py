"""Compares contenders round by round, and the medians with their targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .first_saves import first_contender, later_contender
from .memory import MemorySample
from .results import Comparison, Crossover, Group, readable_size

# Memory of a save beyond max_host_bytes: metadata, thread stacks, Python objects.
MEMORY_ALLOWANCE_BYTES = 64 << 20
# Allows for headers, and for complete blocks at both ends of a direct read.
MAX_READ_PER_WANTED = 1.05
# Milliseconds of a manager's call in a step that it does not save, and of a save beyond async_save.
MAX_IN_STEP_MS = 1.0
MAX_ADDED_TO_SAVE_MS = 5.0
# Labels in tables for fields of a BackgroundSample.
_FIELD_LABELS = {"stall_s": "stall", "staged_s": "staging", "durable_s": "until durable"}


def _ratios(group: Group, upper: str, lower: str, quantity: str) -> list[float]:
    """Divides the quantities of two contenders within each round."""
    return [
        over / under
        for over, under in zip(
            group.values(upper, quantity), group.values(lower, quantity), strict=True
        )
    ]


def _speed(
    group: Group,
    key: str,
    ours: str,
    baseline: str | None,
    *,
    target: float | None = None,
    headline: bool = True,
) -> Iterable[Comparison]:
    """Yields the speed of `ours` relative to `baseline`; nothing if `baseline` is None."""
    if baseline is None:
        return
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity="speed",
        ours=group.label(ours),
        per_round=_ratios(group, baseline, ours, "wall_s"),
        baseline=group.label(baseline),
        ours_median=group.wall(ours).median,
        baseline_median=group.wall(baseline).median,
        target=target,
        headline=headline,
    )


def _cpu_time(
    group: Group,
    key: str,
    ours: str,
    baseline: str,
    *,
    target: float | None = None,
    headline: bool = True,
) -> Iterable[Comparison]:
    """Yields the CPU seconds of `ours` per CPU second of `baseline`."""
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity="CPU time",
        ours=group.label(ours),
        per_round=_ratios(group, ours, baseline, "cpu_s"),
        baseline=group.label(baseline),
        ours_median=group.cpu(ours).median,
        baseline_median=group.cpu(baseline).median,
        target=target,
        headline=headline,
    )


# torch.save and safetensors, each of which writes one file.
_SINGLE_FILES = ("mapped", "safetensors")


def _save(group: Group) -> Iterable[Comparison]:
    # The variant with the best median is the baseline in every round.
    best_stock = group.fastest("stock_")
    raw_direct, raw_buffered = group.fastest("raw_direct_"), group.fastest("raw_buffered_")
    yield from _speed(group, "stock_1", "ours_dcp", "stock_1", target=2.0)
    yield from _speed(group, "best_stock", "ours_dcp", best_stock, target=1.5)
    yield from _speed(group, "raw_direct", "ours_dcp", raw_direct, target=0.90)
    yield from _cpu_time(group, "cpu", "ours_dcp", "stock_1", target=0.4)
    yield from _speed(group, "buffered", "ours_buffered", best_stock, target=1.0, headline=False)
    yield from _speed(group, "call", "ours_call", "stock_1", headline=False)
    yield from _speed(group, "raw_buffered", "ours_buffered", raw_buffered, headline=False)
    for other in _SINGLE_FILES:
        yield from _speed(group, other, "ours_call", other, headline=False)
    yield from _speed(group, "memcpy", "ours_dcp", "memcpy", headline=False)


def _load(group: Group, *, stock: float, limit: str, of_limit: float) -> Iterable[Comparison]:
    """Compares loads. `stock` and `of_limit` are target speeds relative to stock and to `limit`."""
    yield from _speed(group, "stock", "ours_dcp", "stock", target=stock)
    yield from _speed(
        group, "stock_threads", "ours_dcp", "stock_threads", target=1.0, headline=False
    )
    yield from _speed(group, "limit", "ours_dcp", group.fastest(limit), target=of_limit)
    yield from _speed(group, "budget", "ours_budget", "ours_dcp", target=0.8, headline=False)
    yield from _speed(group, "call", "ours_call", "stock", headline=False)
    yield from _speed(group, "same_files", "ours_dcp_of_stock", "stock", headline=False)
    yield from _cpu_time(group, "cpu", "ours_dcp", "stock", headline=False)
    yield from _cpu_time(group, "cpu.stock_threads", "ours_dcp", "stock_threads", headline=False)


def _load_warm(group: Group) -> Iterable[Comparison]:
    yield from _load(group, stock=4.0, limit="memcpy_", of_limit=0.6)
    yield from _speed(group, "raw", "ours_dcp", group.fastest("raw_"), headline=False)
    for other in _SINGLE_FILES:
        yield from _speed(group, other, "ours_call", other, target=0.85, headline=False)
        yield from _speed(
            group, f"unverified.{other}", "ours_unverified", other, target=1.0, headline=False
        )


def _load_cold(group: Group) -> Iterable[Comparison]:
    yield from _load(group, stock=2.5, limit="raw_direct_", of_limit=0.85)
    for other in _SINGLE_FILES:
        yield from _speed(group, other, "ours_call", other, headline=False)


def _reads(
    group: Group, key: str, ours: str, *, target: float | None = None, headline: bool = False
) -> Iterable[Comparison]:
    """Yields the bytes that a contender reads per byte loaded."""
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity="bytes read",
        ours=group.label(ours),
        per_round=group.read_per_wanted(ours),
        baseline="bytes wanted",
        target=target,
        headline=headline,
    )


def _partial(group: Group) -> Iterable[Comparison]:
    # Only cold loads are a headline: their direct reads of complete blocks read more.
    cold = group.name == "partial_cold"
    yield from _reads(group, "read", "ours_dcp", target=MAX_READ_PER_WANTED, headline=cold)
    yield from _reads(group, "read.stock", "stock")
    yield from _speed(group, "stock", "ours_dcp", "stock", headline=cold)
    yield from _speed(group, "stock_threads", "ours_dcp", "stock_threads", headline=False)
    yield from _cpu_time(group, "cpu", "ours_dcp", "stock", headline=False)


def _worlds(group: Group, prefix: str) -> list[int]:
    """Returns the numbers of ranks in the names of contenders that start with `prefix`."""
    names = [info.name for info in group.contenders if info.name.startswith(prefix)]
    return sorted(int(name.removeprefix(prefix)) for name in names)


def _reshard(group: Group) -> Iterable[Comparison]:
    for world in _worlds(group, "ours_"):
        ours, stock = f"ours_{world}", f"stock_{world}"
        yield from _reads(group, f"read.{world}", ours, target=MAX_READ_PER_WANTED)
        yield from _reads(group, f"read.stock.{world}", stock)
        yield from _speed(group, f"stock.{world}", ours, stock, headline=False)


def _replicas(group: Group) -> Iterable[Comparison]:
    for world in _worlds(group, "once_"):
        once, each = f"once_{world}", f"each_{world}"
        yield from _speed(group, str(world), once, each, headline=False)
        for other in ("stock", "direct"):
            if group.has(f"{other}_{world}"):
                yield from _speed(
                    group, f"{other}.{world}", each, f"{other}_{world}", headline=False
                )
        yield from _reads(group, f"read.{world}", once)


def crossovers(groups: Sequence[Group]) -> list[Crossover]:
    """Finds the number of ranks from which `read_once` is faster, for each group with it."""
    found = []
    for group in groups:
        # A single rank does not read for other ranks.
        worlds = [world for world in _worlds(group, "once_") if world > 1]
        if not worlds:
            continue
        gains: int | None = None
        for world in reversed(worlds):
            if statistics.median(_ratios(group, f"each_{world}", f"once_{world}", "wall_s")) <= 1:
                break
            gains = world
        found.append(Crossover(group.title, gains, worlds[-1]))
    return found


def _small_save(group: Group) -> Iterable[Comparison]:
    yield from _speed(group, "stock_1", "ours_dcp", "stock_1", target=3.0)
    yield from _speed(group, "call", "ours_call", "stock_1", target=8.0)
    best_stock = group.fastest("stock_")
    if best_stock != "stock_1":
        yield from _speed(group, "best_stock", "ours_dcp", best_stock)
        yield from _speed(group, "call.best_stock", "ours_call", best_stock)


def _small_load(group: Group) -> Iterable[Comparison]:
    yield from _speed(group, "stock", "ours_dcp", "stock", target=3.0)
    yield from _speed(group, "call", "ours_call", "stock", target=8.0)


def _seconds(
    group: Group,
    key: str,
    quantity: str,
    upper: tuple[str, str],
    lower: tuple[str, str],
    *,
    target: float | None = None,
    headline: bool = False,
) -> Iterable[Comparison]:
    """Yields `upper` divided by `lower`: each is a contender and a field of its samples in seconds.

    For a speed, `upper` is the baseline; otherwise it is ours. Yields nothing if a contender was
    not measured.
    """
    if not (group.has(upper[0]) and group.has(lower[0])):
        return
    speed = quantity.endswith("speed")
    ours, baseline = (lower, upper) if speed else (upper, lower)
    above, below = group.values(*upper), group.values(*lower)
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity=quantity,
        ours=group.label(ours[0]),
        per_round=[over / under for over, under in zip(above, below, strict=True)],
        baseline=group.label(baseline[0]),
        ours_median=statistics.median(group.values(*ours)),
        baseline_median=statistics.median(group.values(*baseline)),
        target=target,
        headline=headline,
    )


def _call(group: Group, key: str, ours: str, *, target_ms: float) -> Iterable[Comparison]:
    """Yields the milliseconds in the call, with an absolute target."""
    stalls = group.values(ours, "stall_s")
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity="time in the call",
        ours=group.label(ours),
        per_round=[stall * 1e3 for stall in stalls],
        ours_median=statistics.median(stalls),
        target=target_ms,
    )


def _step_time(
    group: Group,
    key: str,
    contender: str,
    *,
    field: str = "step_median_ratio",
    target: float | None = None,
) -> Iterable[Comparison]:
    """Yields the time of a training step during a save, relative to a step just before it."""
    ratios = group.values(contender, field) if group.has(contender) else []
    if not ratios:
        return
    which = "median" if field == "step_median_ratio" else "mean"
    yield Comparison(
        key=f"{group.name}.{key}",
        work=group.title,
        quantity="step time",
        ours=group.label(contender),
        per_round=ratios,
        baseline=f"no save ({which} step)",
        target=target,
        headline=target is not None,
    )


def _async(group: Group) -> Iterable[Comparison]:
    blocking, overlapped = "ours_blocking", "ours_overlapped"
    memcpy = ("memcpy_2", "wall_s")
    yield from _seconds(
        group, "memcpy", "staging speed", memcpy, (blocking, "stall_s"), target=0.75
    )
    yield from _seconds(
        group, "overlapped.memcpy", "staging speed", memcpy, (overlapped, "staged_s")
    )
    for baseline, target in (
        ("stock_thread", 1 / 3),
        ("stock_thread_kept", None),
        ("stock_process", None),
    ):
        yield from _seconds(
            group,
            f"stall.{baseline}",
            "stall",
            (blocking, "stall_s"),
            (baseline, "stall_s"),
            target=target,
            headline=target is not None,
        )
    yield from _call(group, "overlapped.call", overlapped, target_ms=5.0)
    for ours, name in ((blocking, "blocking"), (overlapped, "overlapped")):
        yield from _step_time(group, f"{name}.step", ours, target=1.05)
        yield from _step_time(group, f"{name}.step.mean", ours, field="step_mean_ratio")
    for stock in ("stock_thread", "stock_thread_kept", "stock_process", "ours_writer"):
        yield from _step_time(group, f"{stock}.step", stock)
    for ours, name in ((blocking, "blocking"), (overlapped, "overlapped")):
        durable = (ours, "durable_s")
        yield from _seconds(
            group,
            f"{name}.durable",
            "time until durable",
            durable,
            ("ours_call", "durable_s"),
            target=1.3,
            headline=True,
        )
        yield from _seconds(
            group,
            f"{name}.durable.stock_thread",
            "time until durable",
            durable,
            ("stock_thread", "durable_s"),
        )


def _async_small(group: Group) -> Iterable[Comparison]:
    yield from _call(group, "overlapped.call", "ours_overlapped", target_ms=50.0)
    for name in ("blocking", "overlapped"):
        ours, stock = f"ours_{name}", "stock_thread"
        yield from _seconds(group, f"{name}.stall", "stall", (ours, "stall_s"), (stock, "stall_s"))
        yield from _seconds(
            group,
            f"{name}.durable",
            "time until durable",
            (ours, "durable_s"),
            (stock, "durable_s"),
        )
        yield from _step_time(group, f"{name}.step", ours)
    yield from _step_time(group, "stock_thread.step", "stock_thread")


def _async_first(group: Group) -> Iterable[Comparison]:
    for name, fields in (
        ("ours_blocking", ("stall_s", "durable_s")),
        ("ours_overlapped", ("staged_s", "durable_s")),
    ):
        for field in fields:
            yield from _seconds(
                group,
                f"{name.removeprefix('ours_')}.{field.removesuffix('_s')}",
                f"first save, {_FIELD_LABELS[field]}",
                (first_contender(name), field),
                (later_contender(name), field),
                target=2.0,
            )
            reserved = f"{name}_reserved"
            yield from _seconds(
                group,
                f"{reserved.removeprefix('ours_')}.{field.removesuffix('_s')}",
                f"first save, {_FIELD_LABELS[field]}",
                (first_contender(reserved), field),
                (later_contender(reserved), field),
            )


def _queues(group: Group) -> Iterable[Comparison]:
    for peer in ("nvrx", "nvrx_copies", "mcore"):
        for key, quantity, field in (
            ("first_call", "first call", "first_call_s"),
            ("call", "call", "call_s"),
            ("stall", "training stands still", "stall_s"),
            ("poll", "poll", "poll_s"),
            ("durable", "time until durable", "durable_s"),
            ("cpu", "CPU time", "cpu_s"),
        ):
            ours, theirs = ("ours", field), (peer, field)
            # A save of a tiny state may end before its first poll.
            if field == "poll_s" and len(group.values(*ours)) != len(group.values(*theirs)):
                continue
            yield from _seconds(group, f"{key}.{peer}", quantity, ours, theirs)
    for info in group.contenders:
        yield from _step_time(group, f"{info.name}.step", info.name)
        yield from _step_time(group, f"{info.name}.step.mean", info.name, field="step_mean_ratio")


def _manager(group: Group) -> Iterable[Comparison]:
    """Yields the calls in steps that are not saved, and the time of saves beyond async_save."""

    def comparison(name: str, quantity: str, **more: Any) -> Comparison:
        return Comparison(
            key=f"{group.name}.{name}",
            work=group.title,
            quantity=quantity,
            ours=group.label(name),
            ours_median=group.wall(name).median,
            headline=False,
            **more,
        )

    for info in group.contenders:
        what, _, world = info.name.rpartition("_")
        own = group.values(info.name, "wall_s")
        if what in ("tensors", "modules"):
            async_save = f"async_{world}"
            pairs = zip(own, group.values(async_save, "wall_s"), strict=True)
            yield comparison(
                info.name,
                "added time",
                per_round=[(ours - theirs) * 1e3 for ours, theirs in pairs],
                baseline=group.label(async_save),
                baseline_median=group.wall(async_save).median,
                target=MAX_ADDED_TO_SAVE_MS,
            )
        elif what == "replicas":
            per_round = [seconds * 1e3 / (group.bytes / 1e9) for seconds in own]
            yield comparison(info.name, "time per GB", per_round=per_round)
        elif what != "async":
            target = MAX_IN_STEP_MS if what.startswith("step_") else None
            per_round = [seconds * 1e3 for seconds in own]
            yield comparison(info.name, "time in the call", per_round=per_round, target=target)


_RULES: dict[str, Callable[[Group], Iterable[Comparison]]] = {
    "save": _save,
    "load_warm": _load_warm,
    "load_cold": _load_cold,
    "partial_warm": _partial,
    "partial_cold": _partial,
    "reshard_warm": _reshard,
    "reshard_cold": _reshard,
    "replicas_warm": _replicas,
    "replicas_cold": _replicas,
    "replicas_slow": _replicas,
    "small_save": _small_save,
    "small_load": _small_load,
    "async": _async,
    "async_small": _async_small,
    "async_first": _async_first,
    "manager": _manager,
    "megatron": _queues,
    "megatron_small": _queues,
    "megatron_ranks": _queues,
}


def compare_groups(groups: Sequence[Group]) -> list[Comparison]:
    """Makes the comparisons of every measured group."""
    return [comparison for group in groups for comparison in _RULES[group.name](group)]


def compare_memory(samples: Sequence[MemorySample]) -> list[Comparison]:
    """Compares the growth in MiB of each saver and loader with its byte budget, if it has one."""
    by_label: dict[str, list[MemorySample]] = {}
    for sample in samples:
        by_label.setdefault(sample.label, []).append(sample)
    return [_memory(label, own) for label, own in by_label.items()]


def _memory(label: str, own: Sequence[MemorySample]) -> Comparison:
    budget, is_load = own[0].budget_bytes, own[0].is_load
    # The budget of a load includes everything.
    allowance = 0 if is_load else MEMORY_ALLOWANCE_BYTES
    limit = None if budget is None else (budget + allowance) / 2**20
    key = own[0].contender if budget is None else f"{own[0].contender}.budget"
    what = "beyond the targets while loading" if is_load else "beyond the state while saving"
    return Comparison(
        key=f"memory.{key}",
        work=f"Memory {what} {readable_size(own[0].state_bytes)}",
        quantity="memory",
        ours=label,
        per_round=[sample.growth_bytes / 2**20 for sample in own],
        target=limit,
        headline=not is_load,
    )
