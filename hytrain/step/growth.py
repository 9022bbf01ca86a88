"""How much memory a step needs for a batch, by the batch's size: learned for larger ones than any so far.

    end of a step    the most that steps have needed has grown ─▶ this step's batch needs so much
    before forward   a batch that is larger than any so far    ─▶ what it will need

A size is the number of elements of the model's inputs. Two sizes give a slope; before that, all is taken to grow with
the size. What really grows faster, such as the scores of attention that is not fused, grows beyond what is foreseen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Growth:
    """Bytes beside what is there between two steps.

    `size`: of this step's largest batch. `peak`: of memory, until now.
    """

    size: int = 0
    peak: int = 0
    _largest: tuple[int, int] = (0, 0)  # the largest size so far, and its bytes
    _before: tuple[int, int] | None = None  # a smaller one

    def end_step(self, peak: int, now: int) -> None:
        """`peak` is that of all steps, or since state has left; `now` is there between two steps."""
        size, self.size = self.size, 0
        (largest, needed), grown = self._largest, peak > self.peak
        self.peak = peak
        if size > largest:
            self._before = self._largest if largest else None
            self._largest = size, max(0, peak - now)
        elif size and grown:
            self._largest = largest, max(needed, peak - now)

    def foreseen(self, size: int) -> int | None:
        """What a batch of this size needs, if it is larger than any so far, in this step and before; else None."""
        largest, needed = self._largest
        is_larger = size > max(largest, self.size)
        self.size = max(self.size, size)
        if not is_larger or not largest:
            return None
        if self._before is None:
            return needed * size // largest
        before, less = self._before
        return needed + max(0, needed - less) * (size - largest) // (largest - before)

    @property
    def most(self) -> int:
        """What the largest batch so far has needed."""
        return self._largest[1]

    def check(self) -> None:
        assert self._before is None or self._before[0] < self._largest[0], "a slope is between two sizes"
