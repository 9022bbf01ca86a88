"""Whether an optimizer may bring state to a GPU, to which others of this process bring theirs.

Each plans with the memory that no step so far has needed. So an optimizer brings state only after a whole step of its
own since another one did: then its plan is made with what is left.

    a plan of one              claim      ─▶ the others' plans are refused from here on
    its memory is allocated    came       ─▶ so they still are
    steps of the others        end_step   ─▶ the first whole one has measured what has come: plans are taken again

Between the first two, no step of the one is needed: nobody waits for an optimizer that does not step any more.
"""

from __future__ import annotations

from hytrain.memory.capacity import GpuMemory


class Arrivals:
    """Those of one optimizer."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory, self._own = memory, 0
        self._measured = self._seen = self._others

    @property
    def _others(self) -> int:
        return self._memory.arrivals - self._own

    def claim(self) -> bool:
        """Whether a plan that has just been made may bring state. If so, others wait until it `came`, or `lapsed`."""
        if not self._memory.is_bounded:
            return True
        with self._memory.lock:
            if {*self._memory.arriving} - {self} or self._others != self._measured:
                return False
            self._memory.arriving.add(self)
        return True

    def came(self) -> None:
        """Memory was allocated, for a plan or for the first placement. Weights that were offloaded may come later."""
        with self._memory.lock:
            self._memory.arriving.discard(self)
            self._own += 1
            self._memory.arrivals += 1

    def lapsed(self) -> None:
        """What was claimed does not come."""
        with self._memory.lock:
            self._memory.arriving.discard(self)

    def end_step(self) -> None:
        """The peak of this step is known."""
        with self._memory.lock:
            self._measured, self._seen = self._seen, self._others
