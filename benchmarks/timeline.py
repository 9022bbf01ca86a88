"""One or two timelines in one picture: reads the `trace.json` that a traced run leaves.

    python -m benchmarks.timeline OUT.png --steps A:B TITLE=trace.json [TITLE=trace.json]
    python -m benchmarks.timeline OUT.png TITLE=trace.json --steps A:B --rank 0 1

A timeline has a track for each part of the machine that works at the same time: the GPU (or the trainer's cores), the
copies out, the CPU, the copies in. Of a job on several ranks each rank has a timeline of its own; the forwards and
backwards of a pipeline are those of micro-batches, from `pipelines`. The kind of work is a colour, and the layer or
micro-batch a shade of it: what forward needs first is the darkest. Device times are tied to the host's clock to some
0.1 ms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from workers.watch.timeline import Interval, Span  # noqa: E402
from workers.watch.timeline import Timeline as Steps  # noqa: E402

WIDTH_IN: Final = 9.0
BAR: Final = 0.8
#: From top to bottom: a track's name, and its kinds of work.
TRACKS: Final = (
    ("compute", ("forward", "backward", "update", "stall")),
    ("D2H", ("D2H",)),
    ("CPU update", ("CPU update",)),
    ("H2D", ("H2D",)),
)
#: A kind of work: its colour, and its name in the legend.
KINDS: Final = {
    "forward": ("#2f6690", "forward"),
    "backward": ("#588b8b", "backward"),
    "update": ("#7b4b94", "GPU update"),
    "stall": ("#d7263d", "stall"),
    "D2H": ("#8a6f3c", "D2H (gradients)"),
    "CPU update": ("#c8553d", "CPU update"),
    "H2D": ("#4a7c3a", "H2D (weights)"),
}
#: How far the last layer's shade is on the way to white.
PALEST: Final = 0.62
EDGE: Final = "#2b2d42"


class Chunk(Span):
    """Of a micro-batch, whose number is `lid`."""


class Timeline(Steps):
    """The events of one rank, and a pipeline's micro-batches, in the place of its forwards and backwards."""

    def __init__(self, events: Iterable[dict[str, Any]], rank: int = 0, chunks: Iterable[Sequence[Any]] = ()) -> None:
        """`chunks`: what a pipeline's stage noted."""
        super().__init__(events, rank)
        chunked = [
            Chunk(kind, index, step, *(at_s * 1e3 - self.zero_us / 1e3 for at_s in interval_s))
            for kind, index, step, *interval_s in chunks
        ]
        of_layers = [span for span in self.spans if span.kind not in ("forward", "backward")]
        self.spans = [*of_layers, *chunked] if chunked else self.spans

    @classmethod
    def read(cls, path: Path, rank: int = 0) -> Self:
        noted = path.with_name(f"micro-batches-{rank}.jsonl")
        lines = noted.read_text().splitlines() if noted.exists() else []
        return cls(json.loads(path.read_text())["traceEvents"], rank, map(json.loads, lines))

    def depths(self, *, of_chunks: bool) -> dict[int, float]:
        """Each layer's or micro-batch's place in the forward order, from 0 to 1; what has no forward is behind it."""
        spans = [span for span in self.spans if isinstance(span, Chunk) == of_chunks]
        forwards = [span for span in spans if span.kind == "forward"]
        order = [span.lid for span in sorted(forwards, key=lambda span: span.began_ms) if span.lid is not None]
        found = list(dict.fromkeys([*order, *sorted(span.lid for span in spans if span.lid is not None)]))
        return {lid: position / max(len(found) - 1, 1) for position, lid in enumerate(found)}


# ---------------------------------------------------------------- the picture


