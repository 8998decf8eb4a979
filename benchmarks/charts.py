"""Draws the bar charts and the timeline of a result as PNG. Only this module needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from . import timeline
from .results import Group, Results, spread

TIMELINE = "timeline"
_COLOURS = {"ours": "#d9480f", "stock": "#4c6a85", "peer": "#4c6a85", "limit": "#c3ccd4"}
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


def _draw(pyplot: Any, group: Group, caption: str, path: Path) -> None:
    # For a background save, show the time during which training stops.
    quantity = "stall_s" if group.background or group.queued else "wall_s"
    spreads = {info.name: spread(group.values(info.name, quantity)) for info in group.contenders}
    # The axis ends at the top, so the fastest contender comes last.
    order = sorted(group.contenders, key=lambda info: spreads[info.name].median, reverse=True)
    walls = [spreads[info.name] for info in order]
    medians = [wall.median for wall in walls]
    below = [wall.median - wall.minimum for wall in walls]
    above = [wall.maximum - wall.median for wall in walls]

    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.36 * len(order)), layout="constrained")
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
    what = "seconds"
    if group.background:
        what = "seconds in the call"
    elif group.queued:
        what = "seconds for which training stands still"
    axes.set_xlabel(
        f"{what}: median, whiskers from minimum to maximum (less is better)", fontsize=9
    )
    figure.suptitle(group.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes.tick_params(axis="both", labelsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.xaxis.grid(visible=True, color="#e6e9ec")
    axes.set_axisbelow(True)
    kinds = [kind for kind in _COLOURS if any(info.kind == kind for info in order)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds]
    # Inside the axes the legend would hide the longest whiskers.
    axes.legend(
        handles,
        [_KIND_LABELS[kind] for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1, 1),
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
    """Returns the paths of the charts by group name; the key of the timeline is TIMELINE."""
    found = {
        group.name: directory / f"benchmark-{group.name.replace('_', '-')}.png"
        for group in results.groups
    }
    return found | ({TIMELINE: directory / "async-timeline.png"} if "async" in found else {})


def write(results: Results, directory: Path) -> dict[str, Path]:
    """Draws a chart for each group, and the timeline of background saves. Returns their paths."""
    pyplot = _pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    written = paths(results, directory)
    for group in results.groups:
        _draw(pyplot, group, results.machine.sentence(), written[group.name])
        if group.name == "async":
            timeline.draw(pyplot, group, results.machine.sentence(), written[TIMELINE])
    return written
