"""The timeline's picture: one or two runs above each other on one axis of time. `timeline` calls `draw`.

A track for each that works at the same time: the GPU (or the trainer's cores), the copies out, the CPU, the copies in.
The kind of work is a colour, the layer a shade of it: forward needs the darkest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.timeline import Span, Timeline

WIDTH_IN: Final = 9.0
DPI: Final = 200
BAR: Final = 0.8
#: From top to bottom: a track's name, and its kinds of work.
TRACKS: Final = (
    ("compute", ("forward", "backward", "update", "stall")),
    ("D2H", ("D2H",)),
    ("CPU update", ("CPU update",)),
    ("H2D", ("H2D",)),
)
COLOURS: Final = {
    "forward": "#2f6690",
    "backward": "#588b8b",
    "update": "#7b4b94",
    "stall": "#d7263d",
    "D2H": "#8a6f3c",
    "CPU update": "#c8553d",
    "H2D": "#4a7c3a",
}
WORDS: Final = {"update": "GPU update", "D2H": "D2H (gradients)", "H2D": "H2D (weights)"}
#: How far the last layer's shade is on the way to white.
PALEST: Final = 0.62
EDGE: Final = "#2b2d42"


def draw(timelines: dict[str, Timeline], steps: range, path: Path) -> None:
    """Write the picture of these steps. Raises `ValueError` if a timeline has none of them."""
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    height_in = 0.9 + 1.75 * len(timelines)
    figure, panels = pyplot.subplots(len(timelines), 1, figsize=(WIDTH_IN, height_in), sharex=True, squeeze=False)
    longest_ms = 0.0
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        longest_ms = max(longest_ms, _panel(axes, title, timeline, steps))
    panels[0, 0].set_xlim(0.0, longest_ms)
    panels[-1, 0].set_xlabel("ms (dark shades: layers that forward needs first)")
    shown = {span.kind for timeline in timelines.values() for span in timeline.spans}
    patches = [Patch(color=colour, label=WORDS.get(kind, kind)) for kind, colour in COLOURS.items() if kind in shown]
    figure.tight_layout(rect=(0, 0.28 / height_in, 1, 1), h_pad=1.2)
    figure.legend(
        handles=patches,
        loc="lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _panel(axes: Any, title: str, timeline: Timeline, steps: range) -> float:
    """One run's tracks; how many ms its steps take."""
    began_ms, ended_ms = timeline.within(steps)
    positions = timeline.positions()
    for row, (_, kinds) in enumerate(TRACKS):
        for kind in kinds:
            _bars(axes, row, timeline.of_kind(kind), positions, (began_ms, ended_ms))
    for step in steps:
        if step in timeline.steps:
            at_ms = timeline.steps[step][0] - began_ms
            axes.axvline(at_ms, color=EDGE, linewidth=0.8, linestyle=":")
            axes.text(at_ms, -0.52, f" step {step}", fontsize=8, color=EDGE, va="bottom")
    axes.axvline(ended_ms - began_ms, color=EDGE, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(TRACKS)), [name for name, _ in TRACKS])
    axes.set_ylim(len(TRACKS) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    count = sum(step in timeline.steps for step in steps)
    axes.set_title(f"{title}: {(ended_ms - began_ms) / count:.1f} ms a step", loc="left", fontsize=11, pad=14)
    return ended_ms - began_ms


def _bars(axes: Any, row: int, spans: Sequence[Span], positions: dict[int, int], window: tuple[float, float]) -> None:
    """Spans of one kind, as far as they are in the window."""
    bars, colours = [], []
    for span in spans:
        began_ms, ended_ms = max(span.began_ms, window[0]), min(span.ended_ms, window[1])
        if began_ms < ended_ms:
            bars.append((began_ms - window[0], ended_ms - began_ms))
            colours.append(_shade(span.kind, positions[span.lid] / max(len(positions) - 1, 1)))
    axes.broken_barh(bars, (row - BAR / 2, BAR), facecolors=colours, linewidth=0)


def _shade(kind: str, depth: float) -> tuple[float, ...]:
    """The colour of a kind, paler the later the layer is in forward; a stall is a stall."""
    white = 0.0 if kind == "stall" else PALEST * depth
    return tuple(part + (1.0 - part) * white for part in to_rgb(COLOURS[kind]))
