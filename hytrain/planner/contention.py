"""What forward and backward lose while the CPU updates, learned from what a change of owners changes.

A step of short kernels takes as long as the host needs to launch them, and launching takes longer while all other
cores stream through memory. Then a layer that the GPU owns makes the forward of others shorter too, which no layer's
own times show.

    work = undisturbed + drag * beside      work: forward and backward; beside: how much of it the CPU updates meanwhile

    share of backwards that wait for launches ─▶ what drag usually is ─┐
    work and beside under two plans in a row ──▶ what it is here ──────┴─▶ drag, each by how sure it is
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median, median_low, pvariance
from typing import Final

#: Of a step that waits for launches all the time: 0.35 to 0.45 on three machines, an H200 beside 14 updating cores.
TYPICAL_DRAG: Final = 0.4
TYPICAL_SPREAD: Final = 0.2
#: How far from the typical drag a device is that never waits for launches.
LEAST_SPREAD: Final = 0.02
MAX_DRAG: Final = 0.8
#: Steps that tell of the plan before, at least; of the one after it; and of any, at most.
ENOUGH_BEFORE: Final = 2
ENOUGH_AFTER: Final = 4
WINDOW_STEPS: Final = 8
#: Of the work: what a machine changes by from one plan to the next, without the plan's doing.
DRIFT: Final = 0.02
#: Of the work: two plans whose `beside` differs by less say nothing.
CLEAR_CHANGE: Final = 0.05
#: Work that is so much longer or shorter, steps in a row under one plan, is other work: another batch size, say.
OTHER_WORK: Final = 0.3
OTHER_STEPS: Final = 3
#: Steps in a row whose usual share of waiting counts: at least, and at most, so that a busy ten seconds of the host are
#: not taken for how it is.
ENOUGH_SHARES, USUAL_STEPS = 3, 24
#: A device that waits for launches in a smaller share of a step is not the one that waits.
SELDOM: Final = 0.25
#: What is left of older evidence when there is new one, and of the last starved share a step later.
FADING: Final = 0.7
FORGETTING: Final = 0.999
#: Of the work: stalls that make it longer themselves, since the device has nothing ahead of it after each.
MUCH_STALL: Final = 0.1


def beside(work_s: float, cpu_busy_s: float, stall_s: float) -> float:
    """How much of the work the CPU updates meanwhile, in seconds: it does so in every stall, and else beside work."""
    return min(max(cpu_busy_s - stall_s, 0.0), work_s)


@dataclass(slots=True)
class _Window:
    """The last steps under one plan: seconds of work, and of work beside updates."""

    gpu_lids: frozenset[int]
    works: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    besides: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def add(self, work_s: float, beside_s: float) -> None:
        self.works.append(work_s)
        self.besides.append(beside_s)

    def has_other_work(self) -> bool:
        """Whether the last steps were of another kind than those before."""
        return self.has_longer_work() or max(self._last) < (1 - OTHER_WORK) * self._usual_s

    def has_longer_work(self) -> bool:
        return min(self._last) > (1 + OTHER_WORK) * self._usual_s

    @property
    def _last(self) -> list[float]:
        return list(self.works)[-OTHER_STEPS:]

    @property
    def _usual_s(self) -> float:
        return median(list(self.works)[:-OTHER_STEPS] or self._last)


class Contention:
    """One trainer's drag. `observe` each measured step."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._forget_plans()
        self._starved = 0.0
        self._shares: deque[float] = deque(maxlen=USUAL_STEPS)
        self._weight = self._weighted = 0.0  # of the evidence: 1 / variance, drag / variance

    def _forget_plans(self) -> None:
        self._here: _Window | None = None
        self._before: _Window | None = None

    @property
    def drag(self) -> float:
        """The share of the time beside updates that is lost."""
        spread = TYPICAL_SPREAD * self._starved + LEAST_SPREAD
        weight = 1 / spread**2
        drag = (TYPICAL_DRAG * self._starved * weight + self._weighted) / (weight + self._weight)
        return min(max(drag, 0.0), MAX_DRAG)

    def observe(
        self, gpu_lids: frozenset[int], *, work_s: float, stall_s: float, beside_s: float, starved: float
    ) -> None:
        """A step with these layers on the GPU; in the share `starved` of it the device waited for launches.

        One with long stalls says nothing: what follows a stall is launched late, whatever the CPU does.
        """
        if work_s <= 0.0 or stall_s > MUCH_STALL * work_s:
            return
        self._compare(gpu_lids, work_s, beside_s, starved)
        # A plan that ends the waiting must not make its own reason forgotten. What came in one step only is none.
        self._shares.append(min(starved, 1.0))
        usual = median_low(self._shares) if len(self._shares) >= ENOUGH_SHARES else 0.0
        self._starved = max(FORGETTING * self._starved, usual)

    def _compare(self, gpu_lids: frozenset[int], work_s: float, beside_s: float, starved: float) -> None:
        """With the plan before, once this one has had some steps."""
        if self._here is None or self._here.gpu_lids != gpu_lids:
            if self._here is not None and len(self._here.works) >= ENOUGH_BEFORE:
                self._before = self._here
            self._here = _Window(gpu_lids)
        self._here.add(work_s, beside_s)
        if self._here.has_other_work():
            self._begin_anew(self._here, starved)
        elif self._before is not None and len(self._here.works) == ENOUGH_AFTER:
            self._learn(self._before, self._here)
            self._before = None

    def _begin_anew(self, here: _Window, starved: float) -> None:
        """The work is another, or the machine is slower or faster than it was.

        With next to nothing beside the work, that says nothing about drag: the host may launch more slowly for a while.
        Unless the work is longer and the device does not wait for launches: then it has more to do.
        """
        alone = max(here.besides) < CLEAR_CHANGE * min(here.works)
        waits = max([*self._shares, starved][-OTHER_STEPS:]) > SELDOM
        if alone and (waits or not here.has_longer_work()):
            self._forget_plans()
        else:
            self._forget()

    def _learn(self, before: _Window, here: _Window) -> None:
        """What the difference of two plans says, if it is large enough to say something."""
        work_s = max(fmean(before.works), fmean(here.works))
        change_s = fmean(before.besides) - fmean(here.besides)
        if abs(change_s) < CLEAR_CHANGE * work_s:
            return
        drag = (fmean(before.works) - fmean(here.works)) / change_s
        noise = sum(pvariance(window.works) / len(window.works) for window in (before, here))
        weight = change_s**2 / (noise + 2 * (DRIFT * work_s) ** 2)
        self._weight = FADING * self._weight + weight
        self._weighted = FADING * self._weighted + weight * drag

    def check(self) -> None:
        assert 0.0 <= self.drag <= MAX_DRAG and 0.0 <= self._starved <= 1.0
        assert self._weight >= 0.0
