"""Smoothed measurements. The coordinator feeds them with reports and asks for a profile when it plans.

Owns the estimate of each layer's times, and when to give it up.

    calibrate: seconds per parameter ──▶ Rates ────────────────────┐ until a role was measured
    {lid: seconds} of one step ──▶ one Ewma per role and layer ────┼──▶ Profile
                                    outlier?      no longer        │
                                    set aside     measured? scaled │
                                                  like the others  │
    step time, stalls ──▶ what the layers' times do not explain ───┤
    what the CPU's updates slow down (contention.py) ──────────────┘
    the CPU's times of one step relative to the usual ──▶ how much slower it is at times
    cpu_changed ──▶ the CPU's times scaled, and replaced by the next ones
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from statistics import median
from typing import Final

from hytrain.planner.contention import (
    CPU_LOSS,
    LITTLE,
    REMEMBERED_STEPS,
    SETTLED_STEPS,
    USUAL_STEPS,
    WORK_LOSS,
    Contention,
    Crowding,
    VisitsCost,
    beside,
)
from hytrain.planner.profile import SAME_SPEED, USUAL_SLACK, LayerFacts, LayerProfile, Profile
from protocol.placement import Places

WORK: Final = ("forward_s", "backward_s")
ROLES: Final = (*WORK, "d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s", "visit_s")
#: The CPU's update rate is proportional to this power of its threads: they share the memory's bandwidth, so twice the
#: threads give 1.5 times the rate. Measured on 16 cores: 1.44 times from 8 to 16 threads, up to 1.8 times below that.
THREADS_EXPONENT: Final = 0.6
#: The share of the last steps that may be slower than the CPU's slow pace, or have shorter exposed all-gathers than
#: usual; and what that pace is made longer by.
SLOW_SHARE: Final = 0.1
LEAST_SLACK: Final = 0.03
#: Where each third of steps, by their paces, has its middle.
THIRDS: Final = (1 / 6, 1 / 2, 5 / 6)
#: No measured time is longer, so that sums of times are numbers.
LONGEST_S: Final = 1e9


@dataclass(slots=True, kw_only=True)
class Ewma:
    """A smoothed time. It ignores single outliers and follows a new level.

    The first samples are averaged; later ones count with `weight`. `spread` follows their mean distance from `value`.
    A sample further away than four spreads and 30 % of the value is set aside. Three such samples in a row on the same
    side are a new level, such as another job on the machine: the value jumps to their median. Fewer are outliers: they
    are dropped, but widen the spread a little, so they are accepted if they are frequent (one in four).
    """

    weight: float = 0.2  # of a new sample
    value: float | None = None
    count: int = 0  # samples behind the value
    spread: float = 0.0
    suspects: list[float] = field(default_factory=list)

    def add(self, sample: float) -> None:
        """Add a time in seconds. ValueError if it is negative or longer than any."""
        if not 0 <= sample <= LONGEST_S:
            raise ValueError(f"a measured time is from 0 to {LONGEST_S:.0e} s, got {sample!r}")
        if self.value is None or not self.count:
            self.value, self.count = sample, 1
            return
        offset = sample - self.value
        band = max(4 * self.spread, 0.3 * self.value)
        inside = abs(offset) <= band
        if inside or (self.suspects and (self.suspects[0] > self.value) != (offset > 0)):
            self.spread += self.weight * len(self.suspects) * (band - self.spread)
            self.suspects.clear()
        if inside:
            self.count += 1
            weight = max(self.weight, 1 / self.count)
            self.value += weight * offset
            self.spread += weight * (abs(offset) - self.spread)
            return
        self.suspects.append(sample)
        if len(self.suspects) == 3:
            self.value, self.count = median(self.suspects), 3
            self.spread = (max(self.suspects) - min(self.suspects)) / 2
            self.suspects.clear()

    def scale(self, factor: float) -> None:
        if self.value is not None:
            self.value *= factor
        self.spread *= factor
        self.suspects.clear()

    def check(self) -> None:
        assert self.value is None or 0 <= self.value < inf
        assert 0 <= self.spread < inf
        assert len(self.suspects) < 3


@dataclass(slots=True)
class _Role:
    """One kind of time, by LID. A round is the reports of about one step. It ends when a layer is reported again.

    A round of few layers goes on: there may be several reports of a step.
    """

    means: dict[int, Ewma] = field(default_factory=dict)
    before: dict[int, float] = field(default_factory=dict)  # the values at the start of the round
    seen: set[int] = field(default_factory=set)  # reported in this round

    @property
    def values(self) -> dict[int, float]:
        return {lid: mean.value for lid, mean in self.means.items() if mean.value is not None}

    def observe(self, times: Mapping[int, float]) -> None:
        if not self.seen.isdisjoint(times):
            self._end_round()
        for lid, time_s in times.items():
            self.means.setdefault(lid, Ewma()).add(time_s)
        self.seen.update(times)

    def _end_round(self) -> None:
        """Scale the layers that were not measured like those that were.

        Otherwise layers that the GPU took over while the CPU was slow would look slow on the CPU for ever. The middle
        one of the measured changes counts, since single layers may have waited for others. Few layers say nothing.
        """
        values = self.values
        if sum(values[lid] for lid in self.seen) < LITTLE * sum(values.values()):
            return  # the round goes on
        known = [lid for lid in self.seen if self.before.get(lid) and values[lid]]
        if known and sum(self.before[lid] for lid in known) >= LITTLE * sum(self.before.values()):
            change = median(values[lid] / self.before[lid] for lid in known)
            for lid in self.means.keys() - self.seen:
                self.means[lid].scale(change)
        self.before, self.seen = self.values, set()

    def scale(self, factor: float, *, guessed: bool = False) -> None:
        """Multiply all times by `factor`. If it is `guessed`, the next samples replace them."""
        for mean in self.means.values():
            mean.scale(factor)
            if guessed:
                mean.count = 0
        self.before, self.seen = self.values, set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per parameter in each role, until the role is measured.

    The defaults are those of a PCIe 5 GPU with bf16 copies and 16 cores. If the "GPU" is a CPU, `gpu_update_s` is the
    CPU's.
    """

    d2h_s: float = 2 / 50e9
    h2d_s: float = 2 / 50e9
    cpu_update_s: float = 1 / 4e9
    gpu_update_s: float = 1 / 100e9


