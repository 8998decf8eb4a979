"""Draws the bar charts, the timeline and the overview of a result as PNG.

Only this module needs matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import timeline
from .results import ContenderInfo, Group, Results, readable_size, spread

TIMELINE = "timeline"
OVERVIEW = "overview"
# The panels of the overview: a group, its heading, and contenders; a name that ends in "_" stands
# for the fastest contender whose name begins with it.
_PANELS = (
    ("save", "save, fsync", ("stock_1", "stock_", "mapped", "safetensors", "ours_call", "raw_")),
    (
        "load_warm",
        "load, warm page cache",
        ("stock", "stock_threads", "mapped", "safetensors", "ours_call", "memcpy_"),
    ),
    (
        "load_cold",
        "load, cold page cache",
        ("stock", "stock_threads", "mapped", "safetensors", "ours_call", "raw_"),
    ),
    (
        "async",
        "training stands still for a background save",
        (
            "stock_thread",
            "stock_process",
            "torch_checkpointing",
            "ours_blocking",
            "ours_overlapped",
        ),
    ),
)
_COLOURS = {"ours": "#d9480f", "stock": "#4c6a85", "peer": "#6f9c76", "limit": "#c3ccd4"}
_KIND_LABELS = {
    "ours": "torch_ckpt",
    "stock": "stock torch",
    "peer": "others",
    "limit": "the machine's limit",
}


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise SystemExit(
            "Charts need matplotlib. Run `pip install matplotlib`, or pass --no-charts."
        ) from error
    matplotlib.use("Agg")  # needs no display
    return importlib.import_module("matplotlib.pyplot")


def _draw_bars(axes: Any, group: Group, contenders: Sequence[ContenderInfo]) -> None:
    # For a background save, show the time during which training stops.
    quantity = "stall_s" if group.background or group.queued else "wall_s"
    spreads = {info.name: spread(group.values(info.name, quantity)) for info in contenders}
    # The axis ends at the top, so the fastest contender comes last.
    order = sorted(contenders, key=lambda info: spreads[info.name].median, reverse=True)
    walls = [spreads[info.name] for info in order]
    medians = [wall.median for wall in walls]
    below = [wall.median - wall.minimum for wall in walls]
    above = [wall.maximum - wall.median for wall in walls]

    bars = axes.barh(
        [info.label for info in order],
        medians,
        color=[_COLOURS[info.kind] for info in order],
        xerr=[below, above],
        error_kw={"ecolor": "#333333", "elinewidth": 1, "capsize": 3},
    )
    farthest = max(wall.maximum for wall in walls)
    for bar, wall in zip(bars, walls, strict=True):
        axes.text(
            wall.maximum + 0.015 * farthest,
            bar.get_y() + bar.get_height() / 2,
            f"{wall.median:.3g} s",
            va="center",
            fontsize=9,
        )
    axes.set_xlim(0, farthest * 1.12)
    axes.tick_params(axis="both", labelsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.xaxis.grid(visible=True, color="#e6e9ec")
    axes.set_axisbelow(True)


def _draw(pyplot: Any, group: Group, caption: str, path: Path) -> None:
    height = 1.4 + 0.36 * len(group.contenders)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    _draw_bars(axes, group, group.contenders)
    what = "seconds"
    if group.background:
        what = "seconds in the call"
    elif group.queued:
        what = "seconds for which training stands still"
    axes.set_xlabel(
        f"{what}: median, whiskers from minimum to maximum (less is better)", fontsize=9
    )
    figure.suptitle(group.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _finish(pyplot, figure, group.contenders, caption, path)


def _draw_overview(pyplot: Any, results: Results, path: Path) -> None:
    groups = {group.name: group for group in results.groups}
    chosen = {
        name: _fastest_of(groups[name], wanted) for name, _, wanted in _PANELS if name in groups
    }
    heights = [1.2 + len(contenders) for contenders in chosen.values()]
    figure, panels = pyplot.subplots(
        len(chosen),
        figsize=(9, 0.9 + 0.33 * sum(heights)),
        layout="constrained",
        height_ratios=heights,
        squeeze=False,
    )
    headings = {name: heading for name, heading, _ in _PANELS}
    for axes, (name, contenders) in zip(panels[:, 0], chosen.items(), strict=True):
        _draw_bars(axes, groups[name], contenders)
        size = readable_size(groups[name].bytes)
        axes.set_title(f"{size}: {headings[name]}", loc="left", fontsize=10, fontweight="bold")
    panels[-1, 0].set_xlabel(
        "seconds: median, whiskers from minimum to maximum (less is better)", fontsize=9
    )
    shown = [info for contenders in chosen.values() for info in contenders]
    _finish(pyplot, figure, shown, results.machine.sentence(), path)


def _fastest_of(group: Group, wanted: Sequence[str]) -> list[ContenderInfo]:
    names = {group.fastest(name) if name.endswith("_") else name for name in wanted}
    return [info for info in group.contenders if info.name in names]


def _finish(
    pyplot: Any,
    figure: Any,
    contenders: Sequence[ContenderInfo],
    caption: str,
    path: Path,
) -> None:
    """Adds the legend and the caption, and writes the file."""
    kinds = [kind for kind in _COLOURS if any(info.kind == kind for info in contenders)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds]
    # Inside the axes the legend would hide the longest whiskers.
    figure.legend(
        handles,
        [_KIND_LABELS[kind] for kind in kinds],
        loc="outside upper right",
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )
    figure.supxlabel(caption, fontsize=7, color="#666666")
    # Omit matplotlib's version, so that equal data gives equal bytes.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def paths(results: Results, directory: Path) -> dict[str, Path]:
    """Returns the path of each chart.

    The keys are the names of the groups, TIMELINE and OVERVIEW.
    """
    found = {
        group.name: directory / f"benchmark-{group.name.replace('_', '-')}.png"
        for group in results.groups
    }
    if "async" in found:
        found[TIMELINE] = directory / "async-timeline.png"
    if any(name in found for name, _, _ in _PANELS):
        found[OVERVIEW] = directory / "benchmark-overview.png"
    return found


def write(results: Results, directory: Path) -> dict[str, Path]:
    """Draws a chart for each group, the timeline of background saves, and the overview.

    Returns their paths.
    """
    pyplot = _pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    written = paths(results, directory)
    for group in results.groups:
        _draw(pyplot, group, results.machine.sentence(), written[group.name])
        if group.name == "async":
            timeline.draw(pyplot, group, results.machine.sentence(), written[TIMELINE])
    if OVERVIEW in written:
        _draw_overview(pyplot, results, written[OVERVIEW])
    return written
