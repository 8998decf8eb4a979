"""Compares contenders round by round and holds the medians to their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .memory import MemorySample
from .results import Comparison, Group, readable_size

# What a save may need beyond max_host_bytes: metadata, thread stacks, Python objects.
MEMORY_ALLOWANCE_BYTES = 64 << 20


def _ratios(group: Group, upper: str, lower: str, quantity: str) -> list[float]:
    """The quotients of two contenders within each round."""
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
    """How many times as fast `ours` is as `baseline`; nothing where that was not measured."""
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
    group: Group, key: str, ours: str, baseline: str, *, target: float | None = None
) -> Iterable[Comparison]:
    """CPU seconds of `ours` per CPU second of `baseline`."""
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
    )


def _save(group: Group) -> Iterable[Comparison]:
    # Of several variants the one with the best median is the baseline, in every round.
    best_stock = group.fastest("stock_")
    raw_direct, raw_buffered = group.fastest("raw_direct_"), group.fastest("raw_buffered_")
    yield from _speed(group, "stock_1", "ours_dcp", "stock_1", target=2.0)
    yield from _speed(group, "best_stock", "ours_dcp", best_stock, target=1.5)
    yield from _speed(group, "raw_direct", "ours_dcp", raw_direct, target=0.90)
    yield from _cpu_time(group, "cpu", "ours_dcp", "stock_1", target=0.4)
    yield from _speed(group, "buffered", "ours_buffered", best_stock, target=1.0)
    yield from _speed(group, "call", "ours_call", "stock_1")
    yield from _speed(group, "raw_buffered", "ours_buffered", raw_buffered, headline=False)
    yield from _speed(group, "memcpy", "ours_dcp", "memcpy", headline=False)


def _load(group: Group) -> Iterable[Comparison]:
    yield from _speed(group, "stock", "ours_dcp", "stock")
    yield from _speed(group, "call", "ours_call", "stock")
    yield from _speed(group, "same_files", "ours_dcp_of_stock", "stock", headline=False)
    yield from _speed(group, "raw", "ours_dcp", group.fastest("raw_"))
    yield from _cpu_time(group, "cpu", "ours_dcp", "stock")


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


_RULES: dict[str, Callable[[Group], Iterable[Comparison]]] = {
    "save": _save,
    "load_warm": _load,
    "load_cold": _load,
    "small_save": _small_save,
    "small_load": _small_load,
}


def compare_groups(groups: Sequence[Group]) -> list[Comparison]:
    """The comparisons of every group that was measured."""
    return [comparison for group in groups for comparison in _RULES[group.name](group)]


def compare_memory(samples: Sequence[MemorySample]) -> list[Comparison]:
    """Growth in MiB of each saver, held to its byte budget where one was given."""
    by_label: dict[str, list[MemorySample]] = {}
    for sample in samples:
        by_label.setdefault(sample.label, []).append(sample)
    comparisons = []
    for label, own in by_label.items():
        budget = own[0].budget_bytes
        limit = None if budget is None else (budget + MEMORY_ALLOWANCE_BYTES) / 2**20
        key = own[0].contender if budget is None else f"{own[0].contender}.budget"
        comparisons.append(
            Comparison(
                key=f"memory.{key}",
                work=f"Memory beyond the state while saving {readable_size(own[0].state_bytes)}",
                quantity="memory",
                ours=label,
                per_round=[sample.growth_bytes / 2**20 for sample in own],
                target=limit,
            )
        )
    return comparisons
