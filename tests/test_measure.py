"""The trainer's measurements, over a clock that the test sets: marks, intervals, times, the timeline."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain.memory import clock as clock_module
from hytrain.memory.clock import (
    ANCHOR_EVERY_S,
    ANCHOR_PATIENCE_S,
    ANCHOR_TRIES,
    CudaClock,
    HostClock,
    Span,
    Stream,
)
from hytrain.run import trace
from hytrain.run.trace import TraceWriter
from hytrain.step import measure
from hytrain.step.marks import Waited
from hytrain.step.measure import Meter
from protocol.address import Address
from protocol.messages import LayerTimes

#: Where the device's clock stands on the monotonic one.
ANCHOR_S = 1000.0
#: When something began and ended.
Times = tuple[float, float]


class Mark:  # knows whether somebody may still ask about it
    at_s: float
    in_use = False


class FakeClock:
    """A device whose time is `now_s`, and which has passed all marks up to `passed_s`. Marks come from a pool."""

    runs_ahead = True

    def __init__(self) -> None:
        self.now_s, self.passed_s = 0.0, float("inf")
        self.pool, self.all = list[Mark](), list[Mark]()
        self.made = self.anchored = 0

    def mark(self, stream: Stream = None) -> Mark:
        if not self.pool:
            self.made += 1
        mark = self.pool.pop() if self.pool else Mark()
        self.all = [*dict.fromkeys([*self.all, mark])]
        assert not mark.in_use, "a mark that is in use was given out again"
        mark.at_s, mark.in_use = self.now_s, True
        return mark

    def marked(self, at_s: float) -> Mark:
        """A mark, left at a time."""
        self.now_s = at_s
        return self.mark()

    def span(self, began_s: float, ended_s: float) -> Span:
        return self.marked(began_s), self.marked(ended_s)

    def passed(self, mark: Mark) -> bool:
        assert mark.in_use
        return mark.at_s <= self.passed_s

    def seconds(self, span: Span) -> float:
        assert span[0].in_use and span[1].in_use
        return float(span[1].at_s - span[0].at_s)

    def anchor(self) -> None:
        self.anchored += 1

    def at(self, mark: Mark) -> float:
        assert mark.in_use and self.anchored
        return mark.at_s + ANCHOR_S

    def recycle(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            assert mark.in_use, "a mark was given back twice"
            mark.in_use = False
            self.pool.append(mark)


#: Elements of layers 0, 1, 2. A module consists of layers 1 and 2, in parts of one to three.
NUMELS = [10, 10, 30]
OFF = TraceWriter("", Address("trainer", 0), trace.NO_STEP)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are measured however fast they follow each other, as in most tests here."""
    monkeypatch.setattr(measure, "MEASURE_EVERY_S", 0.0)


@pytest.fixture
def meter(clock: FakeClock) -> Meter:
    return Meter(clock, NUMELS, trace=OFF)


@pytest.fixture
def timeline(clock: FakeClock, tmp_path: Path) -> Meter:
    """A meter that draws."""
    return Meter(clock, NUMELS, trace=TraceWriter(tmp_path, Address("trainer", 0)), names="abc")


def record(meter: Meter, clock: FakeClock, start_s: float = 0.0, step: int = 0) -> None:
    """Forward over layer 0 and a module of 1 and 2, backward, with 1 on the GPU and the others on the CPU."""
    t = start_s
    meter_forward(meter, clock, (0,), t, t + 1)  # waits 1 s for weights
    meter_forward(meter, clock, (1, 2), t + 4, t + 4.5)
    meter_backward(meter, clock, 2, t + 10.5)
    meter.span("d2h_s", 2, step, clock.span(t + 10.6, t + 11.6))
    meter_backward(meter, clock, 1, t + 12)
    meter.span("gpu_update_s", 1, step, clock.span(t + 12, t + 12.25))
    meter_backward(meter, clock, 0, t + 15)
    meter.span("d2h_s", 0, step, clock.span(t + 15, t + 15.5))


