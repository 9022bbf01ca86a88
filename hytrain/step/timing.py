"""When a step's updates begin: in its last backward, or in `step()`, as torch's do.

the loop's first step   updates begin in step()     whatever it does between backward and step() is seen
it does nothing there   ─▶ in backward from then on, and they overlap with it
it does something       ─▶ in step(): gradients are in `p.grad` until then, and can be read and written
"""

from __future__ import annotations

import logging
from typing import Final

from hytrain.step.life import Event

#: What a loop does between a backward and `step()`, by the event.
SEEN: Final = {Event.OUTSIDE: "uses weights", Event.LOAD: "saves or loads", Event.DROP: "drops gradients"}

_log = logging.getLogger(__name__)


class Timing:
    """`updates` is the option: "backward", "step", or "auto", which learns it."""

    def __init__(self, updates: str) -> None:
        self.in_step = updates != "backward"
        self.learns = updates == "auto"
        self._seen = ""

    def saw(self, what: str) -> None:
        """The loop has done something between a backward and `step()`, or after that with gradients."""
        if self.learns:
            self._seen = self._seen or what

    def end_step(self) -> None:
        """A step with gradients has ended, and the next one's first backward begins."""
        if not self.learns:
            return
        self.learns, self.in_step = False, bool(self._seen)
        if self._seen:
            _log.info("this loop %s before step(): updates begin in step()", self._seen)
        else:
            _log.info("this loop does nothing between backward and step(): updates begin in backward")
