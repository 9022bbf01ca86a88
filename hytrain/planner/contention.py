"""What the parts of a step cost each other.

Crowding: updates on the CPU and state that visits the GPU share the host's memory, visits and other copies the link,
visits and the model's kernels the GPU's memory. What visits cost others is learned from changes of the placement.

Drag: how much time forward and backward lose while the CPU updates, learned from changes of the placement.

A step of short kernels takes as long as the host needs to launch them, and launching takes longer while all other
cores use the memory. Each GPU-owned layer then also shortens the forward of the others, which no layer's own times
show.

    work = undisturbed + drag * beside      work: forward and backward; beside: the part of it in which the CPU updates

    share of backwards that wait for launches ─▶ the usual drag ──────┐
    work and beside under two consecutive plans ──▶ the drag here ────┴─▶ drag, weighted by certainty
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median, median_high, median_low, pvariance
from typing import Final

#: For a step that always waits for launches. Measured: 0.35 to 0.45 on three machines with an H200 and 14 cores.
TYPICAL_DRAG: Final = 0.4
#: No loss is larger. What seems to be had another reason.
MOST_LOST: Final = 0.8
#: By this fraction a machine changes from one plan to the next for other reasons.
DRIFT: Final = 0.02
#: Up to this share, there is as good as none of something, or two are the same. After a stall, the device has no queued
#: work, so steps with longer stalls tell nothing of launches.
LITTLE: Final = 0.05
#: Below this share of a step, the device does not count as waiting for launches.
SELDOM: Final = 0.25
#: So many steps tell something.
ENOUGH_STEPS: Final = 3
#: So many steps under a plan tell what visits cost, and how the CPU's pace differs. The first ones are slower, while
#: the memory of layers that have moved is given back.
SETTLED_STEPS: Final = 8
#: What most of the last steps had is usual. A host may be busy for ten seconds.
USUAL_STEPS: Final = 24
#: So many steps ago counts no more.
REMEMBERED_STEPS: Final = 64
#: If `ENOUGH_STEPS` consecutive steps under one plan have work that differs by this fraction, it is other work, as of
#: another batch size.
OTHER_WORK: Final = 0.3
#: The weight that older evidence keeps when new evidence arrives.
FADING: Final = 0.7
#: What the share of waiting that counts keeps after a step. It ends at once if half of the last steps had none, and the
#: CPU updates beside as much of the work as it did in steps with it.
FORGETTING: Final = 0.999

#: By this fraction updates on the CPU take longer while state visits the GPU, until that is known better, and visits
#: while the CPU updates. Measured on H200 hosts with 14 threads: 5.0 and 4.15 Gparam/s fell to 4.4 and 3.65; visits
#: fell from 4.8 to 3.3. On an H100's host, whose memory updates alone use up, it was 0.3 to 0.4 for the CPU.
CPU_LOSS: Final = 0.14
VISIT_LOSS: Final = 0.45
#: Forward and backward lose this part of the time in which state visits, until that is known better: the GPU's memory
#: and its power are shared. Measured on H200s: 0.024 to 0.03 s where visits took 0.36 s, and 8 % of matrix products
#: beside endless visits. On H100s, whose memory has less bandwidth, it was 0.13.
WORK_LOSS: Final = 0.08


@dataclass(frozen=True, slots=True)
class Crowding:
    """How many times as long as alone updates on the CPU and visits take, and what visits cost forward and backward.

    State visits beside the share `beside_cpu` of the updates, and for `beside_work_s` of forward and backward.
    """

    cpu: float = 1.0
    visits: float = 1.0
    work_lost_s: float = 0.0
    beside_cpu: float = 0.0
    beside_work_s: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        cpu_s: float,
        visits_s: float,
        copies_s: float,
        work_s: float,
        other_s: float = 0.0,
        cpu_loss: float = CPU_LOSS,
        work_loss: float = WORK_LOSS,
    ) -> Crowding:
        """Of the time that each takes alone in a step; `copies_s` of others on the link's busier direction.

        Forward and backward take `work_s`, the rest of the step `other_s`. Copies are spread over all of it, or over
        visits that take longer; they take turns, so they make visits at most twice as long.
        """
        if not visits_s:
            return cls()
        whole_s = max(work_s + other_s, visits_s + copies_s)
        passing = whole_s / max(whole_s - copies_s, whole_s / 2)
        longer = passing * (1 + VISIT_LOSS * min(1.0, cpu_s / (passing * visits_s)))
        beside_cpu = min(1.0, passing * visits_s / cpu_s) if cpu_s else 0.0
        beside_work_s = min(longer * visits_s, work_s)
        return cls(
            cpu=1 + cpu_loss * beside_cpu,
            visits=longer,
            work_lost_s=work_loss * beside_work_s,
            beside_cpu=beside_cpu,
            beside_work_s=beside_work_s,
        )


def beside(work_s: float, cpu_busy_s: float, stall_s: float) -> float:
    """The seconds of the work in which the CPU updates: all its busy time except the stalls."""
    return min(max(cpu_busy_s - stall_s, 0.0), work_s)


@dataclass(slots=True)
class _Window:
    """The last steps under one plan: what it takes, in seconds, and how much of it is beside something else."""

    plan: Hashable
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLED_STEPS))
    besides: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLED_STEPS))
    count: int = 0  # of all its steps

    def add(self, time_s: float, beside: float) -> None:
        self.times_s.append(time_s)
        self.besides.append(beside)
        self.count += 1

    @property
    def noise(self) -> float:
        """The variance of the times' mean."""
        return pvariance(self.times_s) / len(self.times_s)

    def settled(self) -> _Window:
        """With the last `ENOUGH_STEPS` alone."""
        times_s, besides = (deque(list(each)[-ENOUGH_STEPS:]) for each in (self.times_s, self.besides))
        return _Window(self.plan, times_s, besides, self.count)

    def change(self) -> int:
        """1 if the last steps had more work than those before, -1 if they had less, else 0."""
        last = list(self.times_s)[-ENOUGH_STEPS:]
        usual_s = median(list(self.times_s)[:-ENOUGH_STEPS] or last)
        return (min(last) > (1 + OTHER_WORK) * usual_s) - (max(last) < (1 - OTHER_WORK) * usual_s)