def meter_forward(meter: Meter, clock: FakeClock, lids: tuple[int, ...], arrived_s: float, went_s: float) -> None:
    clock.now_s = arrived_s
    arrived = meter.mark()
    clock.now_s = went_s
    meter.forward(lids, arrived)


def meter_backward(meter: Meter, clock: FakeClock, lid: int, at_s: float) -> None:
    clock.now_s = at_s
    meter.backward(lid)


def end(meter: Meter, clock: FakeClock, step: int, at_s: float) -> dict[int, LayerTimes]:
    clock.now_s = at_s
    return {times.lid: times for times in meter.end_step(step)}


def test_a_step_is_taken_apart(clock: FakeClock, meter: Meter) -> None:
    record(meter, clock)
    times = end(meter, clock, 0, 16.0)
    assert meter.measured == 0 and meter.stall_s == pytest.approx(1.5)
    # What lies between the last entry and the first gradient (6 s) is a third forward, two thirds backward.
    assert times[0] == LayerTimes(lid=0, stall_s=1.0, forward_s=3.0, backward_s=pytest.approx(2.75), d2h_s=0.5)
    assert times[1] == LayerTimes(lid=1, stall_s=0.5, forward_s=0.5, backward_s=1.5, gpu_update_s=0.25)
    assert times[2] == LayerTimes(lid=2, forward_s=1.5, backward_s=4.0, d2h_s=pytest.approx(1.0))


def test_of_a_stages_forwards_the_first_of_each_module_is_measured(clock: FakeClock) -> None:
    """A pipeline makes all forwards before the first backward, or some; the first ones wait for weights."""
    meter = Meter(clock, NUMELS, trace=OFF, is_stage=True)
    for step in range(2):
        t = 100.0 * step
        for micro_batch in range(3):
            meter.restart()
            waits_s = 0.0 if micro_batch else 1.0
            meter_forward(meter, clock, (0,), t + 5 * micro_batch, t + 5 * micro_batch + waits_s)
            meter_forward(meter, clock, (1, 2), t + 5 * micro_batch + 2, t + 5 * micro_batch + 2)
        for lid in (2, 1, 0):
            meter_backward(meter, clock, lid, t + 30 - lid)
        times = end(meter, clock, step, t + 40)
        assert meter.stall_s == pytest.approx(1.0) and times[0].forward_s == pytest.approx(1.0)
    assert len(clock.pool) == clock.made


def gathered_forward(meter: Meter, clock: FakeClock, lid: int, noticed: Times, waited: Times, used: Times) -> None:
    on_modules_stream, on_its_stream = clock.span(*noticed), clock.span(*waited)
    clock.now_s = used[0]
    arrived = meter.mark()
    clock.now_s = used[1]
    meter.forward((lid,), arrived, Waited(on_modules_stream, on_its_stream))


def test_of_a_wait_for_updates_the_part_that_forward_notices_is_a_stall(clock: FakeClock, meter: Meter) -> None:
    """An all-gather ahead of forward waits for updates; forward waits for the all-gather, and thus for other ranks."""
    # Half a second of the stream's wait is noticed, and two seconds of the all-gather.
    gathered_forward(meter, clock, 0, noticed=(0.0, 0.0), waited=(0.0, 1.0), used=(0.5, 3.0))
    # The thread waited a forward earlier, which had no more work for a quarter of a second. Of the stream's wait half a
    # second is noticed, between other all-gathers.
    gathered_forward(meter, clock, 1, noticed=(3.5, 3.75), waited=(6.0, 6.5), used=(5.5, 7.0))
    # Gathered two forwards ahead. Nothing was left to wait for.
    gathered_forward(meter, clock, 2, noticed=(4.0, 5.0), waited=(6.5, 6.75), used=(8.0, 8.0))
    for lid in (2, 1, 0):
        meter_backward(meter, clock, lid, 14.0 - lid)
    times = end(meter, clock, 0, 16.0)
    assert [times[lid].stall_s for lid in range(3)] == [0.5, 0.75, 1.0]
    assert [times[lid].forward_s for lid in range(3)] == [1.25, 1.0, pytest.approx(4 / 3)]
    assert (meter.stall_s, meter.exposed_s) == (2.25, 3.0)
    assert len(clock.pool) == clock.made, "all marks are given back"
    gathered_forward(meter, clock, 0, noticed=(20.0, 20.0), waited=(20.0, 21.0), used=(21.0, 21.0))
    meter.restart()  # it was an evaluation
    assert len(clock.pool) == clock.made


