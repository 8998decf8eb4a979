"""Makes tables, charts and the blocks of numbers in documents: ``python -m benchmarks.report``."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import charts
from . import results as results_module
from .blocks import replace_block
from .memory import LOAD_PREFIX, MEASURED_BACKGROUND_SAVERS
from .results import Comparison, Group, Results

# The charts in docs/benchmarks.md. Those of other groups are only written.
HEADLINE_CHARTS = (charts.OVERVIEW, "save", "load_warm", "small_save")
ASYNC_CHARTS = (charts.TIMELINE, "async")
QUEUE_CHARTS = ("megatron",)
LOADING_CHARTS = ("load_warm", "load_cold", "partial_cold", "reshard_cold", "replicas_cold")
# First parts of the names of the groups.
LOADING_GROUPS = ("load", "partial", "reshard", "replicas")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int) -> str:
    """Formats a markdown table. Columns from `numeric_from` on are aligned to the right."""
    rule = ["---" if column < numeric_from else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def _number(value: float, quantity: str) -> str:
    if quantity == "memory":
        return f"{value:.0f} MiB"
    if quantity in ("time in the call", "added time", "time per GB"):
        return f"{value:.2f} ms"
    return f"{value:.2f} x"


def _with_seconds(label: str | None, seconds: float | None) -> str:
    return " ".join([label or "", "" if seconds is None else f"({seconds:.3g} s)"]).strip()


def _comparison_row(comparison: Comparison) -> list[str]:
    quantity = comparison.quantity
    low, high = min(comparison.per_round), max(comparison.per_round)
    return [
        comparison.work,
        _with_seconds(comparison.ours, comparison.ours_median),
        _with_seconds(comparison.baseline, comparison.baseline_median),
        _QUANTITY_LABELS.get(quantity, quantity),
        f"**{_number(comparison.value, quantity)}**",
        f"{_number(low, quantity)} to {_number(high, quantity)}",
    ]


def _target_cells(comparison: Comparison) -> list[str]:
    if comparison.target is None:
        return ["", ""]
    sign = "≥" if comparison.at_least else "≤"
    target = f"{sign} {_number(comparison.target, comparison.quantity)}"
    return [target, "yes" if comparison.met else "**no**"]


_COMPARISON_HEADER = ["workload", "measured", "baseline", "quantity", "median", "min to max"]
# Labels for quantities of committed results.
_QUANTITY_LABELS = {"training stands still": "training stalled", "stall": "training stalled"}


def _rate(group: Group, seconds: float) -> str:
    rate = group.bytes / seconds
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def _background_table(group: Group) -> str:
    rows = []
    for info in group.contenders:

        def median(quantity: str, form: str, name: str = info.name) -> str:
            values = group.values(name, quantity)
            return format(statistics.median(values), form) if values else ""

        saves = sum(len(sample.saves) for sample in group.background_samples(info.name))
        steps = sum(sample.steps for sample in group.background_samples(info.name))
        rows.append(
            [
                f"**{info.label}**" if info.kind == "ours" else info.label,
                f"{statistics.median(group.values(info.name, 'stall_s')) * 1e3:,.1f}",
                median("staged_s", ".3f"),
                median("durable_s", ".3f"),
                median("step_median_ratio", ".2f"),
                median("step_mean_ratio", ".2f"),
                str(steps) if steps else "",
                str(saves),
                median("cpu_s", ".3f"),
            ]
        )
    header = [group.title, "call, ms", "time to staged, s", "time to durable, s"]
    header += ["median step, x", "mean step, x", "timed steps", "saves", "CPU s"]
    return _table(header, rows, numeric_from=1)


def _queue_table(group: Group) -> str:
    rows = []
    for info in group.contenders:

        def median(quantity: str, form: str, scale: float = 1, name: str = info.name) -> str:
            values = group.values(name, quantity)
            return format(statistics.median(values) * scale, form) if values else ""

        samples = group.queue_samples(info.name)
        kept = sum(sample.kept for sample in samples)
        rows.append(
            [
                f"**{info.label}**" if info.kind == "ours" else info.label,
                median("first_call_s", ",.0f", 1e3),
                *(
                    median(quantity, ",.1f", 1e3)
                    for quantity in ("call_s", "plan_s", "schedule_s", "finalize_s", "stall_s")
                ),
                median("poll_s", ",.0f", 1e6),
                median("durable_s", ".2f"),
                median("step_median_ratio", ".2f"),
                median("step_mean_ratio", ".2f"),
                median("cpu_s", ".2f"),
                median("first_cpu_s", ".2f"),
                median("memory_bytes", ",.0f", 2**-20),
                median("processes", ".0f"),
                f"{kept} of {len(samples)}",
            ]
        )
    header = [group.title, "first call, ms", "call, ms", "plan, ms", "schedule, ms", "finalize, ms"]
    header += ["training stalled, ms", "poll, us", "time to durable, s"]
    header += ["median step, x", "mean step, x", "CPU s", "first save, CPU s"]
    header += ["extra memory, MiB", "extra processes", "correct snapshots"]
    return _table(header, rows, numeric_from=1)


def _calls_table(group: Group) -> str:
    rows = []
    for info in group.contenders:
        wall = group.wall(info.name)
        rows.append(
            [
                info.label,
                f"{wall.median * 1e3:.3f}",
                f"{wall.minimum * 1e3:.3f} to {wall.maximum * 1e3:.3f}",
                f"{group.cpu(info.name).median * 1e3:.3f}",
            ]
        )
    return _table([group.title, "call, ms", "min to max, ms", "CPU ms"], rows, numeric_from=1)


def _group_table(group: Group) -> str:
    if group.background:
        return _background_table(group)
    if group.queued:
        return _queue_table(group)
    if group.of_calls:
        return _calls_table(group)
    rows = []
    for info in sorted(group.contenders, key=lambda info: group.wall(info.name).median):
        wall = group.wall(info.name)
        row = [
            f"**{info.label}**" if info.kind == "ours" else info.label,
            f"{wall.median:.3f}",
            f"{wall.lower_quartile:.3f} to {wall.upper_quartile:.3f}",
            f"{wall.minimum:.3f} to {wall.maximum:.3f}",
            _rate(group, wall.median),
            f"{group.cpu(info.name).median:.3f}",
        ]
        if group.counts_reads:
            row.append(f"{statistics.median(group.read_per_wanted(info.name)):.3f}")
        rows.append(row)
    header = [group.title, "median, s", "quartiles, s", "min to max, s", "rate", "CPU s"]
    if group.counts_reads:
        header.append("bytes read per byte wanted")
    return _table(header, rows, numeric_from=1)


_BACKGROUND_EXPLANATION = (
    "Training stops during the call. Once the save is staged, the state may change again. The step "
    "columns compare the training steps between the return of the call and the end of the save "
    "with the steps just before the save, as ratios of the medians and of the means. Training is "
    "Python-driven autograd on one thread and does not change the saved state. CPU seconds cover "
    "all processes of the save, but not the training steps."
)


_QUEUE_EXPLANATION = (
    "These saves follow Megatron's flow: plan, schedule, a poll after every step, finalize. The "
    "call columns show the time from the start of the plan until the queue has accepted the "
    "request, for the first save of a fresh process and for later saves. The plan, schedule and "
    "finalize columns cover only later saves. Training is stalled during plan, schedule, polls and "
    "finalize. The poll column shows the time of one poll while the save is still running. The "
    "step columns compare the training steps between the call and the end of the save with the "
    "steps just before the save, as ratios of the medians and of the means. CPU seconds cover all "
    "processes, but not the training steps. Extra memory is the increase in the memory of all "
    "processes from before the first save to a later save. It counts shared memory once and "
    "excludes mapped files. Extra processes are all processes other than the ranks themselves. A "
    "snapshot is correct if changing the state right after the call does not affect it."
)

_CALLS_EXPLANATION = (
    "The table shows calls to a manager. For steps that are not saved, each time is a mean, "
    "because only a few of these calls query the store; for other calls, it is a median. Before "
    "each call, all ranks run one training step and wait for each other. Times are the slowest "
    "rank's. Added time is how much longer a save through the manager blocks than "
    "async_save. CPU milliseconds are the CPU time of the process during the call, the step before "
    "it and the complete save."
)

_QUEUE_PEERS_EXPLANATION = (
    "nvidia-resiliency-ext and megatron-core save through a worker process. The state is on the "
    "CPU, and these packages do not copy CPU tensors. After the first save, the tensors are in "
    "memory that is shared with the worker. Later calls therefore send only handles, and the "
    "worker reads tensors while training changes them. In the rows labeled 'of copies', the caller "
    "clones the tensors first, as a user would have to. {} All other code is the packages' own, as "
    "installed from PyPI."
)


_READS_EXPLANATION = (
    "Bytes read is the number of bytes that read system calls returned, from the page cache or "
    "from disk, including metadata. It is given per byte of loaded tensors. With several ranks, "
    "bytes and CPU seconds are sums over the ranks, wall seconds are the slowest rank's, "
    "and rates are computed from the number of bytes in the title."
)


def _introduction(results: Results, groups: Sequence[Group], *, quotable: bool) -> list[str]:
    paragraphs = [f"Measured on {results.machine.sentence()}."]
    if not quotable:
        paragraphs.append(
            "**Do not quote this trial run:** it is too small, too short or incomplete."
        )
    paragraphs.append(
        f"There are {results.parameters['rounds']} rounds. In each round, all contenders of a "
        "group run one after another, in a different order each time. A ratio compares two "
        "contenders in the same round; the tables show the median over the rounds. Times are also "
        "medians over the rounds. Speed compares wall times. CPU time is the user and system time "
        "of the saving or loading process."
    )
    if any(group.background for group in groups):
        paragraphs.append(_BACKGROUND_EXPLANATION)
    if any(group.counts_reads for group in groups):
        paragraphs.append(_READS_EXPLANATION)
    if any(group.of_calls for group in groups):
        paragraphs.append(_CALLS_EXPLANATION)
    if any(group.queued for group in groups):
        paragraphs.append(_QUEUE_EXPLANATION)
        replaced = ", ".join(results.parameters["megatron"]["replaced_for_peers"])
        stubs = (
            "Without a GPU, stubs replace these functions in the rank and in the worker: "
            f"{replaced}."
            if replaced
            else "None of their functions are replaced."
        )
        paragraphs.append(_QUEUE_PEERS_EXPLANATION.format(stubs))
    return paragraphs


def _crossover_list(results: Results) -> list[str]:
    lines = [f"- {crossover.sentence}" for crossover in results.crossovers]
    return ["\n".join(lines)] if lines else []


def _skipped_list(results: Results) -> list[str]:
    if not results.skipped:
        return []
    lines = [f"- {skipped.what}: {skipped.reason}" for skipped in results.skipped]
    return ["Not measured:\n\n" + "\n".join(lines)]


def _table_with_targets(comparisons: Sequence[Comparison]) -> str:
    rows = [_comparison_row(entry) + _target_cells(entry) for entry in comparisons]
    return _table([*_COMPARISON_HEADER, "target", "target met"], rows, numeric_from=4)


def full_report(results: Results) -> str:
    """Formats every comparison with its target, and every contender, in markdown."""
    paragraphs = _introduction(results, results.groups, quotable=results.representative)
    if results.comparisons:
        paragraphs.append(_table_with_targets(results.comparisons))
    paragraphs += _crossover_list(results)
    paragraphs += [_group_table(group) for group in results.groups]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


@dataclass(frozen=True)
class _Number:
    """A row of the README's table: seconds of torch_ckpt and of two settings of stock torch.

    Attributes:
        group: name of the group of contenders.
        work: title of the row; ``{}`` stands for the size of the group's state.
        quantity: attribute of a sample to compare, in seconds.
        ours: contender of torch_ckpt to compare with stock.
        default: contender that is stock's default.
        stock: prefix of the names of all stock contenders; the fastest is stock's best setting.
        also: another contender of torch_ckpt whose seconds the row shows.
    """

    group: str
    work: str
    quantity: str
    ours: str
    default: str
    stock: str
    also: str | None = None


_NUMBERS = (
    _Number("save", "Save {}, fsynced", "wall_s", "ours_dcp", "stock_1", "stock_"),
    _Number("load_cold", "Load {} from disk", "wall_s", "ours_dcp", "stock", "stock"),
    _Number(
        "async",
        "Pause of training for a background save of {}",
        "stall_s",
        "ours_blocking",
        "stock_thread",
        "stock_",
        also="ours_overlapped",
    ),
    _Number(
        "small_save",
        "Save 20,000 tensors of 1 KiB, fsynced",
        "wall_s",
        "ours_dcp",
        "stock_1",
        "stock_",
    ),
)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _number_row(number: _Number, group: Group) -> list[str]:
    def median(contender: str) -> float:
        return statistics.median(group.values(contender, number.quantity))

    def against(contender: str) -> str:
        ours = group.values(number.ours, number.quantity)
        ratios = [
            theirs / own
            for theirs, own in zip(group.values(contender, number.quantity), ours, strict=True)
        ]
        ratio = f"{statistics.median(ratios):.1f} x ({min(ratios):.1f} to {max(ratios):.1f})"
        ratio = f"**{ratio}**" if min(ratios) > 1 else f"no clear difference: {ratio}"
        return f"{_seconds(median(contender))}, {ratio}<br>{group.label(contender)}"

    stock = [info.name for info in group.contenders if info.name.startswith(number.stock)]
    best = min(stock, key=median)
    ours = f"**{_seconds(median(number.ours))}**<br>{group.label(number.ours)}"
    if number.also is not None:
        setting = group.label(number.also).split(", ")[-1]
        ours += f"<br>{setting}: {_seconds(median(number.also))} in the call, and the next "
        ours += "`optimizer.step()` waits for the copy"
    work = number.work.format(results_module.readable_size(group.bytes))
    against_best = "the default" if best == number.default else against(best)
    return [work, ours, against(number.default), against_best]


def _number_groups(results: Results) -> list[Group]:
    groups = {group.name: group for group in results.groups}
    names = [number.group for number in _NUMBERS]
    return [groups[name] for name in names] if groups.keys() >= set(names) else []


def numbers_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats four times of torch_ckpt, each with stock's default and stock's best setting."""
    rows = [
        _number_row(number, group)
        for number, group in zip(_NUMBERS, _number_groups(results), strict=True)
    ]
    header = ["median time", "torch_ckpt", "stock torch, default", "stock torch, best setting"]
    caption = (
        f"Times are medians of {results.parameters['rounds']} rounds. In each round, stock's time "
        "is divided by torch_ckpt's; the table gives the median of these ratios (lowest to "
        "highest), which may differ from the ratio of the median times. "
        f"Measured on {results.machine.sentence()}."
    )
    return "\n\n".join([_table(header, rows, numeric_from=4), caption])