class _Evidence:
    """Estimates, weighted by certainty, which is 1 / variance. The weight of older ones fades."""

    def __init__(self) -> None:
        self._weight = self._weighted = 0.0

    def add(self, value: float, weight: float) -> None:
        self._weight = FADING * self._weight + weight
        self._weighted = FADING * self._weighted + weight * value

    def beside(self, usual: float, spread: float) -> float:
        """The mean with a usual value that is known up to this spread."""
        weight = 1 / spread**2
        return (usual * weight + self._weighted) / (weight + self._weight)

    def check(self) -> None:
        assert self._weight >= 0.0


class VisitsCost:
    """The fraction by which something takes longer while state visits. `observe` each step.

    It may become slower at any time, whatever visits. So what is compared is a plan and the last one before it that was
    in effect for as long, or the first one; one of them has clearly more visits. Until there are two, it is the `usual`
    fraction, give or take as much. If they seem to cost less than nothing, or more than `MOST_LOST`, that had another
    reason.
    """

    def __init__(self, usual: float) -> None:
        self._usual, self._evidence = usual, _Evidence()
        self.forget_plans()

    def forget_plans(self) -> None:
        """What it takes has changed, for another reason."""
        self._here: _Window | None = None
        self._before: _Window | None = None
        self._since = 0  # the plan before, in steps

    @property
    def value(self) -> float:
        return min(max(self._evidence.beside(self._usual, self._usual), 0.0), MOST_LOST)

    def observe(self, placed: Hashable, *, beside: float, time_s: float) -> None:
        """What a step with these placements takes. State visits for this share of what it would take alone."""
        self._since += 1
        if self._since > REMEMBERED_STEPS:
            self._before = None
        if self._here is None or self._here.plan != placed:
            if self._here is not None and self._here.count >= (SETTLED_STEPS if self._before else ENOUGH_STEPS):
                self._before, self._since = self._here, 0
            self._here = _Window(placed)
        self._here.add(time_s, beside)
        if self._before is not None and self._here.count == SETTLED_STEPS:
            self._learn(self._before.settled(), self._here.settled())
            self._before = None

    def _learn(self, before: _Window, here: _Window) -> None:
        """From before_s = alone_s * (1 + cost * beside), and the same here."""
        before_s, here_s = median(before.times_s), median(here.times_s)
        if not before_s:
            return
        longer = here_s / before_s
        more = fmean(here.besides) - longer * fmean(before.besides)
        cost = (longer - 1) / more if abs(more) >= LITTLE else inf
        if -2 * self._usual <= cost <= MOST_LOST:
            noise = (here.noise + longer**2 * before.noise) / before_s / before_s  # which has no square if tiny
            self._evidence.add(max(cost, 0.0), more**2 / (noise + 2 * DRIFT**2))

    def check(self) -> None:
        assert 0.0 <= self.value <= MOST_LOST
        self._evidence.check()