def draw(timelines: dict[str, Timeline], steps: range, path: Path) -> None:
    """Write the picture of these steps; ranks of one run share an axis. Raises `ValueError` without any of them."""
    height_in = 0.9 + 1.75 * len(timelines)
    figure, panels = pyplot.subplots(len(timelines), 1, figsize=(WIDTH_IN, height_in), sharex=True, squeeze=False)
    windows: dict[float, list[Interval]] = {}
    for timeline in timelines.values():
        windows.setdefault(timeline.zero_us, []).append(timeline.within(steps))
    spans = {run: (min(began for began, _ in each), max(ended for _, ended in each)) for run, each in windows.items()}
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _panel(axes, title, timeline, steps, spans[timeline.zero_us])
    panels[0, 0].set_xlim(0.0, max(ended - began for began, ended in spans.values()))
    dark = (
        "the first micro-batches, and "
        if any(isinstance(s, Chunk) for t in timelines.values() for s in t.spans)
        else ""
    )
    panels[-1, 0].set_xlabel(f"ms (dark shades: {dark}layers that forward needs first)")
    shown = {span.kind for timeline in timelines.values() for span in timeline.spans}
    patches = [Patch(color=colour, label=name) for kind, (colour, name) in KINDS.items() if kind in shown]
    figure.tight_layout(rect=(0, 0.28 / height_in, 1, 1), h_pad=1.2)
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=9, handlelength=1.0)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def _panel(axes: Any, title: str, timeline: Timeline, steps: range, window: Interval) -> None:
    """One rank's tracks in this window."""
    began_ms, ended_ms = timeline.within(steps)
    depths = {of_chunks: timeline.depths(of_chunks=of_chunks) for of_chunks in (False, True)}
    for row, (_, kinds) in enumerate(TRACKS):
        for kind in kinds:
            _bars(axes, row, timeline.of_kind(kind), depths, window)
    found = [step for step in steps if step in timeline.steps]
    for step in found:
        at_ms = timeline.steps[step][0] - window[0]
        axes.axvline(at_ms, color=EDGE, linewidth=0.8, linestyle=":")
        axes.text(at_ms, -0.52, f" step {step}", fontsize=8, color=EDGE, va="bottom")
    axes.set_yticks(range(len(TRACKS)), [name for name, _ in TRACKS])
    axes.set_ylim(len(TRACKS) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{title}: {(ended_ms - began_ms) / len(found):.1f} ms per step", loc="left", fontsize=11, pad=14)


def _bars(axes: Any, row: int, spans: list[Span], depths: dict[bool, dict[int, float]], window: Interval) -> None:
    """Spans of one kind, as far as they are in the window."""
    bars, colours = [], []
    for span in spans:
        began_ms, ended_ms = max(span.began_ms, window[0]), min(span.ended_ms, window[1])
        if began_ms < ended_ms:
            bars.append((began_ms - window[0], ended_ms - began_ms))
            colours.append(_shade(span.kind, depths[isinstance(span, Chunk)].get(span.lid or 0, 1.0)))
    axes.broken_barh(bars, (row - BAR / 2, BAR), facecolors=colours, linewidth=0)


def _shade(kind: str, depth: float) -> tuple[float, ...]:
    """The colour of a kind, paler the later the layer or micro-batch is in forward; a stall is a stall."""
    white = 0.0 if kind == "stall" else PALEST * depth
    return tuple(part + (1.0 - part) * white for part in to_rgb(KINDS[kind][0]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, metavar="OUT.png")
    parser.add_argument("timelines", nargs="+", metavar="TITLE=trace.json")
    parser.add_argument("--steps", metavar="A:B", required=True, help="from step A up to B")
    parser.add_argument("--rank", type=int, nargs="+", default=[0], help="the ranks, of a run with several")
    arguments = parser.parse_args(argv)
    try:
        first, last = map(int, arguments.steps.split(":"))
        shown = [(text.rpartition("="), rank) for text in arguments.timelines for rank in arguments.rank]
        named = {
            f"{title}, rank {rank}" if len(arguments.rank) > 1 else title: Timeline.read(Path(path), rank)
            for (title, _, path), rank in shown
        }
        draw(named, range(first, last), arguments.picture)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
