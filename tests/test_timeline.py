"""What `benchmarks.timeline` reads out of a trace and draws, over a made-up run, and over recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from protocol.address import Address

timeline = pytest.importorskip("benchmarks.timeline", exc_type=ImportError)
STEPS = 4
#: Milliseconds that a made-up step takes.
STEP_MS = 100.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two layers whose gradients leave and whose weights return in each step."""
    writer = TraceWriter(tmp_path / "run", Address("trainer", 0))

    def span(track: str, kind: str, lid: int, step: int, began_ms: float, ended_ms: float) -> None:
        began_s, ended_s = ((STEP_MS * step + ms) / 1e3 for ms in (began_ms, ended_ms))
        writer.span(track, str(lid), began_s, ended_s, kind=kind, lid=lid, step=step)

    for step in range(STEPS):
        writer.span("step", f"step {step}", STEP_MS * step / 1e3, STEP_MS * (step + 1) / 1e3, step=step)
        span("compute", "stall", 0, step, 0, 5)
        span("compute", "forward", 0, step, 5, 20)
        span("compute", "forward", 1, step, 20, 30)
        span("compute", "backward", 1, step, 30, 60)
        for lid, began_ms in ((1, 60), (0, 70)):
            span("D2H", "D2H", lid, step, began_ms, began_ms + 4)
            span("CPU update", "CPU update", lid, step, began_ms + 5, began_ms + 15)
            span("H2D", "H2D", lid, step, began_ms + 16, began_ms + 20)
    writer.close()
    return trace.merge(tmp_path / "run")


def test_positions_are_the_forward_order(path: Path) -> None:
    made = timeline.Timeline.read(path)
    assert made.depths(of_chunks=False) == {0: 0.0, 1: 1.0}
    made.spans = [span for span in made.spans if (span.kind, span.lid) != ("forward", 0)]
    assert made.depths(of_chunks=False) == {1: 0.0, 0: 1.0}, "a layer without a forward of its own comes last"


def test_a_stage_has_its_micro_batches_and_its_own_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of the same job begins 7 ms later, and its trace has one forward where its stage noted two."""
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        writer = TraceWriter(path.parent, Address("trainer", 1))
    writer.span("step", "step 0", 0.007, 0.1, step=0)
    writer.span("compute", "0", 0.01, 0.02, kind="forward", lid=0, step=0)
    writer.span("H2D", "0", 0.03, 0.04, kind="H2D", lid=5, step=0)
    writer.close()
    merged = trace.merge(path.parent)
    noted = [["forward", index, 0, began_s, began_s + 0.01] for index, began_s in enumerate((0.01, 0.03))]
    merged.with_name("micro-batches-1.jsonl").write_text("\n".join(map(json.dumps, noted)))
    made, other = timeline.Timeline.read(merged, 1), timeline.Timeline.read(merged)
    assert made.zero_us == other.zero_us and made.within(range(1)) == pytest.approx((7.0, 100.0))
    found = [(span.kind, span.lid, isinstance(span, timeline.Chunk)) for span in made.spans]
    assert found == [("H2D", 5, False), ("forward", 0, True), ("forward", 1, True)]
    assert made.spans[2].began_ms == pytest.approx(30.0)
    assert made.depths(of_chunks=True) == {0: 0.0, 1: 1.0} and made.depths(of_chunks=False) == {5: 0.0}
    assert not any(isinstance(span, timeline.Chunk) or span.lid == 5 for span in other.spans)


def test_a_picture_of_two_runs(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    timeline.main([str(out), f"before={path}", f"after={path}", "--steps", "1:3"])
    header = out.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and int.from_bytes(header[16:20], "big") == 1800


def test_a_picture_shows_what_is_in_its_window_and_later_layers_paler(path: Path) -> None:
    figure, axes = timeline.pyplot.subplots()
    timeline._panel(axes, "run", timeline.Timeline.read(path), range(1, 3), (STEP_MS, 3 * STEP_MS))
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert min(box.x0 for box in boxes) == 0.0 and max(box.x1 for box in boxes) <= 2 * STEP_MS
    rows = [round((box.y0 + box.y1) / 2) for box in boxes]
    assert [rows.count(row) for row in range(4)] == [8, 4, 4, 4]
    timeline.pyplot.close(figure)
    shades = [sum(timeline._shade("forward", depth)) for depth in (0.0, 0.5, 1.0)]
    assert shades == sorted(set(shades)) and shades[-1] < 3.0
    assert timeline._shade("stall", 0.0) == timeline._shade("stall", 1.0)