def missed_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats the comparisons that miss their targets as a table."""
    rows = [
        [
            entry.work,
            entry.quantity,
            entry.ours,
            entry.baseline or "",
            f"**{_number(entry.value, entry.quantity)}**",
            _target_cells(entry)[0],
        ]
        for entry in results.comparisons
        if entry.met is False
    ]
    return _table(["workload", "quantity", "measured", "baseline", "median", "target"], rows, 4)


def headline_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats the headline comparisons and charts in markdown."""
    rows = [_comparison_row(entry) for entry in results.comparisons if entry.headline]
    paragraphs = _introduction(results, results.groups, quotable=results.representative)
    paragraphs.append(_table(_COMPARISON_HEADER, rows, numeric_from=4))
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


def _async_groups(results: Results) -> list[Group]:
    return [group for group in results.groups if group.background]


def _queue_groups(results: Results) -> list[Group]:
    return [group for group in results.groups if group.queued]


def _manager_groups(results: Results) -> list[Group]:
    return [group for group in results.groups if group.of_calls]


def _loading_groups(results: Results) -> list[Group]:
    return [group for group in results.groups if group.name.split("_")[0] in LOADING_GROUPS]


def async_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats everything about background saves in markdown: targets, tables, images."""
    groups = _async_groups(results)
    about_memory = {
        f"memory.{name}{suffix}"
        for name, _ in MEASURED_BACKGROUND_SAVERS
        for suffix in ("", ".budget")
    }
    comparisons = [
        entry
        for entry in results.comparisons
        if entry.key.startswith("async") or entry.key in about_memory
    ]
    paragraphs = _introduction(results, groups, quotable=results.thorough)
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    paragraphs.append(_table_with_targets(comparisons))
    paragraphs += [_group_table(group) for group in groups]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


def queue_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats everything about Megatron's saves in markdown: tables, comparisons, images."""
    groups = _queue_groups(results)
    names = {group.name for group in groups}
    rows = [
        _comparison_row(entry)
        for entry in results.comparisons
        if entry.key.split(".")[0] in names and entry.quantity != "step time"
    ]
    paragraphs = _introduction(results, groups, quotable=results.thorough)
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    paragraphs += [_group_table(group) for group in groups]
    if rows:
        paragraphs.append(_table(_COMPARISON_HEADER, rows, numeric_from=4))
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


