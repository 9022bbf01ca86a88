"""How long steps were with shares that have been tried."""

from __future__ import annotations

import pytest

from workers.planning.tried import FADING_STEPS, MARGIN_TO_LEFT, MOST_RESIDUAL, RESIDUAL_STEPS, Tried

NOW, LEFT = (0.0, 0.0), (0.5, 0.0)


def note(tried: Tried, shares: tuple[float, float], *steps_s: float, first: int = 0, simulated_s: float = 1.0) -> None:
    for step, step_s in enumerate(steps_s, start=first):
        tried.note(shares, step, step_s=step_s, simulated_s=simulated_s)


def test_too_few_steps_tell_nothing() -> None:
    tried = Tried()
    note(tried, NOW, *[2.0] * (RESIDUAL_STEPS - 1))
    assert tried.residuals(NOW, 9) == tried.steps_s(NOW, 9) == {}
    note(tried, NOW, 2.0)
    assert tried.residuals(NOW, 9) == tried.steps_s(NOW, 9) == {NOW: 2.0}
    tried.forget()
    assert tried.residuals(NOW, 9) == {}


def test_shares_that_were_left_must_have_been_clearly_faster() -> None:
    tried = Tried()
    note(tried, LEFT, 3.0, 3.0, 3.0, 3.0)
    assert tried.steps_s(LEFT, 9) == {LEFT: 3.0}
    assert tried.steps_s(NOW, 9) == {LEFT: pytest.approx(3.0 * (1 + MARGIN_TO_LEFT))}
    note(tried, LEFT, 2.0, 4.0, first=4)
    assert tried.steps_s(NOW, 9)[LEFT] > (1 + MARGIN_TO_LEFT) * tried.steps_s(LEFT, 9)[LEFT], "steps scatter"


def test_what_was_tried_long_ago_counts_less_but_longer_later_in_a_run() -> None:
    for last in (RESIDUAL_STEPS, 10 * FADING_STEPS):
        tried, half = Tried(), max(FADING_STEPS, last)
        note(tried, LEFT, *[3.0] * RESIDUAL_STEPS, first=last - RESIDUAL_STEPS + 1)
        note(tried, NOW, *[2.0] * RESIDUAL_STEPS, first=last + half - RESIDUAL_STEPS + 1)
        assert tried.residuals(NOW, last)[LEFT] == 3.0
        found = tried.residuals(NOW, last + half)
        assert found == {NOW: 2.0, LEFT: pytest.approx(2.5)}, "the machine may have changed"
        assert tried.steps_s(NOW, last + FADING_STEPS).keys() == {NOW, LEFT}
        assert tried.steps_s(NOW, last + FADING_STEPS + 1).keys() == {NOW}


def test_a_step_of_minutes_is_no_residual_of_thousands() -> None:
    tried = Tried()
    note(tried, NOW, *[1000.0] * RESIDUAL_STEPS, simulated_s=1e-3)
    assert tried.residuals(NOW, 9) == {NOW: MOST_RESIDUAL}
