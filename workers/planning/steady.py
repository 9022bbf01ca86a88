"""Whether steps are as they were when a plan had settled: then no other one has to be looked for.

What is simulated of other plans scatters by more than most of them gain. So a plan that has settled stays until its own
steps, or what it was made for, differ from what they were.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from hytrain.planner.contention import LITTLE, SETTLED_STEPS, USUAL_STEPS
from hytrain.planner.profile import USUAL_SLACK


class Steady:
    """The last steps with the plan that is in effect, and how they were once it had settled."""

    def __init__(self) -> None:
        self.changed()

    def changed(self) -> None:
        """Plans are others from now on, or what they are made for."""
        self._steps = deque[tuple[float, float]](maxlen=USUAL_STEPS)
        self._then, self._left = list[float](), SETTLED_STEPS + USUAL_STEPS

    def note(self, step_s: float, cpu_busy_s: float) -> None:
        """A step in which nothing moved, and for how long the CPU updated in it or in the one before."""
        self._steps.append((step_s, cpu_busy_s))
        self._left -= 1

    def lasts(self, *made_for: float) -> bool:
        """Whether most of the last steps were as then, and the plan is still `made_for` about the same.

        False until it has settled, and for as long after a change.
        """
        if self._left > 0:
            return False
        now = [*(median(each) for each in zip(*self._steps, strict=True)), *made_for]
        self._then, same = self._then or now, (LITTLE, USUAL_SLACK, *[LITTLE] * len(made_for))
        if not all(abs(one - then) <= by * max(one, then) for one, then, by in zip(now, self._then, same, strict=True)):
            self.changed()
            return False
        return True