def test_waits_for_updates_take_nothing_from_other_forwards(clock: FakeClock, meter: Meter) -> None:
    for lid, at_s in enumerate((0.0, 2.0, 5.0)):
        gathered_forward(
            meter, clock, lid, noticed=(at_s, at_s + 1), waited=(at_s, at_s + 1), used=(at_s + 1, at_s + 1)
        )
    for lid in (2, 1, 0):
        meter_backward(meter, clock, lid, 14.0 - lid)
    times = end(meter, clock, 0, 16.0)
    assert [times[lid].forward_s for lid in range(3)] == [1.0, 2.0, 2.0]


def test_backwards_waits_for_offloaded_weights_are_stalls(clock: FakeClock, meter: Meter) -> None:
    """Of several backwards only those of the last count, as its times do."""
    meter_forward(meter, clock, (0,), 0, 0)
    meter_forward(meter, clock, (1, 2), 1, 1)
    for turn_s in (4, 10):
        clock.now_s = turn_s
        meter.turn()
        clock.now_s = turn_s + 1
        arrived = meter.mark()
        clock.now_s = turn_s + 1.5
        meter.fetched(0, arrived)
    meter_backward(meter, clock, 2, 11)
    meter_backward(meter, clock, 0, 13)
    times = end(meter, clock, 0, 16.0)
    assert (meter.stall_s, times[0].stall_s, times[0].backward_s) == (0.5, 0.5, 1.5)
    assert len(clock.pool) == clock.made, "all marks are given back"


def test_of_backwards_wait_for_an_all_gather_the_wait_for_its_weights_is_a_stall(
    clock: FakeClock, meter: Meter
) -> None:
    meter_forward(meter, clock, (0,), 0, 0)
    meter_forward(meter, clock, (1,), 1, 1)
    meter_backward(meter, clock, 1, 3)
    for waited, used in (((2.0, 3.5), (3.0, 4.0)), ((4.0, 5.0), (6.0, 6.5))):  # of the other one, no part
        of_gather = Waited(clock.span(4.0, 4.0), clock.span(*waited))
        clock.now_s = used[0]
        arrived = meter.mark()
        clock.now_s = used[1]
        meter.fetched(0, arrived, of_gather)
    meter_backward(meter, clock, 0, 7)
    times = end(meter, clock, 0, 8.0)
    assert (meter.stall_s, times[0].stall_s, times[0].backward_s) == (0.5, 0.5, 3.5)
    assert len(clock.pool) == clock.made, "all marks are given back"
    meter.fetched(0, meter.mark(), Waited(clock.span(9.0, 9.0), clock.span(9.0, 9.0)))
    meter.restart()
    assert len(clock.pool) == clock.made


def test_all_gathers_are_measured_apart(clock: FakeClock, timeline: Meter, tmp_path: Path) -> None:
    """They overlap with layers' times and change none of them. Those of a forward without a backward do not count."""
    dropped = timeline.gather((0,))
    clock.now_s = 2.0
    dropped()
    timeline.restart()
    record(timeline, clock)
    clock.now_s = 3.0
    ended = timeline.gather((1, 2))
    clock.now_s = 3.5
    timeline.restart()  # of a later micro-batch
    ended()
    for began_s, ended_s in ((8.0, 8.25), (9.0, 9.5)):
        clock.now_s = began_s
        gathered = timeline.gather((2,))
        clock.now_s = ended_s
        gathered()
    apart = end(timeline, clock, 0, 16.0)
    assert timeline.gather_s == pytest.approx(1.25)
    assert apart[2] == LayerTimes(lid=2, forward_s=1.5, backward_s=4.0, d2h_s=pytest.approx(1.0))
    record(timeline, clock, 20.0)
    end(timeline, clock, 1, 36.0)
    assert timeline.gather_s is None
    timeline.close()
    events = json.loads(trace.merge(tmp_path).read_text())["traceEvents"]
    drawn = [e["name"] for e in events if e.get("args", {}).get("kind") == "all-gather"]
    assert drawn == ["all-gather b", "all-gather c", "all-gather c"]


