"""Formats results as tables, and fills the tables of the documents from the committed results.

``python -m benchmarks.report [--results DIRECTORY]`` fills the blocks of all documents. If several
results have a group, the newest is used.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import gpu_record
from .blocks import replace_block
from .results import Group, Results, read_all, readable_size

_REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = _REPOSITORY / "benchmarks" / "results"


@dataclass(frozen=True)
class _Column:
    """A column of a table: the median (or mean) of a quantity times `scale`."""

    title: str
    quantity: str
    form: str = ".3f"
    scale: float = 1.0
    middle: Callable[[Sequence[float]], float] = statistics.median


_TIME = (_Column("median, s", "wall_s"),)
_CPU = (_Column("CPU s", "cpu_s"),)
_STEPS = (
    _Column("median step, x", "step_median_ratio", ".2f"),
    _Column("mean step, x", "step_mean_ratio", ".2f"),
)
_BACKGROUND = (
    _Column("call, ms", "stall_s", ",.1f", 1e3),
    _Column("time to staged, s", "staged_s"),
    _Column("time to durable, s", "wall_s"),
    *_STEPS,
    *_CPU,
)
_QUEUE = (
    _Column("first call, ms", "first_call_s", ",.0f", 1e3),
    _Column("call, ms", "call_s", ",.1f", 1e3),
    _Column("training stalled, ms", "stall_s", ",.1f", 1e3),
    _Column("poll, us", "poll_s", ",.0f", 1e6),
    _Column("time to durable, s", "wall_s", ".2f"),
    *_STEPS,
    *_CPU,
    _Column("extra memory, MiB", "memory_bytes", ",.0f", 2**-20),
    _Column("extra processes", "processes", ".0f"),
    _Column("correct snapshots", "kept", ".0%", middle=statistics.fmean),
)


@dataclass(frozen=True)
class _Form:
    """The form of the tables of groups.

    Attributes:
        groups: first parts of the names of the groups.
        reference: the contender by which others are divided; ``{}`` stands for the last part of a
            contender's name.
        divided: the quantity that is divided.
        columns: the quantities to show.
    """

    groups: tuple[str, ...]
    reference: str
    divided: str = "wall_s"
    columns: tuple[_Column, ...] = (*_TIME, *_CPU)


_FORMS = (
    _Form(("async_first",), "", "", _BACKGROUND),
    _Form(("async",), "ours_blocking", "stall_s", _BACKGROUND),
    _Form(("megatron",), "ours", "stall_s", _QUEUE),
    _Form(("many_background",), "", "", (_Column("GIL held, ms", "python_s", ".0f", 1e3),)),
    _Form(
        ("many",),
        "",
        "",
        (*_TIME, *_CPU, _Column("memory beyond the state, GB", "growth_bytes", ".2f", 1e-9)),
    ),
    _Form(("memory",), "", "growth_bytes", (_Column("MiB", "growth_bytes", ".0f", 2**-20),)),
    _Form(("reshard",), "ours_{}"),
    _Form(("objects",), "torch_ckpt_{}"),
    _Form(("cluster_managers",), "local disk_{}"),
    _Form(("cluster",), "ours_{}"),
    _Form(("replicas",), "each_{}"),
    _Form(("huggingface_load",), "load_file"),
    _Form(("huggingface_save",), "checkpoint"),
    _Form(("",), "ours_dcp"),
)

_ROUNDS = (
    "All contenders of a table run in each of {} rounds, in a different order each time. Times are "
    "medians over the rounds. A ratio is the time of a contender divided by the time of the "
    "contender in the row 1.00, in the same round; the table shows the median, the smallest and "
    "the largest ratio. CPU seconds are user and system time of the saving or loading processes."
)
_EXPLANATIONS = {
    "background": (
        "Training stops during the call, whose times the ratios compare. Once the save is staged, "
        "the state may change again. The step columns compare the training steps between the "
        "return of the call and the end of the save with the steps just before the save. Training "
        "is Python-driven autograd on one thread and does not change the saved state."
    ),
    "queue": (
        "These saves follow Megatron's flow: plan, schedule, a poll after every step, finalize. "
        "A call lasts from the start of the plan until the queue has accepted the request, for the "
        "first save of a fresh process and for later saves. Training is stalled during the call, "
        "the polls and the finalization; the ratios compare these times. A poll is measured while "
        "the save is still running. Extra memory is the increase in the memory of all processes "
        "from before the first save to a later save; it counts shared memory once and excludes "
        "mapped files. A snapshot is correct if changing the state right after the call does not "
        "affect it. nvidia-resiliency-ext and megatron-core save through a worker process, and do "
        "not copy CPU tensors: the worker reads the tensors while training changes them. In the "
        "rows labeled 'of copies', the caller clones the tensors first. Without a GPU, stubs "
        "replace torch.cuda's synchronize, set_device, current_device and device_count for these "
        "packages. All other code is their own, as installed from PyPI."
    ),
    "reads": (
        "Bytes read is the number of bytes that read system calls returned, from the page cache or "
        "from disk, per byte of loaded tensors. With several ranks, bytes and CPU seconds are sums "
        "over the ranks, and times are the slowest rank's."
    ),
}


def _form_of(group: Group) -> _Form:
    return next(form for form in _FORMS if group.name.startswith(form.groups))


def _kind_of(group: Group) -> str:
    sample = group.samples[0]
    if "saves" in sample:
        return "queue" if "kept" in sample else "background"
    return "reads" if "bytes" in sample else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int = 1) -> str:
    """Formats a markdown table. Columns from `numeric_from` on are aligned to the right."""
    rule = ["---" if column < numeric_from else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def group_table(group: Group) -> str:
    """Formats the contenders of a group."""
    form, reads = _form_of(group), _kind_of(group) == "reads"
    known = {info.name for info in group.contenders}
    rows = []
    for info in group.contenders:
        row = [f"**{info.label}**" if info.kind == "ours" else info.label]
        for column in form.columns:
            values = group.values(info.name, column.quantity)
            row.append(format(column.middle(values) * column.scale, column.form) if values else "")
        reference = form.reference.format(info.name.rpartition("_")[2])
        if form.reference:
            ratios = group.ratios(info.name, reference, form.divided) if reference in known else []
            if info.name == reference:
                row.append("1.00")
            elif ratios:
                middle = statistics.median(ratios)
                row.append(f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            else:
                row.append("")
        if reads:
            pairs = zip(
                group.values(info.name, "read_bytes"), group.values(info.name, "bytes"), strict=True
            )
            row.append(f"{statistics.median(read / wanted for read, wanted in pairs):.3f}")
        rows.append(row)
    header = [group.title, *(column.title for column in form.columns)]
    header += ["ratio"] if form.reference else []
    return table(header + (["bytes read per byte wanted"] if reads else []), rows)


def describe(results: Results, groups: Sequence[Group]) -> str:
    """Formats groups of one run, with the machine and the method."""
    paragraphs = [
        f"Measured on {results.machine.sentence()}.",
        _ROUNDS.format(results.parameters["rounds"]),
        *(text for kind, text in _EXPLANATIONS.items() if kind in map(_kind_of, groups)),
        *map(group_table, groups),
    ]
    if not results.quotable:
        paragraphs.insert(0, "**Do not quote this trial run:** it is too small or too short.")
    lines = [f"- {entry['what']}: {entry['reason']}" for entry in results.skipped]
    return "\n\n".join([*paragraphs, *(["Not measured:", "\n".join(lines)] if lines else [])])


# --- the README's table --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Number:
    """A row of the README's table: seconds of torch_ckpt and of two settings of stock torch.

    Attributes:
        group: name of the group of contenders.
        work: title of the row; ``{}`` stands for the size of the group's state.
        quantity: quantity of a sample to compare, in seconds.
        ours: contender of torch_ckpt to compare with stock.
        default: contender that is stock's default.
        also: another contender of torch_ckpt whose seconds the row shows.
    """

    group: str
    work: str
    quantity: str
    ours: str
    default: str
    also: str | None = None


_NUMBERS = (
    _Number("save", "Save {}, fsynced", "wall_s", "ours_dcp", "stock_1"),
    _Number("load_cold", "Load {} from disk", "wall_s", "ours_dcp", "stock"),
    _Number(
        "async",
        "Pause of training for a background save of {}",
        "stall_s",
        "ours_blocking",
        "stock_thread",
        also="ours_overlapped",
    ),
    _Number("small_save", "Save 20,000 tensors of 1 KiB, fsynced", "wall_s", "ours_dcp", "stock_1"),
)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _number_row(number: _Number, group: Group) -> list[str]:
    def median(contender: str) -> float:
        return group.median(contender, number.quantity)

    def against(contender: str) -> str:
        ratios = group.ratios(contender, number.ours, number.quantity)
        ratio = f"{statistics.median(ratios):.1f} x ({min(ratios):.1f} to {max(ratios):.1f})"
        ratio = f"**{ratio}**" if min(ratios) > 1 else f"no clear difference: {ratio}"
        return f"{_seconds(median(contender))}, {ratio}<br>{group.label(contender)}"

    stock = [info.name for info in group.contenders if info.name.startswith("stock")]
    best = min(stock, key=median)
    ours = f"**{_seconds(median(number.ours))}**<br>{group.label(number.ours)}"
    if number.also is not None:
        setting = group.label(number.also).split(", ")[-1]
        ours += f"<br>{setting}: {_seconds(median(number.also))} in the call, and the next "
        ours += "`optimizer.step()` waits for the copy"
    against_best = "the default" if best == number.default else against(best)
    work = number.work.format(readable_size(group.bytes))
    return [work, ours, against(number.default), against_best]


def numbers(found: dict[str, tuple[Results, Group]]) -> str:
    """Formats four times of torch_ckpt, each with stock's default and stock's best setting."""
    rows = [_number_row(number, found[number.group][1]) for number in _NUMBERS]
    header = ["median time", "torch_ckpt", "stock torch, default", "stock torch, best setting"]
    runs = {results.machine.date: results for results, _ in (found[n.group] for n in _NUMBERS)}
    first, *others = runs.values()
    dates = "".join(f" and {results.machine.date}" for results in others)
    caption = (
        f"Times are medians of {first.parameters['rounds']} rounds. In each round, stock's time is "
        "divided by torch_ckpt's; the table gives the median of these ratios (lowest to highest), "
        "which may differ from the ratio of the median times. "
        f"Measured on {first.machine.sentence()}{dates}."
    )
    return "\n\n".join([table(header, rows, numeric_from=4), caption])


# --- documents -----------------------------------------------------------------------------------

#: The groups in the block of each document, by the document and the block's name.
BLOCKS = {
    ("docs/benchmarks.md", "headline"): ("save", "small_save", "small_load", "memory_save"),
    ("docs/async.md", "async"): ("async", "async_small"),
    ("docs/loading.md", "loading"): (
        *("load_warm", "load_cold", "partial_warm", "partial_cold", "reshard_warm"),
        *("reshard_cold", "replicas_warm", "replicas_cold", "memory_load"),
    ),
    ("docs/design.md", "many"): ("many", "many_background"),
    ("docs/megatron.md", "megatron"): ("megatron", "megatron_small", "megatron_ranks"),
    ("docs/huggingface.md", "huggingface"): (
        *("huggingface_save", "memory_huggingface", "huggingface_load"),
    ),
}


def blocks(directory: Path = RESULTS) -> dict[tuple[str, str], str]:
    """Makes the content of each block from the results in a directory.

    Raises:
        KeyError: no results have a group.
    """
    found = {
        group.name: (results, group)
        for results in read_all(sorted(directory.glob("*.json")))
        if results.quotable
        for group in results.groups
    }
    made = {("README.md", "numbers"): numbers(found)}
    for block, names in BLOCKS.items():
        parts: list[str] = []
        by_run: dict[str, list[str]] = {}
        for name in names:
            by_run.setdefault(found[name][0].machine.date, []).append(name)
        for of_run in by_run.values():
            parts.append(describe(found[of_run[0]][0], [found[name][1] for name in of_run]))
        made[block] = "\n\n".join(parts)
    records = sorted(directory.glob("*-record-*.json"))
    made["docs/async.md", "gpu"] = gpu_record.block([json.loads(f.read_text()) for f in records])
    return made


def filled(text: str, block: str, content: str) -> str:
    """Replaces a block of a document."""
    begin, end = (f"<!-- benchmark-{block}:{which} -->" for which in ("begin", "end"))
    return replace_block(text, begin, end, content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fills the blocks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a directory")
    for (document, block), content in blocks(parser.parse_args(arguments).results).items():
        path = _REPOSITORY / document
        path.write_text(filled(path.read_text(), block, content))


if __name__ == "__main__":
    main()
