"""When a step's updates begin: in its last backward, or in `step()`, as torch's do.

its first two steps     updates begin in step()     whatever the loop does between backward and step() is seen
it does nothing there   ─▶ in backward from then on, and they overlap with it
it does something       ─▶ in step(): gradients are in `p.grad` until then, and can be read and written

Two, because a loop with several optimizers may drop in one step what another's backward has left after the step before.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from torch import Tensor

from hytrain.step.life import Event
from hytrain.tensors import same_address, version

#: What a loop does between a backward and `step()`, by the event.
SEEN: Final = {Event.OUTSIDE: "uses weights", Event.LOAD: "saves or loads", Event.DROP: "drops gradients"}

#: What it does that needs no more of gradients than one number each.
NORMS: Final = "takes norms of gradients"

#: The options that make it unnecessary.
CURES: Final = {
    "scales gradients": "max_grad_norm in place of clip_grad_norm_",
    "calls backward several times": "grad_accumulation, or opt.no_sync(),",
    "has a GradScaler": 'loss_scale="dynamic" in place of it',
}

#: The steps in which "auto" learns.
LEARNED_IN: Final = 2

_log = logging.getLogger(__name__)


class Timing:
    """`updates` is the option: "backward", "step", or "auto", which learns it.

    `may_be_last`: no more backwards were announced than the last one, whose updates may begin in it. What a loop does
    before others is no habit. `norms`: the operator with which it takes norms of gradients, once it has.
    """

    def __init__(self, updates: str) -> None:
        self.may_be_last = False
        self.in_step = updates != "backward"
        self.learns = updates == "auto"
        self.norms: Any = None
        self._seen = ""
        self._late, self._is_learned = False, updates == "auto"
        self._factor: tuple[Tensor, int, Tensor] | None = None  # with its version, and a copy

    def same(self, factor: Tensor) -> Tensor:
        """A copy of the loop's factor: the same one until the loop writes it, which it may do after using it."""
        if self._factor is not None:  # which is kept, so that no other one has its address
            known, seen, copy = self._factor
            if same_address(known, factor) and (seen, copy.dtype) == (version(factor), factor.dtype):
                return copy
        copy = factor.clone()
        self._factor = factor, version(factor), copy
        return copy

    def saw(self, what: str, *, after_step: bool = False) -> None:
        """The loop has done something between a backward and `step()`, or `after_step` with that step's gradients."""
        if self.learns and (self.may_be_last or after_step):
            self._seen = what if self._seen in ("", NORMS) else self._seen

    def is_late(self, what: str) -> None:
        """The loop does something between backward and `step()` for the first time, where updates begin in backward."""
        if self._is_learned and not self._late:
            self._late = True
            _log.warning("this loop %s before step(), for the first time: updates begin in step() from now on", what)

    def begin_step(self, step: int) -> bool:
        """The first backward of `step`, counted from 0, begins. Returns whether it has been learned just now."""
        self.in_step |= self._late
        if not self.learns or step < LEARNED_IN:
            return False
        self.learns, self.in_step = False, bool(self._seen)
        if self._seen:
            cure = CURES.get(self._seen)
            hint = f"; {cure} lets them begin in backward, which takes less GPU memory" if cure else ""
            _log.info("this loop %s before step(): updates begin in step()%s", self._seen, hint)
        else:
            _log.info("this loop does nothing between backward and step(): updates begin in backward")
        return True
