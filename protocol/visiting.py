"""When state visits the GPU: the trainer makes the visits, and the coordinator simulates them by the same rules.

Some visits are put off until backward is over, and then go in forward order: docs/architecture.md draws why.

What waits for a visit has `hold_bytes` of the GPU's memory. At most half of that is for what is put off: gradients, and
offloaded weights, which stay on the GPU until forward. Other offloaded weights stay there until their visit, and up to
half of it widens their window for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

#: The most blocks by which the window of offloaded weights is widened.
MORE_BLOCKS: Final = 4
#: A visit is put off if it would have to wait longer than this, in mean visits. Each is tried, to find the least stall.
WAITS: Final = (inf, 1.0, 0.5, 0.25, 0.1)


class Turn(NamedTuple):
    """A layer in a step. If its state visits, `visit_s` is above 0."""

    lid: int
    forward_s: float
    backward_s: float
    visit_s: float = 0.0


def put_off(turns: Sequence[Turn]) -> frozenset[int]:
    """Of layers in forward order, those whose visits are made after backward, so that forward waits less."""
    visits = [turn for turn in turns if turn.visit_s]
    if not visits:
        return frozenset()
    ready_s, due_s, now = dict[int, float](), dict[int, float](), 0.0
    for turn in reversed(turns):
        now += turn.backward_s
        ready_s[turn.lid] = now
    for turn in turns:
        due_s[turn.lid] = now
        now += turn.forward_s
    mean_s = sum(turn.visit_s for turn in visits) / len(visits)
    found, least_s = list[Turn](), inf
    for wait in WAITS:
        later, stall_s = _with_waits(visits, ready_s, due_s, wait * mean_s)
        if stall_s < least_s:
            found, least_s = later, stall_s
        if not least_s:
            break
    return frozenset(turn.lid for turn in found)


def _with_waits(
    visits: Sequence[Turn], ready_s: Mapping[int, float], due_s: Mapping[int, float], most_s: float
) -> tuple[list[Turn], float]:
    """What is put off if visits wait for so long at most, in forward order; and how long forward waits then."""
    free_s = stall_s = 0.0
    later: list[Turn] = []
    for turn in reversed(visits):
        begins_s = max(free_s, ready_s[turn.lid])
        if turn is not visits[0] and begins_s - ready_s[turn.lid] > most_s:
            later.insert(0, turn)
            continue
        free_s = begins_s + turn.visit_s
        stall_s = max(stall_s, free_s - due_s[turn.lid])
    free_s = max(free_s, min(due_s.values()))
    for turn in later:
        free_s += turn.visit_s
        stall_s = max(stall_s, free_s - due_s[turn.lid])
    return later, stall_s


def most_put_off_bytes(hold_bytes: int) -> int:
    """Of what waits for visits on the GPU, that of layers that are put off."""
    return hold_bytes // 2


def wider_by_bytes(hold_bytes: int, block_bytes: int) -> int:
    """By how much the window of offloaded weights is widened if visits update some of them, in whole blocks."""
    return min(MORE_BLOCKS, hold_bytes // 2 // block_bytes) * block_bytes if block_bytes else 0