class Contention:
    """One trainer's drag. `observe` each measured step."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self, *, only_plans: bool = False) -> None:
        self._here: _Window | None = None
        self._before: _Window | None = None
        if not only_plans:
            self._starved = 0.0  # the share of waiting that counts
            self._then = 0.0  # the share of the work beside which the CPU updated when the device last waited
            self._shares: deque[float] = deque(maxlen=USUAL_STEPS)
            self._evidence = _Evidence()

    @property
    def drag(self) -> float:
        """The share of forward and backward that is lost while the CPU updates."""
        usual = TYPICAL_DRAG * self._starved
        return min(max(self._evidence.beside(usual, usual + DRIFT), 0.0), MOST_LOST)

    def is_unusual(self, gpu_lids: frozenset[int], *, work_s: float, stall_s: float, starved: float) -> bool:
        """Whether the device waited for launches in a step that took longer, as it does not usually: the host is busy.

        Such a step tells nothing of others, unless half of the last ones are like it. Other plans may make the device
        wait, and after a long stall, launches are late anyway.
        """
        here = self._here
        if here is None or here.plan != gpu_lids or stall_s > LITTLE * work_s or starved <= SELDOM:
            return False
        is_known = len(self._shares) >= ENOUGH_STEPS and median_high(self._shares) <= LITTLE
        return is_known and work_s > median(here.times_s)

    def observe(
        self, gpu_lids: frozenset[int], *, work_s: float, stall_s: float, beside_s: float, starved: float
    ) -> None:
        """A step with these layers on the GPU. In the share `starved` of it the device waited for launches.

        Steps with long stalls are ignored: after a stall, launches are late, whatever the CPU does.
        """
        if work_s <= 0.0 or stall_s > LITTLE * work_s:
            return
        if not self.is_unusual(gpu_lids, work_s=work_s, stall_s=stall_s, starved=starved):
            self._compare(gpu_lids, work_s, beside_s, starved)
        # A single starved step does not count. A plan that ends the waiting must not erase its own reason, but if the
        # CPU updates as before, the reason was another: the host was busy.
        self._shares.append(min(starved, 1.0))
        usual = median_low(self._shares) if len(self._shares) >= ENOUGH_STEPS else 0.0
        has_ended = usual <= LITTLE and beside_s >= (self._then - LITTLE) * work_s
        self._starved = max(0.0 if has_ended else FORGETTING * self._starved, usual)
        if starved > SELDOM:
            self._then = beside_s / work_s

    def _compare(self, gpu_lids: frozenset[int], work_s: float, beside_s: float, starved: float) -> None:
        if self._here is None or self._here.plan != gpu_lids:
            if self._here is not None and self._here.count >= ENOUGH_STEPS:
                self._before = self._here
            self._here = _Window(gpu_lids)
        self._here.add(work_s, beside_s)
        if self._here.change():
            self._begin_anew(self._here, starved)
        elif self._before is not None and self._here.count == ENOUGH_STEPS:
            self._learn(self._before, self._here)
            self._before = None

    def _begin_anew(self, here: _Window, starved: float) -> None:
        """The work has changed, or the machine has become slower or faster.

        If the work is longer and the device waits for launches, the drag is kept: the host may launch more slowly for a
        while. So it is if the work is shorter, and the CPU hardly updates meanwhile.
        """
        alone = max(here.besides) < LITTLE * min(here.times_s)
        waits = max([*self._shares, starved][-ENOUGH_STEPS:]) > SELDOM
        self._forget(only_plans=waits if here.change() > 0 else alone)

    def _learn(self, before: _Window, here: _Window) -> None:
        work_s = max(fmean(before.times_s), fmean(here.times_s))
        change_s = fmean(before.besides) - fmean(here.besides)
        if abs(change_s) < LITTLE * work_s:
            return
        drag = (fmean(before.times_s) - fmean(here.times_s)) / change_s
        self._evidence.add(drag, change_s**2 / (before.noise + here.noise + 2 * (DRIFT * work_s) ** 2))

    def check(self) -> None:
        assert 0.0 <= self.drag <= MOST_LOST and 0.0 <= self._starved <= 1.0
        self._evidence.check()