def manager_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats the cost of a manager in markdown: targets and a table."""
    groups = _manager_groups(results)
    names = {group.name for group in groups}
    comparisons = [entry for entry in results.comparisons if entry.key.split(".")[0] in names]
    paragraphs = _introduction(results, groups, quotable=results.thorough)
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    paragraphs.append(_table_with_targets(comparisons))
    paragraphs += [_group_table(group) for group in groups]
    return "\n\n".join(paragraphs) + "\n"


def loading_block(results: Results, image_links: Sequence[str] = ()) -> str:
    """Formats everything about loads in markdown: targets, crossovers, tables, images."""
    groups = _loading_groups(results)
    names = {group.name for group in groups}
    comparisons = [
        entry
        for entry in results.comparisons
        if entry.key.split(".")[0] in names or entry.key.startswith(f"memory.{LOAD_PREFIX}")
    ]
    paragraphs = _introduction(results, groups, quotable=results.thorough)
    paragraphs += [f"![{Path(link).stem}]({link})" for link in image_links]
    paragraphs.append(_table_with_targets(comparisons))
    paragraphs += _crossover_list(results)
    paragraphs += [_group_table(group) for group in groups]
    return "\n\n".join(paragraphs + _skipped_list(results)) + "\n"


@dataclass(frozen=True)
class _Block:
    """A block of a document that a result fills.

    Attributes:
        marker: name of the block in the document's comments.
        groups: returns the groups that the block shows, or an empty list if one is missing.
        render: makes the text.
        charts: names of the charts that the block shows.
    """

    marker: str
    groups: Callable[[Results], list[Group]]
    render: Callable[[Results, Sequence[str]], str]
    charts: Sequence[str] = ()

    @property
    def begin(self) -> str:
        return f"<!-- {self.marker}:begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.marker}:end -->"


def _headline_groups(results: Results) -> list[Group]:
    return results.groups if results.representative else []


BLOCKS = (
    _Block("benchmark-numbers", _number_groups, numbers_block),
    _Block("benchmark-missed", _number_groups, missed_block),
    _Block("benchmark-headline", _headline_groups, headline_block, HEADLINE_CHARTS),
    _Block("benchmark-async", _async_groups, async_block, ASYNC_CHARTS),
    _Block("benchmark-megatron", _queue_groups, queue_block, QUEUE_CHARTS),
    _Block("benchmark-manager", _manager_groups, manager_block),
    _Block("benchmark-loading", _loading_groups, loading_block, LOADING_CHARTS),
)


def _links(images: Mapping[str, Path], names: Sequence[str], document: Path) -> list[str]:
    """Returns the paths of the images relative to `document`."""
    base = document.resolve().parent
    return [
        Path(os.path.relpath(images[name].resolve(), base)).as_posix()
        for name in names
        if name in images
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        help="JSON files of benchmarks.run; if several have a group, the last one counts",
    )
    parser.add_argument("--doc", type=Path, help="Markdown file whose benchmark blocks are filled")
    parser.add_argument(
        "--images",
        type=Path,
        default=Path("docs/images"),
        help="directory for charts (default %(default)s)",
    )
    parser.add_argument("--no-charts", action="store_true", help="link existing charts only")
    return parser


def _fill(document: Path, results: Results, images: Mapping[str, Path]) -> None:
    text = document.read_text()
    blocks = [block for block in BLOCKS if block.begin in text]
    if not blocks:
        markers = " or ".join(block.begin for block in BLOCKS)
        raise SystemExit(f"{document} has none of the markers {markers}")
    for block in blocks:
        if not (results.thorough and block.groups(results)):
            raise SystemExit(
                f"{document}: the results are of a trial run or lack groups of {block.marker}. "
                "Pass the results of full runs."
            )
        content = block.render(results, _links(images, block.charts, document))
        text = replace_block(text, block.begin, block.end, content)
    document.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report, writes the charts, and fills the blocks of a document."""
    options = _parser().parse_args(arguments)
    results = results_module.merged([results_module.read(file) for file in options.results])
    if options.no_charts:
        known = charts.paths(results, options.images)
        images = {name: path for name, path in known.items() if path.exists()}
    else:
        images = charts.write(results, options.images)
    print(full_report(results))
    if options.doc:
        _fill(options.doc, results, images)


if __name__ == "__main__":
    main()