def test_the_share_of_backwards_that_wait_for_launches(clock: FakeClock, meter: Meter) -> None:
    """The device had passed the mark before when the next one was left. How long a pause was does not matter."""
    clock.passed_s = 5.0  # in forward after a stall, which says nothing
    meter_forward(meter, clock, (0,), 0, 1)
    meter_forward(meter, clock, (1,), 3, 3)
    meter_forward(meter, clock, (2,), 6, 6)
    meter_backward(meter, clock, 2, 8)
    clock.passed_s = 20.0
    meter_backward(meter, clock, 1, 18)
    clock.passed_s = 0.0
    meter_backward(meter, clock, 0, 21)
    clock.passed_s = 21.0
    end(meter, clock, 0, 21.0)
    assert meter.starved == pytest.approx(1 / 3)
    meter_forward(meter, clock, (0,), 30, 31)
    meter_backward(meter, clock, 0, 32)
    clock.passed_s = 33.0
    end(meter, clock, 1, 33.0)
    assert meter.starved == 0.0


def test_of_several_backwards_the_first_forward_and_the_last_backward_count(clock: FakeClock, meter: Meter) -> None:
    meter_forward(meter, clock, (0,), 0, 0)
    meter_forward(meter, clock, (2,), 2, 2)
    for at_s in (5.0, 20.0, 40.0):
        clock.now_s = at_s
        meter.turn()
    for lid, at_s in ((2, 43.0), (1, 44.0), (0, 46.0)):
        meter_backward(meter, clock, lid, at_s)
    times = end(meter, clock, 0, 47.0)
    assert meter.middle_s == 35.0
    assert [times[lid].backward_s for lid in (2, 1, 0)] == [5.0, 1.0, 2.0]
    assert (times[0].forward_s, times[2].forward_s) == (2.0, 1.0)
    clock.now_s = 48.0
    meter.turn()  # of a backward whose gradients were dropped
    meter.restart()
    record(meter, clock, 50.0)
    end(meter, clock, 1, 66.0)
    assert meter.middle_s == 0.0


def test_what_the_loop_does_before_updates_that_wait_for_step_is_the_middle(clock: FakeClock, meter: Meter) -> None:
    """It clips, say: the CPU has nothing to update meanwhile."""
    record(meter, clock)  # until 15
    clock.now_s = 17.0
    meter.begin_held()
    end(meter, clock, 0, 18.0)
    assert meter.middle_s == 2.0
    record(meter, clock, 20.0)  # until 35
    clock.now_s = 34.0  # on another stream, which did not wait
    meter.begin_held()
    end(meter, clock, 1, 36.0)
    assert meter.middle_s == 0.0
    record(meter, clock, 40.0)
    end(meter, clock, 2, 56.0)
    assert meter.middle_s == 0.0


def test_nothing_is_measured_before_the_device_has_passed_it(clock: FakeClock, meter: Meter) -> None:
    assert end(meter, clock, 0, 1.0) == {}, "a step without marks has no times"
    clock.passed_s = 15.9  # the step's own end is still ahead
    record(meter, clock)
    assert end(meter, clock, 1, 16.0) == {} and meter.measured is None
    record(meter, clock, 20.0)
    clock.passed_s = 30.0  # in the middle of step 2
    assert end(meter, clock, 2, 36.0).keys() == {0, 1, 2} and meter.measured == 1
    record(meter, clock, 40.0)
    meter.span("d2h_s", 2, 3, clock.span(56.0, 99.0))  # a copy that is late
    clock.passed_s = 56.0
    assert end(meter, clock, 3, 56.0)[0].stall_s == 1.0 and meter.measured == 2
    assert end(meter, clock, 4, 57.0) == {}


