"""How long steps were with splits of the layers that have been tried."""

from __future__ import annotations

import pytest
from planner_layers import made

from hytrain.planner.contention import ENOUGH_STEPS, REMEMBERED_STEPS
from hytrain.planner.profile import Profile, Split
from workers.planning.tried import MOST_MISS, Tried

NOW, LEFT = (0.0, 0.0, 0.0), (0.5, 0.5, 0.0)
LIDS = {NOW: frozenset[int](), LEFT: frozenset({1})}


def note(tried: Tried, split: Split, *steps_s: float, first: int = 0, **times_s: float) -> None:
    """`layers_s`: forward, backward and the CPU's updates of all layers. All of a step is explained but `other_s`."""
    layers_s, other_s, simulated_s = ({"layers_s": 1.0, "other_s": 0.0, "simulated_s": 1.0} | times_s).values()
    sixths = {"forward_s": layers_s / 6, "backward_s": layers_s / 3, "cpu_update_s": layers_s / 2}
    layers = tuple(made(lid, **{name: time_s / 2 for name, time_s in sixths.items()}) for lid in range(2))
    profile = Profile(layers=layers, other_s=other_s, visit=split[1], offload=split[2])
    for step, step_s in enumerate(steps_s, start=first):
        tried.note(profile, LIDS[split], step, step_s=step_s, simulated_s=simulated_s)
        assert tried.unexplained_s == pytest.approx(step_s - simulated_s + other_s)


def misses(tried: Tried, now: Split, step: int) -> dict[Split, float]:
    return {split: known.miss for split, known in tried.known(now, step).items()}


def test_too_few_steps_tell_nothing() -> None:
    tried = Tried()
    note(tried, NOW, *[2.0] * (ENOUGH_STEPS - 1))
    assert not tried.known(NOW, 9)
    note(tried, NOW, 2.0)
    assert tried.known(NOW, 9) == {NOW: (LIDS[NOW], 2.0, 1.0, 2.0, ENOUGH_STEPS)}
    tried.forget()
    assert not tried.known(NOW, 9) and not tried.scatter(NOW)


def test_splits_that_were_left_must_have_been_faster_by_as_much_as_they_scatter() -> None:
    tried = Tried()
    note(tried, LEFT, 3.0, 3.0, 3.0, 3.0)
    assert tried.scatter(LEFT) == 0.0
    assert tried.known(LEFT, 9)[LEFT][1:4] == tried.known(NOW, 9)[LEFT][1:4] == (3.0, 2.0, 3.0)
    note(tried, LEFT, 2.0, 4.0, first=4)
    assert 0.0 < tried.scatter(LEFT) < 1 / 3
    for doubted, sure in zip(tried.known(NOW, 9)[LEFT][1:4], tried.known(LEFT, 9)[LEFT][1:4], strict=True):
        assert doubted > sure


@pytest.mark.parametrize("last", [ENOUGH_STEPS, 10 * REMEMBERED_STEPS])
def test_what_was_tried_long_ago_counts_less_but_longer_later_in_a_run(last: int) -> None:
    tried, half = Tried(), max(REMEMBERED_STEPS, last)
    note(tried, LEFT, *[3.0] * ENOUGH_STEPS, first=last - ENOUGH_STEPS + 1)
    note(tried, NOW, *[2.0] * ENOUGH_STEPS, first=last + half - ENOUGH_STEPS + 1, layers_s=0.9)
    assert misses(tried, NOW, last)[LEFT] == 3.0
    assert misses(tried, NOW, last + half) == {NOW: 2.0, LEFT: pytest.approx(2.5)}, "the machine may have changed"
    known = {step: tried.known(NOW, step) for step in (last + REMEMBERED_STEPS, last + REMEMBERED_STEPS + 1)}
    assert [found[LEFT].step_s for found in known.values()] == [3.0, None]


def test_what_gained_nothing_is_remembered_while_steps_are_as_they_were() -> None:
    """More was simulated to be gained, so it would be tried again and again."""
    tried = Tried()
    note(tried, LEFT, *[3.0, 3.2, 2.8] * 3, simulated_s=2.0, other_s=0.2)
    note(tried, NOW, *[3.1, 2.9, 3.0] * 3, first=9, simulated_s=3.0, other_s=0.2, layers_s=1.04)
    before, long_after = tried.known(NOW, 20)[LEFT], 100_000
    assert before.miss > 1.5 and before.rest_s > 1.2
    assert tried.known(NOW, long_after)[LEFT][:3] == before[:3]
    note(tried, NOW, *[3.0] * 9, first=18, simulated_s=3.0, other_s=0.2, layers_s=2.0)  # a slower machine
    assert tried.known(NOW, long_after)[LEFT][1:3] == (pytest.approx(1.0, abs=0.1), pytest.approx(0.2, abs=0.1))


def test_a_step_of_minutes_is_no_miss_of_thousands() -> None:
    tried = Tried()
    note(tried, NOW, *[1000.0] * ENOUGH_STEPS, simulated_s=1e-3)
    assert misses(tried, NOW, 9) == {NOW: MOST_MISS}