class MeasurementBook:
    """All measurements so far, by role and layer.

    A layer that was never measured in a role (the CPU's update of a GPU-owned layer) gets the time per parameter of
    those that were, or else that of `rates`. Forward and backward are timed for all layers, so a layer without such a
    time has no work of its own (a piece of a split embedding, a module that did not run) and counts as 0.
    """

    def __init__(
        self,
        layers: Iterable[LayerFacts],
        *,
        rates: Rates | None = None,
        awaits_verdict: bool = False,
        in_step: bool = False,
        ranks: int = 1,
    ) -> None:
        self._awaits_verdict, self._in_step, self._ranks = awaits_verdict, in_step, ranks
        self._layers: Sequence[LayerFacts] = tuple(layers)
        self._facts = {layer.lid: asdict(layer) for layer in self._layers}
        self._position_of = {layer.lid: layer.position for layer in self._layers}
        self._rates = rates or Rates()
        self._roles = {role: _Role() for role in ROLES}
        self._busy_s = Ewma()  # a step without its stalls, exposed all-gathers, its middle and the GPU's updates
        self._exposed_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._middle_s = Ewma()
        self._updates: deque[dict[int, float]] = deque(maxlen=REMEMBERED_STEPS)  # the CPU's times of the last steps
        self._contention = Contention()
        self._drag = 0.0  # the drag that the means are corrected for
        # What visits cost the CPU's updates and the GPU's work, and the costs that their means are corrected for.
        self._for_cpu, self._for_work = VisitsCost(CPU_LOSS), VisitsCost(WORK_LOSS)
        self._cpu_loss, self._work_loss = CPU_LOSS, WORK_LOSS
        self._lost_s = 0.0  # what the observed step's forward and backward lost to the CPU's updates
        self._kept = 1.0  # the share of its forward and backward without that
        self.activation_bytes = 0  # as last reported

    def begin_updates(self, *, in_step: bool, layers: Iterable[LayerFacts]) -> None:
        """Updates begin in `step()` from now on, or in backward, and the same layers take other memory for that."""
        self._in_step, self._layers = in_step, tuple(layers)
        self._busy_s, self._middle_s = Ewma(), Ewma()  # the loop's time before `step()` was in the other one
        self._facts = {layer.lid: asdict(layer) for layer in self._layers}

    def calibrate(self, **rates_s: float | None) -> None:
        """Replace assumed `Rates` by measured ones. None changes nothing."""
        measured = {role: rate_s for role, rate_s in rates_s.items() if rate_s is not None}
        self._rates = replace(self._rates, **measured)

    def cpu_changed(self, ratio: float) -> None:
        """The CPU works with `ratio` times as many threads from now on.

        Its update times are scaled by the usual effect (`THREADS_EXPONENT`), also those of GPU-owned layers, and the
        next samples replace them.
        """
        factor = ratio**-THREADS_EXPONENT
        self._updates.clear()
        self._for_cpu.forget_plans()
        self._roles["cpu_update_s"].scale(factor, guessed=True)
        self._rates = replace(self._rates, cpu_update_s=self._rates.cpu_update_s * factor)

    def observe_trainer(self, **times_s: Mapping[int, float]) -> None:
        """One step's times by role and LID. ValueError for an unknown layer or an impossible time."""
        for role, times in times_s.items():
            kept = self._kept if role in WORK else 1.0
            self._observe(role, {lid: time_s * kept for lid, time_s in times.items()})

    def observe_contention(
        self,
        *,
        work_s: float,
        stall_s: float,
        cpu_busy_s: float,
        starved: float,
        places: Places,
        crowding: Crowding,
        cpu_update_s: Mapping[int, float],
    ) -> bool:
        """A step's forward and backward together, its stalls and the CPU's updates; call it before the other three.

        Returns whether the step tells of others: if not, they should not know of it. `starved` is the share of the step
        in which the device waited for launches. `crowding` is what updates, visits and copies cost each other with the
        step's placements, and `cpu_update_s` the time of each layer's update on the CPU.
        """
        whole_s, visits_s = work_s, crowding.beside_work_s
        work_s = max(0.0, whole_s - self._work_loss * visits_s)
        beside_s = beside(work_s, cpu_busy_s, stall_s)
        step = {"work_s": work_s, "stall_s": stall_s, "starved": starved}
        is_usual = not self._contention.is_unusual(places.gpu, **step)
        self._contention.observe(places.gpu, beside_s=beside_s, **step)
        if starved <= LITTLE and work_s:  # else the work takes longer for another reason
            self._for_work.observe(places, beside=visits_s / work_s, time_s=whole_s)
        if is_usual and (numel := sum(layer.numel for layer in self._layers if layer.lid in cpu_update_s)):
            self._for_cpu.observe(places, beside=crowding.beside_cpu, time_s=sum(cpu_update_s.values()) / numel)
        drag, work_loss = self._contention.drag, self._for_work.value
        if abs(drag - self._drag) > SAME_SPEED and self._correct_work((drag - self._drag) * beside_s):
            self._drag = drag
        if abs(work_loss - self._work_loss) > SAME_SPEED:
            if self._correct_work((work_loss - self._work_loss) * visits_s):
                self._work_loss = work_loss
        if abs(self._for_cpu.value - self._cpu_loss) > SAME_SPEED:
            before, self._cpu_loss = 1 + self._cpu_loss * crowding.beside_cpu, self._for_cpu.value
            self._correct_updates(before / (1 + self._cpu_loss * crowding.beside_cpu))
        self._lost_s = self._work_loss * visits_s + self._drag * beside_s
        self._kept = max(0.0, whole_s - self._lost_s) / whole_s if whole_s else 1.0
        return is_usual

    def _correct_work(self, more_s: float) -> bool:
        """Correct earlier measurements by so many more seconds lost, assuming that their steps were like this one.

        Returns False if they are shorter than that.
        """
        work = [self._roles[role] for role in WORK]
        undisturbed_s = sum(sum(role.values.values()) for role in work)
        if 0 < undisturbed_s <= more_s:
            return False
        if undisturbed_s:
            for role in work:
                role.scale(1 - more_s / undisturbed_s)
        if self._busy_s.value:
            self._busy_s.scale(max(self._busy_s.value - more_s, 0.0) / self._busy_s.value)
        return True

    def _correct_updates(self, factor: float) -> None:
        self._roles["cpu_update_s"].scale(factor)
        for updates in self._updates:
            updates.update({lid: update_s * factor for lid, update_s in updates.items()})

    def observe_optimizer(self, *, cpu_update_s: Mapping[int, float]) -> None:
        """One step's times by LID, in one report or several. ValueError for an unknown layer or an impossible time."""
        if not self._updates or not self._updates[-1].keys().isdisjoint(cpu_update_s):
            self._updates.append({})
        self._observe("cpu_update_s", cpu_update_s)
        self._updates[-1].update(cpu_update_s)

    def observe_step(
        self,
        *,
        step_s: float,
        stall_s: float,
        gpu_lids: Iterable[int],
        exposed_s: float = 0.0,
        middle_s: float = 0.0,
    ) -> None:
        """A whole step with these layers on the GPU, and its stalls; call it after `observe_trainer`.

        What a step takes beyond its layers' times is the loop's own work: loss, data, `step()`. Not part of it are
        stalls, what was lost to the CPU's updates, and the `middle_s` in which nothing is updated: otherwise they would
        look like time in which the CPU can update. Of the `exposed_s`
        in which forward waits for all-gathers, what few of the last steps fall below is such time. The rest is the wait
        for ranks that stall: if each rank used it for updates of its own, all would become slower and slower.
        """
        self._exposed_s.append(exposed_s)
        gpu_update_s = self._in_role("gpu_update_s", self._rates.gpu_update_s)
        self._middle_s.add(middle_s)
        update_s = sum(gpu_update_s[lid] for lid in gpu_lids)
        self._busy_s.add(max(0.0, step_s - stall_s - exposed_s - middle_s - self._lost_s - update_s))

    def reorder(self, position_of: Mapping[int, int]) -> None:
        """Use a newly learned forward order. ValueError unless it names exactly the layers of the book."""
        if position_of.keys() != self._position_of.keys():
            raise ValueError("new positions must name every layer of the book and no other")
        self._position_of = dict(position_of)

    @property
    def _paces(self) -> list[float]:
        """The CPU's times in each of the last steps, relative to the present means of the same layers."""
        usual = self._roles["cpu_update_s"].values
        usual_s = [sum(usual[lid] for lid in updates) for updates in self._updates]
        return [sum(updates.values()) / s for updates, s in zip(self._updates, usual_s, strict=True) if s]

    @property
    def _exposed(self) -> float:
        """The usual exposed all-gathers of steps in which no rank stalls; 0 before there are enough steps to tell."""
        waits_s = sorted(self._exposed_s)
        return waits_s[int(SLOW_SHARE * len(waits_s))] if len(waits_s) >= SETTLED_STEPS else 0.0

    def profile(self) -> Profile | None:
        """The current estimate, or None before forward and backward are measured."""
        if not all(self._roles[role].means for role in WORK):
            return None
        times = {role: self._in_role(role, getattr(self._rates, role, None)) for role in ROLES}
        times["visit_s"] = self._visits(times["d2h_s"], times["h2d_s"])
        work_s = sum(times["forward_s"].values()) + sum(times["backward_s"].values())
        layers = (
            LayerProfile(**facts | {"position": self._position_of[lid]} | {role: times[role][lid] for role in ROLES})
            for lid, facts in self._facts.items()
        )
        paces = self._paces
        return Profile(
            layers=tuple(sorted(layers, key=lambda layer: layer.position)),
            other_s=max(0.0, (self._busy_s.value or 0.0) - work_s) + self._exposed,
            middle_s=self._middle_s.value or 0.0,
            awaits_verdict=self._awaits_verdict,
            in_step=self._in_step,
            drag=self._drag,
            cpu_slack=_slack(paces, self._ranks),
            cpu_loss=self._cpu_loss,
            work_loss=self._work_loss,
            cpu_paces=_thirds(paces, self._ranks),
            activation_bytes=self.activation_bytes,
        )

    def check(self) -> None:
        self._busy_s.check()
        self._middle_s.check()
        self._contention.check()
        self._for_cpu.check()
        self._for_work.check()
        for role in self._roles.values():
            assert role.means.keys() <= self._position_of.keys()
            assert role.seen <= role.means.keys() and role.before.keys() <= role.means.keys()
            for mean in role.means.values():
                mean.check()
                assert mean.value is not None

    def _observe(self, role: str, times: Mapping[int, float]) -> None:
        if unknown := times.keys() - self._position_of.keys():
            raise ValueError(f"{role} was measured for layer {min(unknown)}, which is not in the layer table")
        self._roles[role].observe(times)

    def _visits(self, d2h_s: Mapping[int, float], h2d_s: Mapping[int, float]) -> dict[int, float]:
        """Each layer's visit. Without one: how long the link moves its state, times what others took of that.

        None takes less than an idle link needs: how much others slow visits down is estimated, and may be too much.
        """
        measured = self._roles["visit_s"].values
        moves_s = {one.lid: one.state_s(max(d2h_s[one.lid], h2d_s[one.lid])) for one in self._layers}
        of_measured_s = sum(moves_s[lid] for lid in measured)
        enough = of_measured_s > LITTLE * sum(moves_s.values())
        longer = sum(measured.values()) / of_measured_s if enough else 1.0
        idle_s = max(self._rates.d2h_s, self._rates.h2d_s)
        least_s = {one.lid: one.state_s(idle_s * one.numel) for one in self._layers}
        return {lid: max(measured.get(lid, longer * move_s), least_s[lid]) for lid, move_s in moves_s.items()}

    def _in_role(self, role: str, default_s: float | None) -> dict[int, float]:
        """Each layer's time. Without one: its size at the others' rate, or at `default_s` if those are few; or none."""
        measured = self._roles[role].values
        numel = sum(layer.numel for layer in self._layers if layer.lid in measured)
        enough = numel > LITTLE * sum(layer.numel for layer in self._layers)
        rate_s = 0.0 if default_s is None else sum(measured.values()) / numel if enough else default_s
        return {layer.lid: measured.get(layer.lid, layer.numel * rate_s) for layer in self._layers}


def _slack(paces: list[float], ranks: int) -> float:
    """The fraction by which the CPU is at times slower than planned, because of other programs."""
    if len(paces) < SETTLED_STEPS:
        return USUAL_SLACK
    return (1 + LEAST_SLACK) * max(_pace(paces, 1 - SLOW_SHARE, ranks), 1.0) - 1


def _thirds(paces: list[float], ranks: int) -> tuple[float, ...]:
    """How many times the usual the updates take in the fast, the middle and the slow third of the last steps."""
    last = paces[-USUAL_STEPS:]
    return tuple(_pace(last, part, ranks) for part in THIRDS) if len(last) >= SETTLED_STEPS else ()


def _pace(paces: list[float], part: float, ranks: int) -> float:
    """The pace that the slowest of `ranks` does not exceed in this part of the steps."""
    return sorted(paces)[min(int(part ** (1 / ranks) * len(paces)), len(paces) - 1)]
