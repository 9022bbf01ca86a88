"""When a plan that has settled is looked at again."""

from __future__ import annotations

import pytest

from workers.planning.steady import Steady

SETTLES = 32


def seen(steady: Steady, *steps_s: float, cpu_s: float = 0.5) -> Steady:
    for step_s in steps_s:
        steady.note(step_s, cpu_s)
    return steady


def settled() -> Steady:
    """Its first steps are slower."""
    steady = seen(Steady(), *[1.5] * 8, *[1.0, 1.04, 0.96, 1.0] * 6)
    assert steady.lasts(70.0)
    return steady


def test_it_has_to_settle() -> None:
    steady = Steady()
    for _ in range(SETTLES - 1):
        assert not seen(steady, 1.0).lasts()
    assert seen(steady, 1.0).lasts()
    steady.changed()
    assert not seen(steady, *[1.0] * (SETTLES - 1)).lasts()


def test_what_few_steps_show_is_nothing() -> None:
    steady = settled()
    for _ in range(10):
        assert seen(steady, *[1.0] * 15, *[3.0] * 9).lasts(70.0)


@pytest.mark.parametrize("step_s", [0.9, 1.1, 5.0])
def test_other_steps_are_heeded_until_they_have_become_usual(step_s: float) -> None:
    steady = settled()
    assert seen(steady, *[step_s] * 11).lasts(70.0)
    assert not seen(steady, *[step_s] * 2).lasts(70.0)
    assert not seen(steady, *[step_s] * (SETTLES - 1)).lasts(70.0)
    assert seen(steady, step_s).lasts(70.0)


def test_a_cpu_with_another_pace_is_heeded_though_steps_do_not_show_it() -> None:
    assert seen(settled(), *[1.0] * 24, cpu_s=0.47).lasts(70.0)
    assert not seen(settled(), *[1.0] * 24, cpu_s=0.4).lasts(70.0)


@pytest.mark.parametrize("now", [60.0, 80.0, 0.0])
def test_what_a_plan_was_made_for_is_heeded_at_once(now: float) -> None:
    assert seen(settled(), 1.0).lasts(71.0)
    assert not seen(settled(), 1.0).lasts(now)
