"""`hytrain-monitor trace`: what a made-up timeline's trainers waited for, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from protocol.address import Address
from workers import run_folder
from workers.watch import monitor, timeline
from workers.watch.timeline import CAUSES, Timeline, as_text, divide, of_ranks, read, shares, union

STEP_MS = 100.0


class Drawn:
    """Writes a rank's events; times are milliseconds from its step's beginning."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._writer = TraceWriter(folder, Address("trainer", rank))

    def span(self, track: str, kind: str, step: int, began_ms: float, ended_ms: float, lid: int | None = None) -> None:
        began_s, ended_s = ((STEP_MS * step + ms) / 1e3 for ms in (began_ms, ended_ms))
        facts: dict[str, Any] = (
            {"kind": kind, "step": step} if lid is None else {"kind": kind, "lid": lid, "step": step}
        )
        name = kind if lid is None else f"{kind} layer-{lid}"
        self._writer.span(track, name, began_s, ended_s, **facts)

    def steps(self, count: int) -> None:
        for step in range(count):
            at_s = STEP_MS * step / 1e3
            self._writer.span("step", f"step {step}", at_s, at_s + STEP_MS / 1e3, step=step, number=step + 41)

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps. In the second, forward waits 20 ms for layer 3: 5 for the copy, 12 for the CPU, 3 without a span."""
    drawn = Drawn(tmp_path / "run")
    drawn.steps(2)
    for step in range(2):
        drawn.span("compute", "step()", step, 0, 1)
        drawn.span("compute", "between steps", step, 1, 11)
        drawn.span("compute", "forward", step, 11 if step == 0 else 31, 50, lid=3)
        drawn.span("compute", "backward", step, 50, 96, lid=3)
        drawn.span("compute", "after backward", step, 96, 98)
        drawn.span("compute", "step()", step, 98, 100)
    drawn.span("CPU update", "CPU update", 0, 105, 123, lid=1)  # another layer of the module
    drawn.span("CPU update", "CPU update", 0, 70, 80, lid=3)
    drawn.span("H2D", "H2D", 0, 118, 123, lid=3)
    drawn.span("compute", "stall", 1, 11, 31, lid=3)
    drawn.close()
    trace.merge(tmp_path / "run")
    return tmp_path / "run"


def found(folder: Path, rank: int = 0) -> dict[str, float]:
    told = shares(of_ranks(read(folder / trace.FILE))[rank])
    return {share.key: share.ms for share in (*told.work, *told.waits)}


def test_each_part_of_a_wait_has_its_cause(folder: Path) -> None:
    """Per step, of two steps. What happens to the layer itself counts more than what happens to others."""
    per_step = {"backward": 46.0, "forward": 29.0, "cpu": 7.5, "link": 2.5, "loop": 10.0, "boundary": 3.0, "after": 2.0}
    assert found(folder) == pytest.approx(per_step)
    told = shares(Timeline(read(folder / trace.FILE)))
    assert (told.first, told.steps, told.step_ms) == (41, 2, pytest.approx(STEP_MS))
    assert sum(per_step.values()) == told.step_ms, "they add up"
    assert told.busy == pytest.approx(0.75)
    assert [share.layers for share in told.waits if share.key == "cpu"] == [("layer-3",)]


@pytest.mark.parametrize(
    ("track", "kind", "cause"),
    [("visits", "visit", "memory"), ("D2H", "D2H", "link"), ("waiting", "waiting", "cpu"), (None, None, "memory")],
)
def test_a_wait_has_the_cause_that_other_tracks_show(tmp_path: Path, track: str, kind: str, cause: str) -> None:
    drawn = Drawn(tmp_path)
    drawn.steps(2)
    drawn.span("D2H", "D2H", 0, 50, 51, lid=8)
    drawn.span("compute", "stall", 1, 10, 20, lid=3)
    if track is not None:
        drawn.span(track, kind, 1, 5, 30, lid=4)
    drawn.close()
    trace.merge(tmp_path)
    assert found(tmp_path) == {**found(tmp_path), cause: pytest.approx(5.0)}


def test_other_ranks_are_a_cause(tmp_path: Path) -> None:
    """Each rank has its own; a trainer without a whole step is left out."""
    for rank, waited_ms in ((0, 40), (1, 0.5), (2, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getpid", lambda rank=rank: 100 + rank)
            drawn = Drawn(tmp_path, rank)
        if waited_ms is not None:
            drawn.steps(1)
            drawn.span("compute", "waits for all-gather", 0, 0, waited_ms, lid=0)
            drawn.span("compute", "forward", 0, waited_ms, 100, lid=0)
        drawn.close()
    trace.merge(tmp_path)
    assert found(tmp_path, 0)["ranks"] == pytest.approx(40) and found(tmp_path, 1)["ranks"] == pytest.approx(0.5)
    first, _, second = as_text(tmp_path / trace.FILE).partition("\n\nrank 1: ")
    assert first.startswith("rank 0: step 41, 100.0 ms each\n") and CAUSES["ranks"].advice in first
    assert "rank 2" not in second and second.endswith("besides computing, nothing takes 1% of a step")


def test_the_text_has_advice_for_what_is_worth_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert monitor.main(["trace", str(folder)]) == 0
    text = capsys.readouterr().out
    head, _, computing, *rows = text.splitlines()
    assert head == "2 steps from step 41 on, 100.0 ms each"
    assert computing.split() == "computing 75.0 ms 75.0% backward 46.0 ms, forward 29.0 ms".split()
    keys = ("loop", "cpu", "boundary", "link", "after")
    assert [row[:44].strip() for row in rows[:5]] == [CAUSES[key].title for key in keys], "in the order of cost"
    assert rows[6:] == [f"{CAUSES[key].title}: {CAUSES[key].advice}" for key in keys]
    monkeypatch.setattr(run_folder, "default", lambda: folder.parent)
    for name in ("run", str(folder / trace.FILE)):
        assert monitor.main(["trace", name]) == 0 and capsys.readouterr().out == text


def test_a_gpu_that_waits_for_launches_is_told(tmp_path: Path) -> None:
    """Which is not on any track."""
    writer = TraceWriter(tmp_path, Address("trainer", 0))
    for step, starved in enumerate((0.1, 0.5)):
        writer.span("step", f"step {step}", step, step + 1.0, step=step, number=step, starved=starved)
    writer.close()
    trace.merge(tmp_path)
    assert "launches: in 30% of the layers' backwards" in as_text(tmp_path / trace.FILE)
    assert shares(Timeline(read(tmp_path / trace.FILE))).starved == pytest.approx(0.3)


def test_what_is_no_timeline_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert monitor.main(["trace", str(tmp_path)]) == 2
    assert f"hytrain-monitor {tmp_path} --trace 8" in capsys.readouterr().err
    for text in ("", "{}", "[]", '{"traceEvents": [1]}', '{"traceEvents": []}', '{"traceEvents": [{}]}'):
        (tmp_path / trace.FILE).write_text(text)
        assert monitor.main(["trace", str(tmp_path)]) == 2
        assert trace.FILE in capsys.readouterr().err
    (tmp_path / trace.FILE).write_text(json.dumps({"traceEvents": [{"name": "step", "ph": "X"}]}))
    assert monitor.main(["trace", str(tmp_path)]) == 2


pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda it: (it[0], it[0] + it[1])), max_size=6)


@given(pairs, pairs)
def test_parts_are_inside_or_outside(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    whole, busy = union(some), union(others)
    inside, outside = divide(whole, busy)

    def moments(intervals: Any) -> set[int]:
        return {moment for start, end in intervals for moment in range(start, end)}

    assert moments(inside) == moments(whole) & moments(busy) and moments(outside) == moments(whole) - moments(busy)
    assert sum(end - start for start, end in (*inside, *outside)) == len(moments(whole)), "nothing is told twice"


def test_benchmarks_read_a_trace_with_it() -> None:
    benchmark = pytest.importorskip("benchmarks.timeline", exc_type=ImportError)
    assert issubclass(benchmark.Timeline, timeline.Timeline)
