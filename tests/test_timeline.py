"""What `benchmarks.timeline` reads out of a trace: latencies, shares, and its command line, over made-up runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parts, suite, timeline
from benchmarks.timeline import Latency, Timeline, numbers
from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from protocol.address import Address

STEPS = 4
#: Milliseconds that a made-up step takes.
STEP_MS = 100.0


class MadeUp:
    """A run's events, times in milliseconds. Layer l is called "l"."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.writer = TraceWriter(run_dir, Address("trainer", 0))

    def span(self, track: str, kind: str, lid: int, step: int, began_ms: float, ended_ms: float) -> None:
        self.writer.span(track, str(lid), began_ms / 1e3, ended_ms / 1e3, kind=kind, lid=lid, step=step)

    def trip(self, lid: int, step: int, left: float, taken: float, update: float, done: float, back: float) -> None:
        """A gradient's: copied until `left`, taken in, updated from `update` until `done`, copied back from `back`."""
        self.span("D2H", "D2H", lid, step, left - 2, left)
        self.span("waiting", "waiting", lid, step, taken, update)
        self.span("CPU update", "CPU update", lid, step, update, done)
        self.writer.instant("messages", f"WeightsReady {lid}", done / 1e3, lid=lid, step=step)
        self.span("H2D", "H2D", lid, step, back, back + 4)

    def step(self, step: int) -> None:
        began_ms = STEP_MS * step
        self.writer.span("step", f"step {step}", began_ms / 1e3, (began_ms + STEP_MS) / 1e3, step=step)
        self.span("compute", "stall", 0, step, began_ms, began_ms + 5)
        self.span("compute", "forward", 0, step, began_ms + 5, began_ms + 20)
        self.span("compute", "forward", 1, step, began_ms + 20, began_ms + 30)
        self.span("compute", "backward", 1, step, began_ms + 30, began_ms + 60)

    def write(self) -> Path:
        self.writer.close()
        return trace.merge(self.run_dir)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two layers travel each step; the second one's messages find the optimizer, and the link, at work."""
    made = MadeUp(tmp_path / "run")
    for step in range(STEPS):
        made.step(step)
        t = STEP_MS * step
        made.trip(1, step, left=t + 60, taken=t + 60.5, update=t + 61, done=t + 71, back=t + 71.25)
        made.trip(0, step, left=t + 66, taken=t + 71, update=t + 71, done=t + 73, back=t + 75.25)
    return made.write()


def test_latencies_with_and_without_waiting_for_who_is_at_work(path: Path) -> None:
    found = numbers(Timeline.read(path), range(STEPS))
    assert found["out"] == {
        "messages": 8,
        "median_ms": 2.75,
        "p99_ms": 5.0,
        "free_messages": 4,
        "free_median_ms": 0.5,
        "free_p99_ms": 0.5,
    }
    assert (found["in"]["median_ms"], found["in"]["p99_ms"]) == (1.25, 2.25)
    assert (found["in"]["free_messages"], found["in"]["free_median_ms"]) == (4, 0.25)


def test_shares_of_the_step(path: Path) -> None:
    found = numbers(Timeline.read(path), range(1, 3))
    assert (found["steps"], found["step_ms"]) == (2, STEP_MS)
    assert found["messages_a_step"] == 4.0
    assert found["share_of_one_gradient"] == pytest.approx(0.75 / STEP_MS)
    assert found["share_one_after_the_other"] == pytest.approx(2 * 0.75 / STEP_MS)
    assert found["cpu_busy_share"] == pytest.approx(0.12)
    assert found["stall_share"] == pytest.approx(0.05)


def test_touching_new_memory_is_work_too(tmp_path: Path) -> None:
    made = MadeUp(tmp_path)
    made.step(0)
    made.writer.span("planes", "touch 3", 0.055, 0.070)
    made.trip(0, 0, left=60, taken=70, update=70, done=71, back=72)
    out = numbers(Timeline.read(made.write()), range(1))["out"]
    assert (out["messages"], out["free_messages"], out["free_median_ms"]) == (1, 0, None)


def test_what_reaches_over_the_window_counts_in_part_and_overlaps_count_once(tmp_path: Path) -> None:
    made = MadeUp(tmp_path)
    for step in range(3):
        made.step(step)
    made.span("CPU update", "CPU update", 0, 0, 90, 120)
    made.span("CPU update", "CPU update", 1, 0, 110, 130)
    made.span("CPU update", "CPU update", 2, 1, 195, 250)
    assert numbers(Timeline.read(made.write()), range(1, 2))["cpu_busy_share"] == pytest.approx(0.35)


