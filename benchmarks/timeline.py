"""Draws background saves and training on one time axis."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .background import Trace
from .results import Group

_DRAWN = ("stock_thread", "stock_thread_kept", "ours_blocking", "ours_overlapped")
# Two alternating tones: at this scale gaps between steps are invisible.
_STEPS = ("#4c6a85", "#8fa6ba")
_STALL = "#c92a2a"
_PHASES = {
    "staging": "#f0a35e",
    "writing": "#e9c46a",
    "fsync and commit": "#6a994e",
}
_TRAINING_LANE, _SAVE_LANE = 1.0, 0.0
_LANE_HEIGHT = 0.72
# Part of the time axis before the call, for the idle steps.
_LEAD = 0.08


def _typical(group: Group, contender: str) -> Trace:
    """Returns the first save of the round with the median time until durable."""
    samples = group.background_samples(contender)
    median = statistics.median_low(sample.durable_s for sample in samples)
    return next(sample for sample in samples if sample.durable_s == median).saves[0]


def _phases(trace: Trace) -> dict[str, tuple[float, float]]:
    """Returns (start, end) of the phases of the save, in seconds since the call."""
    last_write = trace.durable_s if trace.last_write_s is None else trace.last_write_s
    # File times are coarser than the clock of the call.
    last_write = min(max(last_write, trace.staged_s), trace.durable_s)
    return {
        "staging": (0.0, trace.staged_s),
        "writing": (trace.staged_s, last_write),
        "fsync and commit": (last_write, trace.durable_s),
    }


def _draw_panel(axes: Any, trace: Trace, label: str) -> None:
    def block(lane: float, start: float, end: float, colour: str) -> None:
        axes.barh(lane, end - start, left=start, height=_LANE_HEIGHT, color=colour, linewidth=0)

    for steps in (trace.idle_steps, trace.steps):
        for index, (start, end) in enumerate(steps):
            block(_TRAINING_LANE, start, end, _STEPS[index % 2])
    block(_TRAINING_LANE, 0.0, trace.stall_s, _STALL)
    for name, (start, end) in _phases(trace).items():
        block(_SAVE_LANE, start, end, _PHASES[name])
    axes.axvline(trace.durable_s, color="#333333", linewidth=1, linestyle=":")
    axes.annotate(
        f"durable {trace.durable_s:.2f} s",
        (trace.durable_s, _TRAINING_LANE),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
    stall_ms = trace.stall_s * 1e3
    shown = f"{stall_ms:,.0f}" if stall_ms >= 10 else f"{stall_ms:.1f}"
    axes.set_title(f"{label}: {shown} ms in the call", loc="left", fontsize=9, pad=4)
    axes.set_yticks([_TRAINING_LANE, _SAVE_LANE], ["training", "save"], fontsize=9)
    axes.tick_params(axis="both", labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(pyplot: Any, group: Group, caption: str, path: Path) -> None:
    """Writes the timeline of the group's typical saves as PNG, with one panel per contender."""
    traces = {name: _typical(group, name) for name in _DRAWN if group.has(name)}
    figure, panels = pyplot.subplots(
        len(traces),
        1,
        figsize=(9, 1.3 + 1.15 * len(traces)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    longest = max(trace.durable_s for trace in traces.values())
    for (axes,), (name, trace) in zip(panels, traces.items(), strict=True):
        _draw_panel(axes, trace, group.label(name))
        # Leave room for the annotation of the longest save.
        axes.set_xlim(-_LEAD * longest, 1.13 * longest)
    lowest = panels[-1][0]
    lowest.set_xlabel("seconds since the call", fontsize=9)
    figure.suptitle(group.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    colours = {"training step": _STEPS[0], "training stands still": _STALL, **_PHASES}
    # A legend of the figure would overlap the caption.
    lowest.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()],
        list(colours),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.4),
        ncols=len(colours),
        frameon=False,
        fontsize=8,
    )
    figure.supxlabel(caption, fontsize=7, color="#666666")
    # Omit matplotlib's version, so that equal data gives equal bytes.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
