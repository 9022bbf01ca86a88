"""`hytrain-monitor trace`: the bill of a made-up timeline's steps, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from workers.watch.bill import PARTS, Bill, Row, as_text, bill
from workers.watch.timeline import Timeline, divide, of_ranks, read, union

STEP_MS = 100.0


class Drawn:
    """Writes a rank's events; times are milliseconds from its step's beginning."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._writer = TraceWriter(folder, Address("trainer", rank))

    def span(
        self,
        track: str,
        kind: str,
        step: int,
        began_ms: float,
        ended_ms: float,
        lid: int | None = None,
        **more: Any,
    ) -> None:
        began_s, ended_s = ((STEP_MS * step + ms) / 1e3 for ms in (began_ms, ended_ms))
        facts = {"kind": kind, "step": step} | ({} if lid is None else {"lid": lid}) | more
        name = kind if lid is None else f"{kind} layer-{lid}"
        self._writer.span(track, name, began_s, ended_s, **facts)

    def steps(self, count: int, **facts: Any) -> None:
        for step in range(count):
            at_s = STEP_MS * step / 1e3
            self._writer.span("step", f"step {step}", at_s, at_s + STEP_MS / 1e3, step=step, number=step + 41, **facts)

    def rates(self, **rates: Any) -> None:
        self._writer.instant("plans", "rates of trainer-0", 0.0, **rates)

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


def billed(folder: Path, rank: int = 0) -> Bill:
    return bill(of_ranks(read(folder / trace.FILE))[rank])


def found(folder: Path, rank: int = 0) -> dict[str, float]:
    return {row.key: row.ms for row in billed(folder, rank).rows if row.ms and row.ms > 1e-9}


def drawn_bill(folder: Path, steps: int, draw: Callable[[Drawn], None], **facts: Any) -> dict[str, Row]:
    """The rows by key."""
    drawn = Drawn(folder)
    drawn.steps(steps, **facts)
    draw(drawn)
    drawn.close()
    trace.merge(folder)
    return {row.key: row for row in billed(folder).rows}


def test_each_part_of_a_wait_has_its_cause(folder: Path) -> None:
    """Per step, of two steps. What happens to the layer itself counts more than what happens to others."""
    per_step = {"computing": 75.0, "cpu": 7.5, "in": 2.5, "loop": 10.0, "after": 2.0, "boundary": 3.0}
    assert found(folder) == pytest.approx(per_step)
    told = billed(folder)
    assert (told.first, told.steps, told.step_ms) == (41, 2, pytest.approx(STEP_MS))
    rows = {row.key: row for row in told.rows}
    assert rows["rest"].ms == pytest.approx(0.0, abs=1e-9) and told.computing == pytest.approx(0.75)
    assert (rows["computing"].mostly, rows["cpu"].mostly) == ("backward 46.0 ms, forward 29.0 ms", "layer-3")


@pytest.mark.parametrize(
    ("track", "kind", "cause"),
    [
        ("visits", "visit", "memory"),
        ("D2H", "D2H", "out"),
        ("H2D", "H2D", "in"),
        ("waiting", "waiting", "cpu"),
        (None, None, "memory"),
    ],
)
def test_a_wait_has_the_cause_that_other_tracks_show(tmp_path: Path, track: str, kind: str, cause: str) -> None:
    def draw(drawn: Drawn) -> None:
        drawn.span("D2H", "D2H", 0, 50, 51, lid=8)
        drawn.span("compute", "stall", 1, 10, 20, lid=3)
        if track is not None:
            drawn.span(track, kind, 1, 5, 30, lid=4)

    assert drawn_bill(tmp_path, 2, draw)[cause].ms == pytest.approx(5.0)


#: 2 layers; an update takes 1 ms per 10 parameters and moves 26 bytes for each, a copy 1 ms per 100 bytes.
RATES = {
    "numels": [100, 300],
    "cpu_update_s": 1e-4,
    "update_bytes": 26.0,
    "to_host_s": 1e-5,
    "to_device_s": 1e-5,
}


