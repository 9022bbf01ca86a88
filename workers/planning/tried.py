"""How long steps really were with the shares of visits and of offloaded weights that have been tried.

What the simulation does not know makes some shares look better than they are. Each that was tried is judged by its own
steps, so that plans do not change to and fro.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from hytrain.planner.book import Ewma
from hytrain.planner.contention import ENOUGH_STEPS, REMEMBERED_STEPS
from hytrain.planner.profile import Shares

#: Shares miss by so much at most.
MOST_RESIDUAL: Final = 100.0


@dataclass(slots=True)
class _Steps:
    """Steps with the same shares: relative to simulated ones, in seconds, and the last of them."""

    ratio: Ewma = field(default_factory=Ewma)
    step_s: Ewma = field(default_factory=Ewma)
    last: int = -1

    @property
    def are_enough(self) -> bool:
        return self.ratio.count >= ENOUGH_STEPS


class Tried:
    """All shares that were in effect."""

    def __init__(self) -> None:
        self._steps: defaultdict[Shares, _Steps] = defaultdict(_Steps)

    def note(self, shares: Shares, step: int, *, step_s: float, simulated_s: float) -> None:
        """A step took so long with these shares, which are in effect."""
        steps = self._steps[shares]
        steps.ratio.add(min(step_s / simulated_s, MOST_RESIDUAL))
        steps.step_s.add(step_s)
        steps.last = step

    def forget(self) -> None:
        self._steps.clear()

    def residuals(self, now: Shares, step: int) -> dict[Shares, float]:
        """How many times as long as simulated steps are. What was tried long ago counts less: the machine may differ.

        It counts longer, the later in the run that was: so it is tried again less and less often. Steps scatter, so
        the mean is known to about half of the spread. By that much, shares that were left must have been faster.
        """
        known = {shares: _mean(steps.ratio, shares == now) for shares, steps in self._steps.items() if steps.are_enough}
        usual = known.get(now, 1.0)
        last = {shares: self._steps[shares].last for shares in known}
        halvings = {shares: (step - last[shares]) / max(REMEMBERED_STEPS, last[shares]) for shares in known}
        return {shares: usual + (value - usual) * 0.5 ** halvings[shares] for shares, value in known.items()}

    def steps_s(self, now: Shares, step: int) -> dict[Shares, float]:
        """How long steps are with the present shares, and were with those left not long ago.

        What the simulation believes of others may be wrong since something else is measured. So a plan that was clearly
        faster is known to be.
        """
        return {
            shares: _mean(steps.step_s, shares == now)
            for shares, steps in self._steps.items()
            if steps.are_enough and step - steps.last <= REMEMBERED_STEPS
        }


def _mean(found: Ewma, is_now: bool) -> float:
    assert found.value is not None, "there are steps"
    return found.value + (0.0 if is_now else found.spread / 2)
