"""Measures the times of each layer in the trainer, without waiting for the device.

Hooks leave marks: CUDA events on the stream that does the work, or readings of the host's clock on device "cpu". A
later step converts them to seconds, once the device has passed them all.

    pre-hook  mark ──(stall)── go ──(forward)── next mark …          backward: one mark as each layer completes

    FSDP2     mark ─(waits for updates)─ mark ─ all-gather ─┐        on the stream that reads the shards
              mark ─(thread waits)─ mark … mark ─(stall)─(exposed all-gather)─ go ─(forward)─ …      where modules are

    marks ─ passed? ─▶ intervals ─┬─▶ LayerTimes, for the coordinator
                                  └─▶ spans of the timeline, on the monotonic clock (of steps that are drawn)

The timeline's spans of a step follow each other, from the end of the step before to its own:

    step() │ between steps │ forward, stall … │ micro-batches │ backward, update … │ after backward │ step()

A `Meter` owns the marks that it is given, and returns them to the clock for reuse.

Where steps follow each other faster than `MEASURE_EVERY_S`, the thread that launches has no time to spare: only some of
them are measured. The others leave no marks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hytrain.memory.clock import Clock, Mark, Span, Stream
from hytrain.run.trace import NO_STEP, TraceWriter
from hytrain.step.marks import NoMarks, StepMarks, Waited
from protocol.messages import LayerTimes

#: A step's marks take time of the launching thread.
MEASURE_EVERY_S: Final = 0.05
#: The number of steps whose marks may be pending. The measurement of an older step is given up.
MAX_OPEN_STEPS: Final = 8
#: A new anchor shifts the device's times by less than this.
MAX_JUMP_S: Final = 1e-4
#: A shorter wait, or rest of a step, is not drawn: two marks with no work between them are that far apart.
MIN_STALL_S: Final = 2e-5
#: A device that passes a mark so soon after it was left has waited for it: it had no other work.
DRY_S: Final = 5e-5
#: Field of `LayerTimes`, or of the report -> track and name in the timeline.
TRACKS: Final = {
    "forward_s": ("compute", "forward"),
    "stall_s": ("compute", "stall"),
    "exposed_s": ("compute", "waits for all-gather"),
    "backward_s": ("compute", "backward"),
    "gpu_update_s": ("compute", "update"),
    "visit_s": ("visits", "visit"),
    "d2h_s": ("D2H", "D2H"),
    "h2d_s": ("H2D", "H2D"),
    "again_s": ("H2D", "H2D"),
    "gather_s": ("all-gather", "all-gather"),
    "outside_s": ("compute", "between steps"),
    "middle_s": ("compute", "micro-batches"),
    "after_s": ("compute", "after backward"),
    "boundary_s": ("compute", "step()"),
}


class Interval(NamedTuple):
    """One activity of layers `lids`. `kind` names a field of `LayerTimes`; times count from the step's first mark."""

    kind: str
    lids: tuple[int, ...]
    step: int
    began_s: float
    ended_s: float

    @property
    def duration_s(self) -> float:
        return max(self.ended_s - self.began_s, 0.0)