def test_a_message_without_its_other_half_is_left_out(tmp_path: Path) -> None:
    made = MadeUp(tmp_path)
    made.step(0)
    made.span("D2H", "D2H", 0, 0, 10, 20)
    made.span("H2D", "H2D", 1, 0, 10, 20)
    found = numbers(Timeline.read(made.write()), range(1))
    assert found["out"]["messages"] == found["in"]["messages"] == found["messages_a_step"] == 0
    assert found["out"]["median_ms"] is None and found["share_of_one_gradient"] == 0.0
    assert "none" in timeline.table({"run": found})


@pytest.mark.parametrize(("count", "p99_ms"), [(1, 0.0), (100, 98.0), (101, 99.0), (200, 197.0)])
def test_percentiles(count: int, p99_ms: float) -> None:
    assert Latency.of([(float(ms), True) for ms in reversed(range(count))]).p99_ms == p99_ms


def test_positions_are_the_forward_order(path: Path) -> None:
    made = Timeline.read(path)
    assert made.positions() == {0: 0, 1: 1}
    made.spans = [span for span in made.spans if (span.kind, span.lid) != ("forward", 0)]
    assert made.positions() == {1: 0, 0: 1}, "a layer without a forward of its own comes last"


# ---------------------------------------------------------------- the commands


def test_it_prints_a_table_or_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([str(path), f"k = 0.2={path}"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "|  | run | k = 0.2 |"
    assert "| steps | 2 | 2 |" in rows and "| ms per step, median | 100.00 | 100.00 |" in rows
    assert timeline.main([str(path), "--json", "--steps", "0:4"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": numbers(Timeline.read(path), range(4))}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{path}", "{path}"], "two timelines are called run"),
        (["{path}", "--steps", "7:9"], "no step of 7:9"),
        (["nowhere.json"], "No such file"),
    ],
)
def test_what_cannot_be_read(path: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([argument.format(path=path) for argument in arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["4", "4:4", "a:b", "5:4"])
def test_steps_that_are_none(path: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        timeline.main([str(path), "--steps", steps])
    assert "two steps, as in 4:6" in capsys.readouterr().err


def test_a_file_of_several_trainers_or_none_is_refused(path: Path) -> None:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    other = [{**event, "pid": event["pid"] + 1} for event in events]
    for made_up in (events + other, []):
        with pytest.raises(ValueError, match="one trainer"):
            Timeline(made_up)


def test_a_picture_of_two_runs(path: Path, tmp_path: Path) -> None:
    pictures = pytest.importorskip("benchmarks.pictures", exc_type=ImportError)
    out = tmp_path / "out.png"
    assert pictures.main([str(out), f"before={path}", f"after={path}", "--steps", "1:3"]) == 0
    header = out.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and int.from_bytes(header[16:20], "big") == 1800
    assert pictures.main([str(out), str(path), "--steps", "7:9"]) == 2


def test_a_picture_shows_what_is_in_its_window_and_later_layers_paler(path: Path) -> None:
    pictures = pytest.importorskip("benchmarks.pictures", exc_type=ImportError)
    figure, axes = pictures.pyplot.subplots()
    assert pictures._panel(axes, "run", Timeline.read(path), range(1, 3)) == 2 * STEP_MS
    boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert min(box.x0 for box in boxes) == 0.0 and max(box.x1 for box in boxes) <= 2 * STEP_MS
    rows = [round((box.y0 + box.y1) / 2) for box in boxes]
    assert [rows.count(row) for row in range(4)] == [8, 4, 4, 4]
    pictures.pyplot.close(figure)
    shades = [sum(pictures._shade("forward", depth)) for depth in (0.0, 0.5, 1.0)]
    assert shades == sorted(set(shades)) and shades[-1] < 3.0
    assert pictures._shade("stall", 0.0) == pictures._shade("stall", 1.0)


@pytest.mark.spawns
def test_recorded_runs_differ_by_their_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not overlapped, no update of a step is under way while the next step's forward is."""
    monkeypatch.setenv("HYTRAIN_TRACE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch makes it when it is imported
    monkeypatch.setattr(suite.host, "identity", lambda: "here")  # its mark would stay
    steps = parts.Segment(batch=1, settle=0, measure=4)
    monkeypatch.setattr(parts, "plain", lambda template, system, batch: parts.job(template, system, steps))
    small = ["--device", "cpu", "--dtype", "float32", "--shape", "demo", "--sequence", "8", "--batch", "1"]
    folders = ["--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--commit", "c0ffee"]
    # a k of its own: on a busy machine the planner may keep every layer of so small a model in the trainer
    systems = ("hytrain:0.2", "hytrain:0.2,serial")
    assert suite.main([*small, *folders, "--systems", *systems]) == 0
    for system in systems:
        run = Timeline.read(tmp_path / "runs" / system / "trace.json")
        assert len(run.steps) == 4 and run.of_kind("CPU update")
    ended_ms = {span.step: span.ended_ms for span in run.of_kind("CPU update")}  # the last one's counts
    later = [span for span in run.of_kind("forward") if span.step > 1]
    assert later and all(span.began_ms >= ended_ms[span.step - 1] for span in later)
