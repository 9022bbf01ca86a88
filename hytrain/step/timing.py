"""When a step's updates begin: in its last backward, or in `step()`, as torch's do.

its first two steps     updates begin in step()     whatever the loop does between backward and step() is seen
it does nothing there   ─▶ in backward from then on, and they overlap with it
it does something       ─▶ in step(): gradients are in `p.grad` until then, and can be read and written

Two, because a loop with several optimizers may drop in one step what another's backward has left after the step before.
It is learned of the model's two modes by themselves: a loop may train in training mode, and in evaluation mode compute
gradients that it looks at and drops.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import Tensor

from hytrain.step.life import Event
from hytrain.tensors import address, version

#: What a loop does between a backward and `step()`, by the event.
SEEN: Final = {Event.OUTSIDE: "uses weights", Event.LOAD: "saves or loads", Event.DROP: "drops gradients"}

#: What it does that needs no more of gradients than one number each.
NORMS: Final = "takes norms of gradients"

#: What says less than what is seen after it: a loop that calls backward twice has called the model, too.
LESS: Final = (NORMS, SEEN[Event.OUTSIDE])

#: The options that make it unnecessary.
CURES: Final = {
    "scales gradients": "max_grad_norm in place of clip_grad_norm_",
    "calls backward several times": "grad_accumulation, or opt.no_sync(),",
    "has a GradScaler": 'loss_scale="dynamic" in place of it',
}

#: The steps in which "auto" learns.
LEARNED_IN: Final = 2

_log = logging.getLogger(__name__)


class _Habit:
    """What a loop does in one of the model's modes: what was `seen`, in which `steps`, and what was learned of that.

    `is_late`: something was seen when that was learned already.
    """

    def __init__(self, updates: str) -> None:
        self.in_step = updates != "backward"
        self.learns = updates == "auto"
        self.seen, self.is_late = "", False
        self.steps = set[int]()


class Timing:
    """`updates` is the option: "backward", "step", or "auto", which learns it.

    `in_step`: the updates of a step like this one begin in `step()`; `learns`: that is still to be learned.
    `training`: the mode in which the model was entered last, to make a graph.
    `may_be_last`: no more backwards were announced than the last one, whose updates may begin in it. What a loop does
    before others is no habit. `norms`: the operator with which it takes norms of gradients, once it has.
    """

    def __init__(self, updates: str) -> None:
        self.may_be_last = False
        self.training = True
        self.norms: Any = None
        self._updates = updates
        self._habits = {training: _Habit(updates) for training in (True, False)}
        self._now = self._habits[True]  # of the step's mode
        self._note()
        self._factor: tuple[Tensor, int, Tensor] | None = None  # with its version, and a copy

    def _note(self) -> None:
        self.in_step, self.learns = self._now.in_step, self._now.learns

    def same(self, factor: Tensor) -> Tensor:
        """A copy of the loop's factor: the same one until the loop writes it, which it may do after using it.

        On a CPU that is seen by its bits: autograd does not count all writes. A device is not waited for.
        """
        if factor.is_inference() and not factor.is_cpu:
            return factor.clone()
        if self._factor is not None:  # whose memory is kept, so that no other one has its address
            known, seen, copy = self._factor
            if copy.dtype == factor.dtype and (
                _bits_are_equal(copy, factor)
                if factor.is_cpu
                else address(known) == address(factor) and seen == version(factor)
            ):
                return copy
        copy = factor.clone()
        self._factor = factor.detach(), 0 if factor.is_cpu else version(factor), copy
        return copy

    def saw(self, what: str, *, after_step: bool = False) -> None:
        """The loop has done something between a backward and `step()`, or `after_step` with that step's gradients."""
        habit = self._now
        if habit.learns and (self.may_be_last or after_step):
            habit.seen = what if habit.seen in ("", *LESS) else habit.seen

    def is_late(self, what: str) -> None:
        """The loop does something between backward and `step()` for the first time, where updates begin in backward."""
        if self._updates == "auto" and not self._now.is_late:
            self._now.is_late = True
            _log.warning("this loop %s before step(), for the first time: updates begin in step() from now on", what)

    def begin_step(self, step: int) -> bool:
        """The first backward of `step`, counted from 0, begins. Returns whether it has been learned just now."""
        self._now = self._habits[self.training]
        has_learned = self._learn(self._now, step)
        self._note()
        return has_learned

    def _learn(self, habit: _Habit, step: int) -> bool:
        habit.in_step |= habit.is_late
        if not habit.learns:
            return False
        if step in habit.steps or len(habit.steps) < LEARNED_IN:
            habit.steps.add(step)
            return False
        habit.learns, habit.in_step = False, bool(habit.seen)
        where = "this loop" if self.training else "in evaluation mode, this loop"
        if habit.seen:
            cure = CURES.get(habit.seen)
            hint = f"; {cure} lets them begin in backward" if cure else ""
            _log.info("%s %s before step(): updates begin in step()%s", where, habit.seen, hint)
        else:
            _log.info("%s does nothing between backward and step(): updates begin in backward", where)
        return True


def _bits_are_equal(one: Tensor, other: Tensor) -> bool:
    """Of two numbers of one dtype."""
    return torch.equal(one.reshape(1).view(torch.uint8), other.reshape(1).view(torch.uint8))