class Meter:
    """Collects marks, and converts them to `LayerTimes` and, if `trace` is on, to a timeline, at least one step later.

    A pipeline's stage (`is_stage`) makes several forwards before a backward: the first one of each module is measured,
    since it is the one that waits for weights.
    """

    def __init__(
        self,
        clock: Clock,
        numels: list[int],
        *,
        trace: TraceWriter,
        is_stage: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self._is_stage = is_stage
        self._entered: set[int] = set()  # layers of a stage, in this step
        self._clock, self._numels, self._trace, self._names = clock, numels, trace, names
        self._marks: Clock | NoMarks = clock  # of this step
        self._chosen_s = -math.inf  # when the last one was chosen that is measured
        self._skipped: deque[int] = deque(maxlen=MAX_OPEN_STEPS)  # the last ones that were not
        self._open: deque[StepMarks] = deque(maxlen=MAX_OPEN_STEPS)
        self._now = StepMarks(0)
        self._turning = threading.Lock()  # another thread reports copies
        self._drawn_until: dict[str, float] = {}
        self.stall_s = self.exposed_s = self.middle_s = self.starved = 0.0
        self.gather_s: float | None = None  # with all that it waits for other ranks; None without all-gathers
        self.measured: int | None = None  # the step that the last times are from
        self.times: tuple[LayerTimes, ...] = ()  # of the last step that was measured
        self._draws_now = trace.draws(0)  # this step
        if trace.is_on:
            clock.anchor()

    @property
    def draws(self) -> bool:
        """Whether there are steps that are drawn, now or later."""
        return self._trace.is_on

    def draw(self, steps: range) -> None:
        """Draw these steps, the next one or later ones, and no others."""
        self._trace.begin(steps)
        if steps:
            self._clock.anchor()
            self._marks = self._clock  # between two steps
        self._draws_now = self._trace.draws(self._now.step)
        if self._draws_now:
            self._now.began = self._mark_instead_of(self._now.began)

    def evicted(self, lid: int, nbytes: int, began_s: float, ended_s: float) -> None:
        """A layer's state has left the device between these times."""
        if self._trace.draws(self._now.step):
            name = f"evict {self._names[lid] if self._names else lid}"
            self._trace.span("planes", name, began_s, ended_s, lid=lid, step=self._now.step, bytes=nbytes)

    def enter_boundary(self) -> None:
        """`step()` begins."""
        if self._draws_now:
            self._now.entered = self._mark_instead_of(self._now.entered)

    def leave_boundary(self) -> None:
        """`step()` is over; the next step's marks have begun."""
        if self._draws_now:
            self._now.left = self._mark_instead_of(self._now.left)

    def _mark_instead_of(self, before: Mark) -> Mark:
        if before is not None:
            self._clock.recycle([before])
        return self._clock.mark()

    def mark(self, stream: Stream = None) -> Mark:
        """Leave a mark, on the current stream unless another one is given; None in a step that is not measured."""
        return self._marks.mark() if stream is None else self._marks.mark_on(stream)

    def arrive(self) -> Mark:
        """A module is about to run, or a layer's backward is over: leave a mark, before anything waits."""
        mark = self._marks.mark()
        if self._draws_now:
            self._now.launched_s[mark] = time.monotonic()
        return mark

    def forward(self, lids: tuple[int, ...], arrived: Mark, waited: Waited | None = None) -> None:
        """The module that has `arrived`, and reads layers `lids`, continues.

        It has waited for their updates, or for an all-gather that `waited` for them, perhaps earlier and elsewhere.
        """
        if self._is_stage:
            if lids[0] in self._entered:
                self._marks.recycle([arrived, *(waited.marks() if waited else ())])
                return
            self._entered.add(lids[0])
        if waited is not None and None not in waited.marks():  # or the all-gather was in a step without marks
            self._now.waited[len(self._now.forward)] = waited
        self._now.forward.append((lids, (arrived, self._marks.mark())))

    def restart(self) -> None:
        """A forward begins. Discard the one before if no backward followed it."""
        if not self._now.backward and not self._is_stage:
            now = self._now
            spans = (mark for _, span in chain(now.forward, now.gathers) for mark in span)
            waits = (mark for waited in now.waited.values() for mark in waited.marks())
            turns = now.turns  # of a backward whose gradients were dropped
            self._marks.recycle(chain(spans, waits, turns, now.of_fetched()))
            for each in (now.gathers, now.fetched, now.waited, now.forward, now.turns):
                each.clear()

    def gather(self, lids: tuple[int, ...]) -> Callable[[], None]:
        """The shards of these layers are read, and all ranks' are gathered. Returns what ends the measurement."""
        gathers, began = self._now.gathers, self._marks.mark()
        return lambda: gathers.append((lids, (began, self._marks.mark())))

    def fetched(self, lid: int, arrived: Mark, waited: Waited | None = None) -> None:
        """Backward continues after a layer, for whose offloaded weights or visit it may have waited since `arrived`.

        Or it has waited for an all-gather, which `waited` for the weights.
        """
        waited = None if waited is None or None in waited.marks() else waited
        self._now.fetched.append((lid, (arrived, self._marks.mark()), waited))

    def turn(self) -> None:
        """One of several backwards begins. Only the time before the first and after the last is measured."""
        self.drop_backward()
        self._now.turns.append(self._marks.mark())

    def drop_backward(self) -> None:
        """What may have been the step's last backward was not."""
        self._marks.recycle(mark for _, mark in self._now.backward)
        self._now.backward.clear()

    def backward(self, lid: int) -> None:
        """A layer's gradients are complete, unless they were before its update began."""
        now = self._now
        if now.held is not None:
            return
        before = now.backward[-1][1] if now.backward else now.forward[-1][1][1] if now.forward else None
        if self._marks.runs_ahead and before is not None:
            now.starved += self._clock.passed(before)
        now.backward.append((lid, self.arrive()))

    def begin_held(self) -> None:
        """All gradients have come before, and updates begin only now."""
        if self._now.backward:
            self._now.held = self._now.backward[-1][1], self._marks.mark()

    def forget(self, span: Span) -> None:
        """It is not part of any step's measurement."""
        self._marks.recycle(span)

    def span(self, kind: str, lid: int | tuple[int, ...], step: int, span: Span) -> None:
        """Add a copy or device update of layers. The weights of `step` may come back after the next step has begun."""
        with self._turning:
            self._now.spans.append((kind, lid if isinstance(lid, tuple) else (lid,), step, span))

    def end_step(self, step: int, number: int = 0, traffic: tuple[int, int] = (0, 0)) -> tuple[LayerTimes, ...]:
        """End this step's marks. Returns the times of the oldest open step, if the device has passed it.

        `number` is the step's number for the user, `traffic` the bytes that were copied to the device and to the host.
        """
        self._now.end, self._now.number, self._now.traffic = self._marks.mark(), number, traffic
        self._entered.clear()
        has_drawn, draws = self._draws_now, self._trace.draws(step + 1)
        self._draws_now = draws
        with self._turning:
            self._now = StepMarks(step + 1, spans=self._end_marks(), began=self._clock.mark() if draws else None)
            self._choose(draws or has_drawn)  # the step after has weights of it
        if not self._open or not self._passed(self._open[0]):
            self.measured = None
            return ()
        marks = self._open.popleft()
        self.measured = marks.step
        intervals = self._intervals(marks)
        if self._trace.is_on:
            self._draw(marks, intervals)
            self._trace.flush()
            self._clock.anchor()
            if marks.step >= self._trace.steps.stop:  # the last one's weights were back in this step
                self._trace.begin(NO_STEP)
        in_middle = [(marks.turns[0], marks.turns[-1])] if marks.turns else []
        in_middle += [marks.held] if marks.held is not None else []
        self.middle_s = sum([max(self._clock.seconds(span), 0.0) for span in in_middle])  # streams may be unjoined
        self.starved = marks.starved / len(marks.backward) if marks.backward else 0.0
        gathered_s = [self._clock.seconds(span) for _, span in marks.gathers]
        self.gather_s = sum(gathered_s) if gathered_s else None
        self._clock.recycle(marks.marks())
        self.times = self._times(intervals)
        return self.times

    def _end_marks(self) -> list[tuple[str, tuple[int, ...], int, Span]]:
        """Keep the step's marks if it was measured. If not, return the spans that belong to steps that were."""
        now, is_measured = self._now, self._marks is self._clock
        if not is_measured:
            self._skipped.append(now.step)
        spans, skipped = now.spans, self._skipped
        now.spans = [span for span in spans if span[2] not in skipped]
        self._marks.recycle([mark for *_, step, span in spans if step in skipped for mark in span])
        if is_measured:
            self._open.append(now)
            return []
        later, now.spans = now.spans, []
        self._marks.recycle(now.marks())
        return later

    def _choose(self, draws: bool) -> None:
        """Whether the step that begins is measured."""
        now_s = time.monotonic()
        is_measured = draws or not self._clock.runs_ahead or now_s - self._chosen_s >= MEASURE_EVERY_S
        self._marks = self._clock if is_measured else NoMarks(self._clock)
        if is_measured:
            self._chosen_s = now_s

    def close(self) -> None:
        """Draw the remaining steps that the device has passed."""
        if self._trace.is_on:
            for marks in (*self._open, *([self._now] if self._marks is self._clock else [])):
                if self._passed(marks):
                    self._draw(marks, self._intervals(marks))
            self._trace.close()

    def _passed(self, marks: StepMarks) -> bool:
        """Whether all of the step's work is done. Its copies may end after the step itself."""
        return all(map(self._clock.passed, reversed(list(marks.marks()))))

    def _intervals(self, marks: StepMarks) -> list[Interval]:
        """The intervals between marks. A stall at a module's entry is attributed to the module's first layer."""
        seconds, first = self._clock.seconds, next(marks.marks(), None)
        at_s = {mark: seconds((first, mark)) for mark in marks.marks()}

        def interval(kind: str, lids: tuple[int, ...], began: Mark, ended: Mark, step: int = marks.step) -> Interval:
            return Interval(kind, lids, step, at_s[began], at_s[ended])

        found: list[Interval] = []
        noticed: list[Interval] = []  # while the thread waited, in the forward of whichever module was under way
        for index, (lids, span) in enumerate(marks.forward):
            whole = stall = interval("stall_s", lids[:1], *span)
            if index in marks.waited:  # a stall is the part in which the all-gather waits, too
                noticed.append(interval("stall_s", lids[:1], *marks.waited[index].on_modules_stream))
                waited = interval("stall_s", lids[:1], *marks.waited[index].on_its_stream)
                stall = _within(whole, waited)
                found += _without(whole._replace(kind="exposed_s"), [stall])
            found.append(stall)
        found += noticed
        noticed.sort(key=_BEGAN)
        for (lids, (_, went)), (_, (arrived, _)) in pairwise(marks.forward):
            found += _without(interval("forward_s", lids, went, arrived), noticed)
        if marks.forward and marks.backward:
            (lids, (_, went)), (lid, done) = marks.forward[-1], marks.backward[0]
            found += _turn(interval("forward_s", lids, went, marks.turns[0] if marks.turns else done))
            found[-1] = found[-1]._replace(lids=(lid,))
            if marks.turns:
                found.append(interval("backward_s", (lid,), marks.turns[-1], done))
        # A device update follows its layer's mark on the same stream. Without overlap, all follow the last mark.
        wholes = [interval(kind, lids, *span, step) for kind, lids, step, span in marks.spans]
        spans = [part for whole in wholes for part in _parts(whole, self._numels)]
        updates = [one for one in spans if one.kind == "gpu_update_s"]
        updated_s = {update.lids[0]: update.ended_s for update in updates}
        waits = [interval("stall_s", (lid,), *span) for lid, span, _ in marks.fetched]
        for index, (lid, _, waited_for) in enumerate(marks.fetched):
            if waited_for is not None:
                waits[index] = _within(waits[index], interval("stall_s", (lid,), *waited_for.on_its_stream))
        if marks.turns:
            began_s = at_s[marks.turns[-1]]
            waits = [wait for wait in waits if wait.began_s >= began_s]
        coming = deque(sorted(waits, key=_BEGAN))
        for (before, mark), (lid, ended) in pairwise(marks.backward):
            whole = interval("backward_s", (lid,), mark, ended)
            after_s = updated_s.get(before, whole.began_s)
            while coming and coming[0].ended_s <= whole.began_s:
                coming.popleft()
            found += _without(whole._replace(began_s=after_s) if after_s <= whole.ended_s else whole, coming)
        found += waits
        found += [interval("gather_s", lids, *span) for lids, span in marks.gathers if lids]
        return found + spans

    def _times(self, intervals: list[Interval]) -> tuple[LayerTimes, ...]:
        """Times by layer. A module's time is divided among its layers in proportion to their size."""
        times: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        waits = {"stall_s": 0.0, "exposed_s": 0.0}
        others = [one for one in intervals if one.kind != "visit_s"]
        for kind, lids, _, began_s, ended_s in [*others, *_visits(intervals)]:
            duration_s = max(ended_s - began_s, 0.0)
            if kind in waits:
                waits[kind] += duration_s
            if kind not in ("gather_s", "exposed_s", "again_s"):
                total = self._numels[lids[0]] if len(lids) == 1 else sum([self._numels[lid] for lid in lids])
                for lid in lids:
                    times[lid][kind] += duration_s * self._numels[lid] / total
        self.stall_s, self.exposed_s = waits.values()
        return tuple(LayerTimes(lid=lid, **fields) for lid, fields in sorted(times.items()))

    def _rest(self, marks: StepMarks, drawn: list[Interval]) -> list[Interval]:
        """What a step that is drawn consists of besides the intervals that are `drawn`."""
        first, backward = next(marks.marks(), None), [mark for _, mark in marks.backward]
        entries = [span[0] for _, span in marks.forward]
        worked, turned = next(chain(entries, marks.turns, backward), None), next(chain(marks.turns, backward), None)
        between = [("boundary_s", marks.began, marks.left), ("outside_s", marks.left, worked or marks.entered)]
        between += [("forward_s", entries[0], turned)] if entries else []
        between += [("middle_s", marks.turns[0], marks.turns[-1])] if marks.turns else []
        between += (
            [("backward_s", backward[0], backward[-1]), ("after_s", backward[-1], marks.entered)] if backward else []
        )
        between += [("boundary_s", marks.entered, marks.end)]
        holes = sorted(
            [one for one in drawn if TRACKS[one.kind][0] == "compute" and one.step == marks.step], key=_BEGAN
        )
        found: list[Interval] = []
        for kind, began, ended in between:
            if began is not None and ended is not None:
                began_s, ended_s = self._clock.seconds((first, began)), self._clock.seconds((first, ended))
                found += _without(Interval(kind, (), marks.step, began_s, ended_s), holes)
        return [one for one in found if one.duration_s >= MIN_STALL_S]

    def _draw(self, marks: StepMarks, intervals: list[Interval]) -> None:
        first = next(marks.marks(), None)
        if first is None:
            return
        zero_s = self._clock.at(first)
        waits = ("stall_s", "exposed_s")
        intervals = [one for one in intervals if one.kind not in waits or one.duration_s >= MIN_STALL_S]
        if marks.end is not None and self._trace.draws(marks.step):
            began_s = zero_s if marks.began is None else self._clock.at(marks.began)
            facts: dict[str, Any] = {"step": marks.step, "number": marks.number}
            facts |= zip(("to_device_bytes", "to_host_bytes"), marks.traffic, strict=True)
            self._draw_span("step", f"step {marks.step}", began_s, self._clock.at(marks.end), **facts)
            intervals = intervals + self._rest(marks, intervals)
        dry_s = _ran_dry(self._clock, marks, first)
        for kind, lids, step, began_s, ended_s in sorted(intervals, key=lambda interval: interval.ended_s):
            if not self._trace.draws(step):
                continue
            track, what = TRACKS[kind]
            facts = {"kind": what, "step": step}
            name = what
            for lid in lids[:1]:
                facts["lid"] = lid
                name = f"{what} {self._names[lid] if self._names else lid}"
            if kind in ("forward_s", "backward_s") and ended_s in dry_s:
                facts["dry"] = True
            self._draw_span(track, name, zero_s + began_s, zero_s + ended_s, **facts)

    def _draw_span(self, track: str, name: str, began_s: float, ended_s: float, **args: Any) -> None:
        """Draw a span. It must not overlap the one before only because the clock got a new anchor in between."""
        before_s = self._drawn_until.get(track, began_s)
        if before_s - began_s < MAX_JUMP_S:
            began_s = max(began_s, before_s)
        self._drawn_until[track] = max(ended_s, began_s)
        self._trace.span(track, name, began_s, ended_s, **args)


_BEGAN: Final = attrgetter("began_s")


def _ran_dry(clock: Clock, marks: StepMarks, first: Mark) -> set[float]:
    """The ends of those forwards and backwards, from the first mark on, at which the device waited for launches."""
    if not clock.runs_ahead:
        return set()
    ends = [span[0] for _, span in marks.forward] + [mark for _, mark in marks.backward]
    launched_s = marks.launched_s
    dry = [mark for mark in ends if mark in launched_s and clock.at(mark) - launched_s[mark] < DRY_S]
    return {clock.seconds((first, mark)) for mark in dry}


def _parts(whole: Interval, numels: Sequence[int]) -> list[Interval]:
    """One launch updates several layers in their order: each one's part of it, by its size."""
    if whole.kind != "gpu_update_s" or len(whole.lids) == 1:
        return [whole]
    ends = list(accumulate([numels[lid] for lid in whole.lids], initial=0))
    at_s = [whole.began_s + whole.duration_s * end / ends[-1] for end in ends]
    return [
        whole._replace(lids=(lid,), began_s=began_s, ended_s=ended_s)
        for lid, (began_s, ended_s) in zip(whole.lids, pairwise(at_s), strict=True)
    ]


def _within(whole: Interval, other: Interval) -> Interval:
    """The part of an interval that is in another one, too."""
    began_s = min(max(whole.began_s, other.began_s), whole.ended_s)
    return whole._replace(began_s=began_s, ended_s=max(began_s, min(whole.ended_s, other.ended_s)))


def _without(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval outside of others, in at least one part. They are given as they begin."""
    parts, began_s = [], whole.began_s
    for hole in holes:
        if hole.began_s >= whole.ended_s:
            break
        if hole.ended_s <= hole.began_s:
            continue
        if began_s < hole.began_s:
            parts.append(whole._replace(began_s=began_s, ended_s=hole.began_s))
        began_s = max(began_s, hole.ended_s)
    if began_s == whole.began_s <= whole.ended_s:
        return [whole]
    return [*parts, whole._replace(began_s=min(began_s, whole.ended_s))]


def _visits(intervals: list[Interval]) -> Iterator[Interval]:
    """Each layer's part of the time in which state visits: one after the other, once gradients are complete.

    The state of several layers is on its way at the same time. What awaits a verdict begins when backward is over, and
    so does what was put off: it comes after others whose gradients were complete later.
    """
    ready_s = {one.lids[0]: one.ended_s for one in intervals if one.kind == "backward_s"}
    over_s = max(ready_s.values(), default=0.0)
    free_s = latest_s = 0.0
    for visit in sorted((one for one in intervals if one.kind == "visit_s"), key=lambda one: one.ended_s):
        begins_s = ready_s.get(visit.lids[0], visit.began_s)
        if visit.began_s >= over_s or begins_s < latest_s:
            begins_s = over_s
        latest_s = max(latest_s, begins_s)
        yield visit._replace(began_s=max(free_s, begins_s))
        free_s = visit.ended_s


def _turn(whole: Interval) -> list[Interval]:
    """Split the time from the last module's entry to the first complete gradient: forward to backward is 1 to 2."""
    turned_s = whole.began_s + whole.duration_s / 3
    return [whole._replace(ended_s=turned_s), whole._replace(kind="backward_s", began_s=turned_s)]