def test_weights_that_come_back_late_belong_to_their_own_step(
    tmp_path: Path, clock: FakeClock, timeline: Meter
) -> None:
    record(timeline, clock)
    timeline.span("h2d_s", 2, 0, clock.span(13.0, 14.0))
    end(timeline, clock, 0, 16.0)
    timeline.span("h2d_s", 0, 0, clock.span(16.5, 17.0))  # after the step's end
    record(timeline, clock, 20.0)
    timeline.span("h2d_s", 2, 1, clock.span(33.0, 34.0))
    assert end(timeline, clock, 1, 36.0)[0].h2d_s == 0.5
    timeline.close()
    drawn = [(s["args"]["lid"], s["args"]["step"]) for s in spans(tmp_path) if s["name"].startswith("H2D")]
    assert drawn == [(2, 0), (0, 0), (2, 1)]


def test_of_steps_that_follow_each_other_fast_some_are_measured(
    clock: FakeClock, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MEASURE_EVERY_S", 0.05)
    now_s = 0.0
    monkeypatch.setattr(measure.time, "monotonic", lambda: now_s)
    found, made = dict[int, dict[int, LayerTimes]](), list[int]()
    for step in range(9):
        now_s += 0.02
        meter.restart()
        record(meter, clock, 20.0 * step, step)
        if step:
            meter.span("h2d_s", 0, step - 1, clock.span(20.0 * step, 20.0 * step + step))  # the last step's weights
        meter.span("visit_s", 1, step, clock.span(20.0 * step + 13, 20.0 * step + 14))
        times = end(meter, clock, step, 20.0 * step + 16.0)
        if meter.measured is not None:
            found[meter.measured] = times
        else:
            assert times == {}
        made.append(sum(mark.in_use for mark in clock.all))
    assert [*found] == [0, 1, 4, 7]
    assert [found[step][0].h2d_s for step in found] == [None, 1.0, 2.0, 5.0], "step 1's in 2, and step 4's in 5"
    assert all(found[step][1].visit_s == 2.0 and found[step][0].forward_s == 3.0 for step in found)
    assert max(made[2:]) <= 2, "what is not measured keeps no marks but those of weights that came late"


def test_an_all_gather_in_a_step_without_marks_may_be_used_in_one_that_is_measured(
    clock: FakeClock, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MEASURE_EVERY_S", math.inf)
    waited = None
    for step in range(4):
        if step == 3:
            monkeypatch.setattr(measure, "MEASURE_EVERY_S", 0.0)
        if step == 2:
            waited = Waited((meter.mark(), meter.mark()), (meter.mark(), meter.mark()))
        end(meter, clock, step, 20.0 * step + 16.0)
    meter.restart()
    clock.now_s = 80.0
    meter.forward((0,), meter.mark(), waited)
    clock.now_s = 83.0
    meter.fetched(0, meter.mark(), waited)
    meter_backward(meter, clock, 0, 85.0)
    assert end(meter, clock, 4, 90.0)[0].forward_s == pytest.approx(5.0 / 3) and meter.measured == 4
    assert None not in clock.pool


def test_a_step_that_is_drawn_is_measured_however_fast(clock: FakeClock, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "MEASURE_EVERY_S", math.inf)
    meter = Meter(clock, NUMELS, trace=TraceWriter(tmp_path, Address("trainer", 0), trace.NO_STEP))
    for step in range(6):
        if step == 3:
            meter.draw(range(3, 5))
        meter.restart()
        record(meter, clock, 20.0 * step, step)
        end(meter, clock, step, 20.0 * step + 16.0)
        assert (meter.measured is not None) is (step in (0, 1, 3, 4, 5)), "the weights of step 4 come in 5"
    meter.close()
    drawn = {span["args"]["step"] for span in spans(tmp_path) if span["name"].startswith("forward")}
    assert drawn == {3, 4}


def test_a_forward_without_backward_is_no_part_of_the_step(clock: FakeClock, meter: Meter) -> None:
    meter.restart()
    meter_forward(meter, clock, (0,), 0.0, 9.0)  # an evaluation
    meter.restart()
    record(meter, clock, 10.0)
    meter.restart()  # a forward inside of backward, by checkpointing
    assert end(meter, clock, 0, 30.0)[0].stall_s == 1.0


def test_marks_are_used_again_and_never_twice_at_a_time(clock: FakeClock, meter: Meter) -> None:
    """`FakeClock` refuses to give one out that is in use, and to take one back twice."""
    made = []
    for step in range(12):
        meter.restart()
        record(meter, clock, 20.0 * step)
        clock.passed_s = 20.0 * step + 2.0  # one step behind
        end(meter, clock, step, 20.0 * step + 16.0)
        made.append(clock.made)
    assert made[-1] == made[1] == 2 * made[0], "two steps' marks are enough for ever"


# ---------------------------------------------------------------- the timeline


def spans(run_dir: Path) -> list[dict[str, Any]]:
    """Spans of the merged timeline, with their track's name."""
    events = json.loads(trace.merge(run_dir).read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [{**event, "track": tracks[event["tid"]]} for event in events if event["ph"] == "X"]


def seconds(span: dict[str, Any]) -> tuple[float, float]:
    """When it began and ended, on the device's clock."""
    return round(span["ts"] / 1e6 - ANCHOR_S, 6), round((span["ts"] + span["dur"]) / 1e6 - ANCHOR_S, 6)


def test_a_last_steps_weights_are_drawn_in_the_step_after(tmp_path: Path, clock: FakeClock) -> None:
    """Of the steps that are asked for, and of no others."""
    meter = Meter(clock, NUMELS, trace=TraceWriter(tmp_path, Address("trainer", 0), trace.NO_STEP))
    for step in range(5):
        if step == 1:
            meter.draw(range(1, 3))
        record(meter, clock, 20.0 * step)
        if step:
            meter.span("h2d_s", 2, step - 1, clock.span(20.0 * step + 1, 20.0 * step + 2))
        end(meter, clock, step, 20.0 * step + 16)
        assert meter.draws is (step in (1, 2))
    drawn = [(s["args"]["step"], s["track"]) for s in spans(tmp_path)]
    assert {step for step, _ in drawn} == {1, 2}
    assert [step for step, track in drawn if track == "step"] == [1, 2] == [s for s, track in drawn if track == "H2D"]


def test_the_timeline_is_on_the_monotonic_clock(tmp_path: Path, clock: FakeClock, timeline: Meter) -> None:
    record(timeline, clock, 100.0)
    end(timeline, clock, 0, 116.0)
    timeline.close()
    drawn = {(span["track"], span["name"]): seconds(span) for span in spans(tmp_path) if span["name"] != "forward b"}
    assert drawn == {
        ("step", "step 0"): (100.0, 116.0),
        ("compute", "stall a"): (100.0, 101.0),
        ("compute", "forward a"): (101.0, 104.0),
        ("compute", "stall b"): (104.0, 104.5),
        ("compute", "backward c"): (106.5, 110.5),
        ("compute", "backward b"): (110.5, 112.0),
        ("compute", "update b"): (112.0, 112.25),
        ("compute", "backward a"): (112.25, 115.0),
        ("D2H", "D2H c"): (110.6, 111.6),
        ("D2H", "D2H a"): (115.0, 115.5),
    }
    assert all(span["args"]["step"] == 0 for span in spans(tmp_path))


def test_a_step_that_is_drawn_has_no_gaps(tmp_path: Path, clock: FakeClock, timeline: Meter) -> None:
    """From the end of the step before to its own end, with what the loop does before forward and after backward."""
    for step in range(4):
        zero_s = 20.0 * step
        record(timeline, clock, zero_s, step)
        clock.now_s = zero_s + 15.5
        timeline.enter_boundary()
        clock.now_s = zero_s + 15.75
        timeline.enter_boundary()  # there was no gradient, the first time
        clock.passed_s = zero_s + 16.0
        end(timeline, clock, step, zero_s + 16.0)
        clock.now_s = zero_s + 16.25
        timeline.leave_boundary()
    timeline.close()
    of_step = [span for span in spans(tmp_path) if span["args"]["step"] == 2]
    [whole] = [span for span in of_step if span["track"] == "step"]
    assert seconds(whole) == (36.0, 56.0)
    parts = sorted((*seconds(span), span["args"]["kind"]) for span in of_step if span["track"] == "compute")
    assert parts[:3] == [(36.0, 36.25, "step()"), (36.25, 40.0, "between steps"), (40.0, 41.0, "stall")]
    assert parts[-2:] == [(55.0, 55.75, "after backward"), (55.75, 56.0, "step()")]
    assert [ended_s for _, ended_s, _ in parts[:-1]] == [began_s for began_s, _, _ in parts[1:]]


def test_one_launch_that_updates_several_layers(tmp_path: Path, clock: FakeClock, timeline: Meter) -> None:
    """Each has its part by its size, and none of it is backward's."""
    meter_forward(timeline, clock, (0,), 0.0, 0.0)
    meter_forward(timeline, clock, (1, 2), 1.0, 1.0)
    for lid, at_s in ((2, 4.0), (1, 5.0), (0, 6.0)):
        meter_backward(timeline, clock, lid, at_s)
    timeline.span("gpu_update_s", (0, 2), 0, clock.span(7.0, 11.0))
    times = end(timeline, clock, 0, 12.0)
    first_s = 4.0 * NUMELS[0] / (NUMELS[0] + NUMELS[2])
    parts = [pytest.approx(first_s), None, pytest.approx(4.0 - first_s)]
    assert [times[lid].gpu_update_s for lid in (0, 1, 2)] == parts
    assert [times[lid].backward_s for lid in (0, 1)] == [1.0, 1.0]
    timeline.close()
    drawn = {span["args"]["lid"]: seconds(span) for span in spans(tmp_path) if span["args"].get("kind") == "update"}
    assert drawn == {0: pytest.approx((7.0, 7.0 + first_s)), 2: pytest.approx((7.0 + first_s, 11.0))}


def test_what_ends_as_soon_as_it_is_launched_waited_for_launches(
    tmp_path: Path, clock: FakeClock, timeline: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what ends later, since the device had other work, nor anything on a device that does not run ahead."""
    host = SimpleNamespace(monotonic=lambda: ANCHOR_S + clock.now_s - behind_s)
    monkeypatch.setattr(measure, "time", host)
    behind_s = 0.0
    for step, runs_ahead in enumerate((True, False)):
        clock.runs_ahead = runs_ahead
        t = 20.0 * step
        for at_s, lag_s, lid in ((0.0, 0.0, 0), (2.0, 1e-5, 1), (4.0, 1.0, 2)):
            clock.now_s, behind_s = t + at_s, lag_s
            arrived = timeline.arrive()
            clock.now_s += 0.5
            timeline.forward((lid,), arrived)
        for at_s, lag_s, lid in ((8.0, 1e-3, 2), (10.0, 2e-5, 1), (12.0, 1e-3, 0)):
            behind_s = lag_s
            meter_backward(timeline, clock, lid, t + at_s)
        clock.now_s = t + 13.0
        timeline.end_step(step, traffic=(30, 40))
    timeline.close()
    dry = [(span["args"]["step"], span["name"]) for span in spans(tmp_path) if span["args"].get("dry")]
    assert dry == [(0, "forward a"), (0, "backward b")]
    steps = [span["args"] for span in spans(tmp_path) if span["track"] == "step"]
    assert [(args["to_device_bytes"], args["to_host_bytes"]) for args in steps] == [(30, 40)] * 2


def test_copies_are_noted_by_another_thread() -> None:
    """None is lost or noted twice while steps end, however many have ended before it is noted."""
    clock = HostClock()
    meter = Meter(clock, [1], trace=OFF)
    meter.backward(0)
    for step in range(3):
        meter.end_step(step)

    def note() -> None:
        for _ in range(2000):
            meter.span("h2d_s", 0, 0, (0.0, 1.0))

    thread = threading.Thread(target=note)
    thread.start()
    total_s, step = 0.0, 3
    while thread.is_alive() or step < 5:
        total_s += sum(times.h2d_s or 0.0 for times in meter.end_step(step))
        step += 1
    thread.join()
    total_s += sum(times.h2d_s or 0.0 for times in meter.end_step(step))
    assert total_s == pytest.approx(2000.0)


@pytest.mark.parametrize("held", [False, True])
def test_visits_are_measured_one_after_the_other(clock: FakeClock, meter: Meter, held: bool) -> None:
    """State is fetched before gradients are complete. What awaits a verdict begins when backward is over."""
    meter_forward(meter, clock, (0,), 0.0, 0.0)
    meter_forward(meter, clock, (1, 2), 1.0, 1.0)
    for lid, at_s in ((2, 4.0), (1, 5.0), (0, 6.0)):
        meter_backward(meter, clock, lid, at_s)
    late_s = 2.5 if held else 0.0
    for lid, began_s, ended_s in ((2, 4.0, 7.0), (1, 4.0, 8.0), (0, 9.5, 12.0)):
        meter.span("visit_s", lid, 0, clock.span(began_s + late_s, ended_s + late_s))
    times = end(meter, clock, 0, 20.0)
    first_s = 3.5 if held else 3.0
    assert [times[lid].visit_s for lid in (2, 1, 0)] == [first_s, 1.0, 4.0]


def test_a_visit_that_was_put_off_begins_after_backward(clock: FakeClock, meter: Meter) -> None:
    """Its state was fetched before, while the link was idle."""
    meter_forward(meter, clock, (0,), 0.0, 0.0)
    meter_forward(meter, clock, (1, 2), 1.0, 1.0)
    for lid, at_s in ((2, 4.0), (1, 5.0), (0, 9.0)):
        meter_backward(meter, clock, lid, at_s)
    for lid, began_s, ended_s in ((1, 4.5, 6.0), (2, 6.0, 11.0)):
        meter.span("visit_s", lid, 0, clock.span(began_s, ended_s))
    times = end(meter, clock, 0, 20.0)
    assert [times[lid].visit_s for lid in (1, 2)] == [1.0, 2.0]


class Event:
    """A CUDA event that the device passes after so many questions, each of which takes a microsecond."""

    takes = 1
    now_s = ANCHOR_S

    def __init__(self, enable_timing: bool = True) -> None:
        self.left = 0

    def record(self, stream: Stream) -> None:
        self.left, self.at_s = self.takes, self.now_s + 1e-6 * self.takes

    def query(self) -> bool:
        self.left -= 1
        Event.now_s += 1e-6
        return self.left <= 0

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3


def test_the_devices_clock_is_found_however_long_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first; later the last comparison will do."""
    monkeypatch.setattr(Event, "now_s", ANCHOR_S)
    monkeypatch.setattr(clock_module.torch.cuda, "Event", Event)
    monkeypatch.setattr(clock_module.torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: Event.now_s))
    found, mark = CudaClock(torch.device("cpu")), Event()
    monkeypatch.setattr(Event, "takes", 10_000)  # 50 times as long as it waits later
    found.anchor()
    mark.record(None)
    assert found.at(mark) == pytest.approx(mark.at_s, abs=1e-5)
    Event.now_s += 2 * ANCHOR_EVERY_S
    began_s = Event.now_s
    found.anchor()
    assert Event.now_s - began_s < ANCHOR_TRIES * 2 * ANCHOR_PATIENCE_S
    assert found.at(mark) == pytest.approx(mark.at_s, abs=1e-5)
