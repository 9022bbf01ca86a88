"""The timeline's files: events in Chrome's trace format, written by several processes, joined by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_format import check, check_events, check_lines

from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from protocol.address import Address


def written(run_dir: Path, role: str = "trainer") -> list[dict[str, Any]]:
    """What a process's file holds by now."""
    path = run_dir / trace.FOLDER / f"{role}-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def merged(run_dir: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(trace.merge(run_dir).read_text())["traceEvents"]
    return events


def test_every_event_is_one_that_a_viewer_takes(tmp_path: Path) -> None:
    for role in trace.ROLES:
        writer = TraceWriter(tmp_path, Address(role, 0))
        writer.span("step", "step 0", 1.0, 1.5, step=0)
        writer.span("step", "backwards", 2.0, 1.0)
        writer.instant("plans", "plan 0", 1.25, k=0.5)
        writer.counter("k", 1.5, k=0.5)
        writer.close()
        check_lines(tmp_path / trace.FOLDER / f"{role}-0.jsonl")
    events = check(trace.merge(tmp_path))
    told = {(event["ph"], event["name"]) for event in events if event["ph"] != "M"}
    assert told == {("X", "step 0"), ("X", "backwards"), ("i", "plan 0"), ("C", "k")}
    assert all(event["ts"] >= 1e6 for event in events if event["ph"] != "M"), "microseconds"
    [span, backwards, *_] = [event for event in events if event["ph"] == "X"]
    assert (span["ts"], span["dur"], span["args"], backwards["dur"]) == (1e6, 5e5, {"step": 0}, 0.0)
    trace.clear(tmp_path)
    assert merged(tmp_path) == [] and not list(tmp_path.glob("*.tmp"))
    trace.clear(tmp_path / "nowhere")


def test_processes_and_tracks_have_names_and_an_order(tmp_path: Path) -> None:
    processes = [Address(role, rank) for rank in range(2) for role in trace.ROLES[: 3 - rank]]
    for address in reversed(processes):
        writer = TraceWriter(tmp_path, address)
        for track in reversed(trace.TRACKS):
            writer.span(track, "work", 0.0, 1.0)
        writer.close()
    events = merged(tmp_path)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    places = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert [name for _, name in sorted(zip(places, names, strict=True))] == list(map(str, processes)), "rank by rank"
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [threads[tid] for tid in sorted(threads, key=order.__getitem__)] == list(trace.TRACKS)
    assert {e["tid"] for e in events if e["ph"] == "X"} == threads.keys()


def test_spans_that_overlap_get_lanes_and_instants_take_none(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, Address("optimizer", 0))
    for name, began_s, ended_s in (("a", 0, 4), ("b", 1, 5), ("c", 2, 6), ("d", 4, 7), ("e", 7, 8), ("f", 7, 9)):
        writer.span("waiting", name, began_s, ended_s)
        writer.instant("waiting", "instant", began_s)
    writer.span("H2D", "elsewhere", 0, 9)
    writer.close()
    events = check_lines(tmp_path / trace.FOLDER / "optimizer-0.jsonl")
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_name = {e["name"]: lanes[e["tid"]] for e in events if e["ph"] == "X"}
    assert by_name.pop("elsewhere") == "H2D"
    assert list(by_name.values()) == ["waiting", "waiting 2", "waiting 3", "waiting", "waiting", "waiting 2"]
    assert {lanes[e["tid"]] for e in events if e["ph"] == "i"} == {"waiting"}


def test_a_line_that_was_never_finished_is_left_out(tmp_path: Path) -> None:
    first = TraceWriter(tmp_path, Address("trainer", 0))
    first.counter("k", 1.0, k=0.25)
    first.close()
    with (tmp_path / trace.FOLDER / "trainer-0.jsonl").open("a") as file:
        file.write('\n{"name":"k","ph":"C","pid":1,"tid":0,"ts":20000')  # its process died here
    second = TraceWriter(tmp_path, Address("trainer", 0))
    second.counter("k", 3.0, k=0.75)
    second.close()
    assert [event["args"]["k"] for event in merged(tmp_path) if event["ph"] == "C"] == [0.25, 0.75]


def test_a_full_disk_costs_events_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path, Address("trainer", 0))
    path = tmp_path / trace.FOLDER / "trainer-0.jsonl"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    for step in range(3):
        writer.instant("plans", f"plan {step}", 1.0 + step)
        writer.flush()
    assert [record.message for record in caplog.records] == [
        "the timeline lacks events: [Errno 28] No space left on device"
    ]
    path.unlink()
    writer.instant("plans", "plan 3", 4.0)
    writer.close()
    assert [event["name"] for event in written(tmp_path)] == ["plan 3"]


def test_what_a_disk_refuses_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the timeline of before, which stays."""
    writer = TraceWriter(tmp_path, Address("trainer", 0))
    writer.instant("plans", "plan 0", 1.0)
    writer.close()
    before = trace.merge(tmp_path).read_text()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    trace.clear(tmp_path)
    assert "the next timeline has events of an earlier one: [Errno 30]" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(trace, "_is_whole", refuse)
    with pytest.raises(OSError, match="Read-only"):
        trace.merge(tmp_path)
    assert (tmp_path / trace.FILE).read_text() == before and not list(tmp_path.glob("*.tmp"))


def test_a_file_has_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 2 << 20)
    writer = TraceWriter(tmp_path, Address("trainer", 0))
    path = tmp_path / trace.FOLDER / "trainer-0.jsonl"
    for step in range(40_000):
        writer.counter("k", float(step), k=0.5)
        assert len(writer._events) <= trace.BUFFERED_EVENTS
    writer.close()
    assert (2 << 20) - 200 * trace.BUFFERED_EVENTS < path.stat().st_size <= 2 << 20
    assert [record.message for record in caplog.records] == [
        "the timeline lacks events: trainer-0.jsonl has 2 MiB, the most that is written"
    ]
    check(trace.merge(tmp_path))


def test_a_writer_that_is_off_leaves_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, Address("trainer", 0), trace.NO_STEP)
    writer.close()
    assert not list(tmp_path.iterdir()) and not writer.is_on and not writer.draws(0)
    writer.begin(range(3, 5))
    assert [step for step in range(9) if writer.draws(step)] == [3, 4]
    writer.span("step", "step 3", 1.0, 2.0)
    writer.begin(trace.NO_STEP)
    assert [event["name"] for event in check(trace.merge(tmp_path)) if event["ph"] == "X"] == ["step 3"]


NAMES = [
    {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "p"}},
    {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "t"}},
]
SPAN = {"name": "a", "ph": "X", "pid": 1, "tid": 2, "ts": 1.0, "dur": 4.0}


@pytest.mark.parametrize(
    "broken",
    [
        {"ph": "Z"},
        {"ts": "1"},
        {"ts": True},
        {"dur": -1.0},
        {"pid": 1.5},
        {"pid": 7},
        {"tid": 7},
        {"name": ""},
        {"args": []},
        {"s": "t"},
        {"ts": 3.0},
    ],
    ids=str,
)
def test_what_breaks_the_format_is_seen(broken: dict[str, Any]) -> None:
    """Or else the checks above say nothing. A span must not begin in another and end behind it."""
    check_events([*NAMES, SPAN, {**SPAN, "ts": 2.0, "dur": 1.0}])
    with pytest.raises(AssertionError):
        check_events([*NAMES, SPAN, {**SPAN, **broken}])
