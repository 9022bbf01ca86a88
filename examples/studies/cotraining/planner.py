"""How many parts of each batch the CPU trains beside the GPU, by what the steps so far took. Pure.

    GPU   parts 0 … n-2-c ── idle, until the CPU's gradients are there ── adds them ── the last part, and the updates
    CPU   lead ── the next c parts ────────────────────────────────────┘
            └ updates, and the start of the first part

    seconds(c) = max((n - 1 - c) · gpu_part,  lead + c · cpu_part)  +  c · add  +  gpu_part        for c > 0
    seconds(0) = n · gpu_part

A pipeline trains all of its parts at once: there, none comes after the CPU's.
`cotraining.shares` calls `observe` after each step and `decide` before it. `lead` follows from how long the GPU was
idle. What this leaves out, as that updates share the cores, shows in how long steps with c parts really were: `seconds`
is multiplied by that ratio, or by that of the present c where c was never tried. Another c is taken only for a clear
gain.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

#: Numbers are medians of so many steps.
WINDOW: Final = 8
#: So many steps with the present number of parts come before the next decision. The first of them is not counted.
SETTLE: Final = 4
#: Another number of parts has to make steps shorter by this share.
MIN_GAIN: Final = 0.02
#: A GPU that was idle for less than this share of a part was busy.
IDLE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, in seconds. `step_s`: all of it. `gpu_part_s`: a part on the GPU.

    With parts on the CPU, `cpu_part_s` is the mean of them, `add_s` how long it took the GPU to add the gradients of
    one, and `idle_s` how long the GPU had nothing to do before that.
    """

    cpu_parts: int
    step_s: float
    gpu_part_s: float
    cpu_part_s: float | None = None
    add_s: float = 0.0
    idle_s: float = 0.0


class CpuPartsPlanner:
    """Chooses how many of `parts` the CPU trains: at most `most`. `why` says why that many, once it is decided.

    `after` is how many the GPU trains after the CPU's.
    """

    def __init__(self, parts: int, most: int, after: int = 1) -> None:
        assert 0 < most < parts, "one part is the GPU's"
        self.cpu_parts, self.why = 0, ""
        self._parts, self._most, self._after, self._since = parts, most, after, 0
        numbers = partial(deque[float], maxlen=WINDOW)
        self._gpu_s, self._cpu_s, self._lead_s, self._add_s = numbers(), numbers(), numbers(), numbers()
        self._ratios: defaultdict[int, deque[float]] = defaultdict(numbers)

    @property
    def is_tried(self) -> bool:
        """Whether it is known how long a part takes on the CPU."""
        return bool(self._cpu_s)

    def observe_cpu(self, seconds: float) -> None:
        """The CPU has computed a part, without being waited for."""
        self._cpu_s.append(seconds)

    def observe(self, step: Step) -> None:
        self._since += 1
        if step.cpu_parts != self.cpu_parts or self._since == 1:  # planned before the last decision, or the first since
            return
        self._gpu_s.append(step.gpu_part_s)
        if step.cpu_part_s is not None:
            self._cpu_s.append(step.cpu_part_s)
            self._add_s.append(step.add_s)
            self._observe_lead(step)
        if step.cpu_parts == 0 or self.is_tried:
            self._ratios[step.cpu_parts].append(step.step_s / self._modelled(step.cpu_parts, step.gpu_part_s))

    def _observe_lead(self, step: Step) -> None:
        """What the CPU's parts don't explain of the time until the GPU goes on; at most that, if the GPU was busy."""
        assert step.cpu_part_s is not None
        beside_s = (self._parts - self._after - step.cpu_parts) * step.gpu_part_s + step.idle_s
        lead_s = max(beside_s - step.cpu_parts * step.cpu_part_s, 0.0)
        if step.idle_s < IDLE * step.gpu_part_s:
            lead_s = min(lead_s, self._lead())
        self._lead_s.append(lead_s)

    def _lead(self) -> float:
        return median(self._lead_s) if self._lead_s else 0.0

    def decide(self) -> bool:
        """Choose `cpu_parts` for the next steps. Returns whether that is another number now, or the first choice."""
        if self._since < SETTLE or not self.is_tried or not self._ratios[self.cpu_parts]:
            return False
        now_s = self.seconds(self.cpu_parts)
        best = min(range(self._most + 1), key=lambda parts: (self.seconds(parts), parts))
        is_worth_it = self.seconds(best) < (1.0 - MIN_GAIN) * now_s
        chosen = best if is_worth_it else self.cpu_parts
        is_first, self.why = not self.why, self._sentence(chosen)
        if chosen == self.cpu_parts:
            return is_first
        self.cpu_parts, self._since = chosen, 0
        return True

    def seconds(self, cpu_parts: int) -> float:
        """How long a step with so many parts on the CPU is expected to take."""
        ratios = self._ratios[cpu_parts] or self._ratios[self.cpu_parts]
        return self._modelled(cpu_parts, median(self._gpu_s)) * median(ratios)

    def _modelled(self, cpu_parts: int, gpu_s: float) -> float:
        if cpu_parts == 0:
            return self._parts * gpu_s
        add_s = median(self._add_s) if self._add_s else 0.0
        gpu_parts, cpu_s = self._parts - self._after - cpu_parts, self._lead() + cpu_parts * median(self._cpu_s)
        return max(gpu_parts * gpu_s, cpu_s) + cpu_parts * add_s + self._after * gpu_s

    def _sentence(self, chosen: int) -> str:
        each = f"a part takes {median(self._gpu_s):.3g} s on the GPU and {median(self._cpu_s):.3g} s on the CPU"
        other = chosen or min(range(1, self._most + 1), key=self.seconds)
        alone_s, with_s = self.seconds(0), self.seconds(other)
        return f"{each}, so a step {with_s:.3g} s with {other} of them on the CPU and {alone_s:.3g} s with none"