def test_a_bound_is_what_the_work_takes_at_the_calibrated_rate(tmp_path: Path) -> None:
    """Of layers whose updates were in pieces, too. What is busy twice at a time is busy once; and in the next step."""

    def draw(drawn: Drawn) -> None:
        drawn.rates(**{name: 1.0 for name in RATES if name != "numels"}, numels=[])  # others follow
        drawn.rates(**RATES)
        for step in range(2):
            for began_ms, ended_ms, lid in ((50, 60, 1), (60, 75, 0), (75, 110, 1)):
                drawn.span("CPU update", "CPU update", step, began_ms, ended_ms, lid=lid)
            drawn.span("D2H", "D2H", step, 40, 60, lid=1)
            drawn.span("D2H", "D2H", step, 50, 65, lid=0)
            drawn.span("visits", "visit", step, 62, 70, lid=2)
            drawn.span("H2D", "H2D", step, 96, 97, lid=2)

    rows = drawn_bill(tmp_path, 2, draw, to_host_bytes=2000, to_device_bytes=500)
    told = {key: (row.busy_ms, row.bound_ms, row.at_most) for key, row in rows.items() if row.busy_ms}
    assert told == {
        "cpu": (pytest.approx(60.0), pytest.approx(40.0), False),
        "out": (pytest.approx(30.0), pytest.approx(20.0), False),
        "in": (pytest.approx(9.0), pytest.approx(5.0), False),
        "host": (pytest.approx(70.0), pytest.approx((26 * 400 + 2500) / 26 * 0.1), True),
    }
    assert rows["host"].cells[2].startswith("≤ ")


def test_no_bound_is_above_what_was_reached_and_without_a_rate_there_is_none(tmp_path: Path) -> None:
    """The first calibration of a run may have been disturbed. A timeline may have no rates, or not all of them."""

    def draw(drawn: Drawn) -> None:
        drawn.rates(**{**RATES, "to_device_s": None})
        drawn.span("CPU update", "CPU update", 0, 50, 55, lid=1)
        drawn.span("D2H", "D2H", 0, 40, 50, lid=1)
        drawn.span("H2D", "H2D", 0, 60, 70, lid=1)

    rows = drawn_bill(tmp_path / "some", 1, draw, to_host_bytes=10**6, to_device_bytes=10**6)
    assert [rows[key].bound_ms for key in ("cpu", "out", "in", "host")] == pytest.approx([5.0, 10.0, None, 25.0])
    rows = drawn_bill(tmp_path / "none", 1, lambda drawn: drawn.span("D2H", "D2H", 0, 40, 50, lid=1), to_host_bytes=1)
    assert rows["out"].busy_ms == pytest.approx(10.0)
    assert {rows[key].bound_ms for key in ("cpu", "out", "in", "host")} == {None}


#: Parts of the trainer's track, and a kind of each.
OWN = {"loop": "between steps", "computing": "forward", "launches": "backward", "boundary": "step()"}


@pytest.mark.parametrize("most", ["own", "cpu", "out", "in"])
def test_the_limit_is_what_needs_most_time(tmp_path: Path, most: str) -> None:
    """However much of it is hidden. What the trainer does itself adds up: one step is the shortest in each part."""
    own = {"loop": 10, "computing": 20, "launches": 5, "boundary": 0.5}
    ms = own | {"cpu": 30, "out": 30, "in": 30} | ({most: 40} if most != "own" else {})

    def draw(drawn: Drawn) -> None:
        drawn.rates(numels=[10 * ms["cpu"]], cpu_update_s=1e-4, update_bytes=1e-3, to_host_s=1e-5, to_device_s=1e-5)
        for step in range(2):
            at_ms = 0.0
            for key, kind in OWN.items():
                took_ms = own[key] if step else 32
                drawn.span("compute", kind, step, at_ms, at_ms + took_ms, dry=key == "launches")
                at_ms += took_ms
            for kind in ("CPU update", "D2H", "H2D"):
                drawn.span(kind, kind, step, 10, 60, lid=0)

    rows = drawn_bill(tmp_path, 2, draw, to_host_bytes=100 * ms["out"], to_device_bytes=100 * ms["in"])
    bounds = {key: rows[key].bound_ms for key in ms}
    assert bounds == {key: pytest.approx(float(limit)) for key, limit in ms.items()}
    names = "computing, the loop between steps and launches of kernels" if most == "own" else PARTS[most].title
    least = "35.5 ms or more, 36%" if most == "own" else "40.0 ms or more, 40%"
    told = f"a step takes {least} of what it took: the time for {names}"
    assert billed(tmp_path).limit == told and told in as_text(tmp_path / trace.FILE)
    assert (rows["host"].bound_ms or 0.0) > 40.0, "which nobody knows for sure"


