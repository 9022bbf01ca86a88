"""Whether an optimizer may bring state to a GPU, to which others of this process bring theirs.

Each plans with the memory that no step so far has needed. So there must have been a whole step of its own since others
have brought anything: then its plan is made with what they have left.

    the plan of one            claim      ─▶ the others' plans are refused from here on
    its memory is allocated    coming     ─▶ so they are in the meantime, and from here on
    steps of the others        end_step   ─▶ the first whole one has measured what has come: plans are taken again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hytrain.memory.capacity import GpuMemory


class Arrivals:
    """Those of one optimizer."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory, self._own = memory, 0
        self._measured = self._seen = self._others

    @property
    def _others(self) -> int:
        return self._memory.arrivals - self._own

    def _count(self) -> None:
        self._own += 1
        self._memory.arrivals += 1

    def claim(self) -> bool:
        """Whether the plan that has just been made may bring state. If so, it counts."""
        if not self._memory.is_bounded:
            return True
        with self._memory.lock:
            if self._memory.arriving - {self} or self._others != self._measured:
                return False
            self._count()
        return True

    @contextmanager
    def coming(self) -> Iterator[None]:
        """A context that allocates memory for it."""
        with self._memory.lock:
            self._memory.arriving.add(self)
        try:
            yield
        finally:
            with self._memory.lock:
                self._memory.arriving.discard(self)
                self._count()

    def end_step(self) -> None:
        """The peak of this step is known."""
        with self._memory.lock:
            self._measured, self._seen = self._seen, self._others
