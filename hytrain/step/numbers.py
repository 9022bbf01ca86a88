"""Which step `opt.log` means: one count, which is the loop's if the loop logs. Pure; `session` calls it.

    steps finished, on from a checkpoint ─┐
    opt.log(step, …) ─────────────────────┴─▶ Place: the record of a finished step, or of the next one
                                               └─ another count than ours: it becomes the count

A step that a loop logs is the last finished one, an earlier one that it has read late, or the one that it is about to
finish. A first number that is none of these (0, or 100 in a new process) belongs to a loop with a count of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """`renames`: the number that the step had so far, if it gets another one. `ahead`: the step is not finished yet."""

    renames: int | None
    ahead: bool


class StepNumbers:
    """The numbers of one optimizer's steps."""

    def __init__(self) -> None:
        self.restored(0)

    def restored(self, steps: int) -> None:
        """Training starts, or continues, after step number `steps`."""
        self._before = steps
        self._logged: int | None = None

    def place(self, step: int, finished: int, *, between: bool) -> Place:
        """The place of step number `step`. `finished`: the last step's number; `between`: no backward has run since."""
        fits = step <= finished + 1 and (self._logged is not None or step > self._before)
        if fits:
            self._logged = step if self._logged is None else max(step, self._logged)
            return Place(renames=None, ahead=step > finished)
        open_ended = between and finished > self._before and finished != self._logged
        renames = finished if open_ended else finished + 1
        self._before += step - renames
        self._logged = step
        return Place(renames=renames, ahead=renames > finished)
