"""What was measured of steps: trainer and optimizer report at different times, and the book gets both together.

    TrainerReport (of a step, and what was measured of an earlier one) ─┐
    OptimizerReport (what the CPU did in a step) ───────────────────────┴─▶ as if alone ─▶ MeasurementBook

Three kinds of steps are not measured. The first step warms up. Steps in which layers moved, or in which their memory
was prepared or freed, also copy state and keep the driver and the page tables busy. And in some, something else keeps
the host busy. If the number of threads changes in a step, its layers' times count, but the step's own times do not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from hytrain.planner.book import ROLES, MeasurementBook
from hytrain.planner.contention import ENOUGH_STEPS, Crowding
from hytrain.readable import gib
from protocol import messages as m
from protocol.placement import Places

#: Steps that warm up. They are recorded, but the planner does not use their times.
WARM_UP_STEPS: Final = 1
#: Measurements may arrive this many steps late.
OPEN_STEPS: Final = 16


@dataclass(slots=True)
class Step:
    """What is known about one step."""

    duration_s: float | None = None
    places: Places = Places(())
    cpu_busy_s: float = 0.0
    updates: dict[int, float] = field(default_factory=dict)  # the CPU's times by LID, until they are taken in
    is_heeded: bool = False
    moved: bool = False  # layers moved, or their memory was prepared or freed
    threads_changed: bool = False


@dataclass(slots=True)
class Evictions:
    """What has left the GPU at once, with no plan, for the records.

    `nbytes`: of those since training began. The others are of the step that has not ended.
    """

    nbytes: int = 0
    _now: tuple[m.Evicted, ...] = ()

    def add(self, evicted: m.Evicted) -> str:
        """Returns what has left in this step, and what for."""
        self.nbytes += evicted.nbytes
        self._now = (*self._now, evicted)
        return self._told()

    def _told(self) -> str:
        nbytes, seconds = sum(one.nbytes for one in self._now), sum(one.evict_s for one in self._now)
        layers = "1 layer" if len(self._now) == 1 else f"{len(self._now)} layers"
        return f"the state of {layers} has left the GPU, {gib(nbytes)} in {seconds:.2f} s, for {self._now[-1].reason}"

    def take(self, reason: str | None) -> dict[str, Any]:
        """What a record has of the step that ends. `reason`: of a plan that has taken effect in it."""
        found: dict[str, Any] = {"evicted_bytes": self.nbytes} if self.nbytes else {}
        told, seconds = self._told() if self._now else None, sum(one.evict_s for one in self._now)
        if self._now:
            found["evict_s"] = seconds
        if news := "; ".join(each for each in (told, reason) if each is not None):
            found["reason"] = news
        self._now = ()
        return found


class Measured:
    """The last steps. `threads`: those of the CPU, as last reported."""

    def __init__(self, book: MeasurementBook) -> None:
        self._book = book
        self._steps: defaultdict[int, Step] = defaultdict(Step)
        self._first = WARM_UP_STEPS
        self._first_known = -1  # of earlier steps, what the CPU did is not known
        self.threads: int | None = None
        self._new_threads: tuple[int, int] | None = None  # the number commanded, and the step of the command
        self._since_then = 0  # steps that were measured

    def rejoin(self, step: int) -> None:
        """So many steps ended before anything was reported."""
        self._first, self._first_known = step + WARM_UP_STEPS, step

    def is_warm(self, step: int) -> bool:
        return step >= self._first

    def moved(self, step: int) -> None:
        self._steps[step].moved = True

    def cpu_busy_s(self, step: int) -> float | None:
        return self._steps[step].cpu_busy_s if step >= self._first_known else None

    # ------------------------------------------------------------ reports

    def on_trainer(self, report: m.TrainerReport, *, is_late: bool) -> Step | None:
        """A step is over. The one that was measured, if it was a usual one and tells how long such steps are."""
        step = self._steps[report.step]
        step.duration_s, step.places, step.moved = report.step_s, report.places, step.moved or report.moving
        for old in [number for number in self._steps if number <= report.step - OPEN_STEPS]:
            del self._steps[old]
        self._since_then += report.measured is not None
        if report.measured is None or is_late or not self.is_warm(report.measured):
            return None
        measured = self._steps[report.measured]
        return measured if not measured.moved and self._is_usual(report, measured) else None

    def _is_usual(self, report: m.TrainerReport, step: Step) -> bool:
        """Take in the times of the step that was measured. Its weights are back, so the CPU has finished it too.

        The simulation knows how visits and other copies share the link. So copies beside visits, which wait their turn,
        do not tell how fast it is.
        """
        names = [name for name in ROLES if name != "cpu_update_s"]  # the optimizer reports that
        if step.places.visiting:
            names = [name for name in names if name not in ("d2h_s", "h2d_s")]
        times = {
            name: {t.lid: value for t in report.layers if (value := getattr(t, name)) is not None} for name in names
        }
        crowding = self._crowding(step.places)
        times["visit_s"] = {lid: visit_s / crowding.visits for lid, visit_s in times["visit_s"].items()}
        if step.duration_s is None or step.threads_changed:
            self._heed_updates(step)
            self._book.observe_trainer(**times)
            return False
        is_usual = self._book.observe_contention(
            work_s=sum(times["forward_s"].values()) + sum(times["backward_s"].values()),
            stall_s=report.stall_s,
            cpu_busy_s=step.cpu_busy_s,
            starved=report.starved,
            places=step.places,
            crowding=crowding,
            cpu_update_s=step.updates,
        )
        if not is_usual:
            step.updates.clear()
            return False
        self._heed_updates(step)
        self._book.observe_trainer(**times)
        self._book.observe_step(
            step_s=step.duration_s,
            stall_s=report.stall_s,
            exposed_s=report.exposed_s,
            gpu_lids=step.places.gpu,
            middle_s=report.middle_s,
        )
        return True

    def on_optimizer(self, report: m.OptimizerReport) -> None:
        """Take in what the CPU did in a step. Ignore a report from before the last change of threads."""
        if self._new_threads is not None:
            threads, since = self._new_threads
            if report.threads != threads and report.step <= since + 1:
                return
        self.threads = report.threads
        step = self._steps[report.step]
        step.cpu_busy_s += report.busy_s
        step.updates |= {update.lid: update.update_s for update in report.updates}
        if step.is_heeded:
            self._heed_updates(step)

    def _heed_updates(self, step: Step) -> None:
        """Take in the CPU's times as they would be without visits beside them: now, and those that come later."""
        step.is_heeded = True
        if step.updates:
            self._new_threads = None
        longer = self._crowding(step.places).cpu
        times_s, step.updates = {lid: update_s / longer for lid, update_s in step.updates.items()}, {}
        self._book.observe_optimizer(cpu_update_s=times_s)

    def _crowding(self, places: Places) -> Crowding:
        """What the CPU's updates and visits cost each other, as far as is known of the layers' times."""
        profile = self._book.profile() if places.visiting else None
        return Crowding() if profile is None else profile.crowding(places)

    # ------------------------------------------------------------ threads

    def change_threads(self, threads: int, step: int) -> bool:
        """Scale the CPU's times at once by the speedup that this many threads usually bring, then measure again.

        Returns whether steps are others from now on.
        """
        before = self._new_threads[0] if self._new_threads is not None else self.threads
        self._new_threads, self._since_then = (threads, step), 0
        self._steps[step + 1].threads_changed = True
        if before is None or before == threads:
            return False
        self._book.cpu_changed(threads / before)
        for known in self._steps.values():
            known.updates.clear()
            known.threads_changed = True
        return True

    def awaits_cpu_times(self, step: int) -> bool:
        """Whether threads were changed so recently that new CPU times should arrive before the next plan."""
        if self._new_threads is None or step > self._new_threads[1] + OPEN_STEPS:
            return False
        return self._since_then < ENOUGH_STEPS

    def check(self) -> None:
        self._book.check()
        assert len(self._steps) <= 2 * OPEN_STEPS, "old steps are forgotten"