def test_without_a_bound_no_limit_is_known(tmp_path: Path) -> None:
    drawn_bill(tmp_path, 1, lambda drawn: drawn.span("compute", "stall", 0, 0, 90, lid=0))
    assert billed(tmp_path).limit == "the limit is not known"


track = st.lists(
    st.tuples(
        st.sampled_from(
            ["forward", "backward", "update", "stall", "between steps", "step()", "waits for all-gather", ""]
        ),
        st.floats(0.1, 20.0),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
beside = st.lists(
    st.tuples(st.sampled_from(["CPU update", "waiting", "D2H", "H2D", "visit"]), st.floats(0, 150), st.floats(0.1, 60)),
    max_size=8,
)


@given(track, beside)
def test_the_parts_add_up_to_the_step(
    parts: list[tuple[str, float, bool]], works: list[tuple[str, float, float]]
) -> None:
    """Whatever overlaps; what the track lacks is told."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "trainer-0"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "step"}},
    ]

    def add(name: str, tid: int, began_ms: float, ended_ms: float, **args: Any) -> None:
        times = {"ts": began_ms * 1e3, "dur": (ended_ms - began_ms) * 1e3}
        events.append({"name": name, "ph": "X", "pid": 1, "tid": tid, "args": {"step": 0, **args}, **times})

    at_ms = lacking_ms = 0.0
    for kind, took_ms, dry in parts:
        if kind:
            add(kind, 2, at_ms, at_ms + took_ms, kind=kind, lid=0, dry=dry)
        lacking_ms += 0.0 if kind else took_ms
        at_ms += took_ms
    for kind, began_ms, took_ms in works:
        add(kind, 3, began_ms, began_ms + took_ms, kind=kind, lid=1)
    add("step 0", 1, 0.0, at_ms)
    found = bill(Timeline(events))
    rows = {row.key: row for row in found.rows}
    assert rows["rest"].ms == pytest.approx(lacking_ms, abs=1e-6)
    assert all((row.ms or 0.0) >= 0.0 for row in found.rows if row.key != "rest")
    assert sum(row.ms or 0.0 for row in found.rows) == pytest.approx(found.step_ms) == pytest.approx(at_ms)


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
    assert first.startswith("rank 0: step 41, 100.0 ms each\n") and PARTS["ranks"].advice in first
    assert "rank 2" not in second and second.endswith("besides computing, nothing takes 1% of a step")


def test_the_text_has_advice_for_what_is_worth_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert monitor.main(["trace", str(folder)]) == 0
    text = capsys.readouterr().out
    head, _, heads, computing, *rows = text.splitlines()
    assert head == "2 steps from step 41 on, 100.0 ms each" and heads.split("  ")[-1].strip() == "bound"
    assert computing.split() == "computing 75.0 ms 75.0% 75.0 ms 65.0 ms backward 46.0 ms, forward 29.0 ms".split()
    between = rows.index("")
    assert [row[:38].strip() for row in rows[:between]] == [
        PARTS[key].title for key in ("cpu", "in", "host", "loop", "after", "boundary", "rest")
    ]
    assert rows[between - 1].split() == ["not", "measured", "0.0", "ms", "0.0%"]
    costly = ("loop", "cpu", "boundary", "in", "after")
    assert rows[between + 1].startswith("a step takes 80.0 ms or more, 80% of what it took: the time for computing, ")
    assert rows[between + 2 :] == [f"{PARTS[key].title}: {PARTS[key].advice}" for key in costly], "in the order of cost"
    monkeypatch.setattr(run_folder, "default", lambda: folder.parent)
    for name in ("run", str(folder / trace.FILE)):
        assert monitor.main(["trace", name]) == 0 and capsys.readouterr().out == text


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
