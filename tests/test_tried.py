"""How long steps were with shares that have been tried."""

from __future__ import annotations

import pytest

from hytrain.planner.contention import ENOUGH_STEPS, REMEMBERED_STEPS
from workers.planning.tried import MOST_RESIDUAL, Tried

NOW, LEFT = (0.0, 0.0), (0.5, 0.0)


def note(tried: Tried, shares: tuple[float, float], *steps_s: float, first: int = 0, simulated_s: float = 1.0) -> None:
    for step, step_s in enumerate(steps_s, start=first):
        tried.note(shares, step, step_s=step_s, simulated_s=simulated_s)


def test_too_few_steps_tell_nothing() -> None:
    tried = Tried()
    note(tried, NOW, *[2.0] * (ENOUGH_STEPS - 1))
    assert tried.residuals(NOW, 9) == tried.steps_s(NOW, 9) == {}
    note(tried, NOW, 2.0)
    assert tried.residuals(NOW, 9) == tried.steps_s(NOW, 9) == {NOW: 2.0}
    tried.forget()
    assert tried.residuals(NOW, 9) == {}


def test_shares_that_were_left_must_have_been_faster_by_as_much_as_they_scatter() -> None:
    tried = Tried()
    note(tried, LEFT, 3.0, 3.0, 3.0, 3.0)
    assert tried.steps_s(LEFT, 9) == {LEFT: 3.0}
    assert tried.steps_s(NOW, 9) == {LEFT: 3.0}
    note(tried, LEFT, 2.0, 4.0, first=4)
    assert tried.steps_s(NOW, 9)[LEFT] > tried.steps_s(LEFT, 9)[LEFT]


def test_what_was_tried_long_ago_counts_less_but_longer_later_in_a_run() -> None:
    for last in (ENOUGH_STEPS, 10 * REMEMBERED_STEPS):
        tried, half = Tried(), max(REMEMBERED_STEPS, last)
        note(tried, LEFT, *[3.0] * ENOUGH_STEPS, first=last - ENOUGH_STEPS + 1)
        note(tried, NOW, *[2.0] * ENOUGH_STEPS, first=last + half - ENOUGH_STEPS + 1)
        assert tried.residuals(NOW, last)[LEFT] == 3.0
        found = tried.residuals(NOW, last + half)
        assert found == {NOW: 2.0, LEFT: pytest.approx(2.5)}, "the machine may have changed"
        assert tried.steps_s(NOW, last + REMEMBERED_STEPS).keys() == {NOW, LEFT}
        assert tried.steps_s(NOW, last + REMEMBERED_STEPS + 1).keys() == {NOW}


def test_a_step_of_minutes_is_no_residual_of_thousands() -> None:
    tried = Tried()
    note(tried, NOW, *[1000.0] * ENOUGH_STEPS, simulated_s=1e-3)
    assert tried.residuals(NOW, 9) == {NOW: MOST_RESIDUAL}
