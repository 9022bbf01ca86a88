"""How long steps really were with the splits of the layers that have been tried.

What the simulation does not know makes some splits look better than they are. Each that was tried is judged by its own
steps, so that plans do not change to and fro.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hytrain.planner.book import Ewma
from hytrain.planner.contention import ENOUGH_STEPS, LITTLE, REMEMBERED_STEPS
from hytrain.planner.profile import Known, Profile, Split
from hytrain.planner.simulate import simulate
from workers.planning.measured import Step

#: A split misses by so much at most.
MOST_MISS: Final = 100.0


@dataclass(slots=True)
class _Steps:
    """Steps with the same split, relative to simulated ones; what of them the layers' times do not explain; the layers'
    times, which tell whether the machine is as it was; all of them; and the last one.
    """

    gpu_lids: frozenset[int]
    miss: Ewma = field(default_factory=Ewma)
    rest_s: Ewma = field(default_factory=Ewma)
    layers_s: Ewma = field(default_factory=Ewma)
    step_s: Ewma = field(default_factory=Ewma)
    last: int = -1


class Tried:
    """All splits that were in effect. `unexplained_s`: of the last step, what the layers' times do not explain."""

    def __init__(self) -> None:
        self._steps: dict[Split, _Steps] = {}
        self.unexplained_s: float | None = None

    def note(self, profile: Profile, gpu_lids: frozenset[int], step: int, *, step_s: float, simulated_s: float) -> None:
        """A step took so long with the profile's shares and these layers on the GPU, which is in effect."""
        split, explained_s = profile.split(gpu_lids), simulated_s - profile.other_s
        self.unexplained_s = max(0.0, step_s - explained_s)
        steps = self._steps.setdefault(split, _Steps(gpu_lids))
        steps.gpu_lids, steps.last = gpu_lids, step
        steps.miss.add(min(step_s / simulated_s, MOST_MISS))
        steps.rest_s.add(self.unexplained_s)
        steps.layers_s.add(profile.forward_s + profile.backward_s + profile.cpu_update_s)
        steps.step_s.add(step_s)

    def note_step(self, profile: Profile, step: Step, number: int, in_mode: Callable[[Profile], Profile]) -> None:
        """Step `number` was a usual one, with what is in effect now. It is simulated with the CPU's pace in it."""
        gpu_lids = step.places.gpu
        usual_s = simulate(profile, gpu_lids).cpu_busy_s
        pace = step.cpu_busy_s / usual_s if usual_s and step.cpu_busy_s else 1.0
        simulated_s = simulate(in_mode(profile.with_cpu(pace)), gpu_lids).step_s
        if step.duration_s and simulated_s:
            self.note(profile, gpu_lids, number, step_s=step.duration_s, simulated_s=simulated_s)

    def forget(self) -> None:
        self._steps.clear()

    def scatter(self, now: Split) -> float:
        """To which fraction of a step it is known how long those with the present split take: half of the spread."""
        steps = self._steps.get(now)
        if steps is None or not steps.step_s.value:
            return 0.0
        return max(steps.step_s.spread, steps.rest_s.spread) / 2 / steps.step_s.value

    def known(self, now: Split, step: int) -> dict[Split, Known]:
        """What is known of each split.

        If layers' times are not what they were then, by more than they scatter, the machine differs: so what was tried
        long ago counts less. It counts longer, the later in the run that was: so it is tried again less and less often.
        The mean is known to about half of the spread. By that much, splits that were left must have been faster.
        """
        enough = {split: steps for split, steps in self._steps.items() if steps.miss.count >= ENOUGH_STEPS}
        here, found = enough.get(now), dict[Split, Known]()
        for split, steps in enough.items():
            doubt = 0.0 if split == now else 0.5
            means = (steps.miss, steps.rest_s, steps.step_s)
            miss, rest_s, step_s = (_value(mean) + doubt * mean.spread for mean in means)
            if here is not None and _differ(here.layers_s, steps.layers_s):
                left = 0.5 ** ((step - steps.last) / max(REMEMBERED_STEPS, steps.last))
                miss = _value(here.miss) + left * (miss - _value(here.miss))
                rest_s = _value(here.rest_s) + left * (rest_s - _value(here.rest_s))
            is_recent = step - steps.last <= REMEMBERED_STEPS
            found[split] = Known(steps.gpu_lids, miss, rest_s, step_s if is_recent else None, steps.miss.count)
        return found


def _value(mean: Ewma) -> float:
    assert mean.value is not None, "there are steps"
    return mean.value


def _differ(one: Ewma, other: Ewma) -> bool:
    """By more than both scatter."""
    return abs(_value(one) - _value(other)) > one.spread + other.spread + LITTLE * _value(other)
