"""What updates on the CPU cost forward and backward: how it is learned, and what a step with it looks like."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planner_layers import NONE, facts, made, profile_of

from hytrain.planner.book import MeasurementBook
from hytrain.planner.contention import (
    CPU_LOSS,
    ENOUGH_STEPS,
    LITTLE,
    MOST_LOST,
    REMEMBERED_STEPS,
    SETTLED_STEPS,
    TYPICAL_DRAG,
    VISIT_LOSS,
    WORK_LOSS,
    Contention,
    Crowding,
    VisitsCost,
    beside,
)
from hytrain.planner.profile import Profile
from hytrain.planner.simulate import simulate
from protocol.placement import Places

SOME, ALL = frozenset({0}), frozenset({0, 1})
TINY_S = 1e-242  # its square is 0


def observe(contention: Contention, owned: frozenset[int], *steps: tuple[float, float], starved: float = 1.0) -> None:
    """Steps of (work, beside) under one plan."""
    for work_s, beside_s in steps:
        contention.observe(owned, work_s=work_s, stall_s=0.0, beside_s=beside_s, starved=starved)
        contention.check()


def test_what_is_usual_holds_until_something_was_seen() -> None:
    contention = Contention()
    observe(contention, NONE, *[(1.0, 1.0)] * (ENOUGH_STEPS - 1))
    assert contention.drag == 0.0
    observe(contention, NONE, (1.0, 1.0))
    assert contention.drag == pytest.approx(TYPICAL_DRAG)
    other = Contention()
    observe(other, NONE, *[(1.0, 1.0)] * ENOUGH_STEPS, starved=0.5)
    assert other.drag == pytest.approx(TYPICAL_DRAG / 2)


@pytest.mark.parametrize("drag", [0.0, 0.2, 0.6])
def test_two_plans_tell_it(drag: float) -> None:
    """Of 10 s of work, one plan has all beside updates, the other 2 s of it."""
    contention = Contention()
    observe(contention, NONE, *[(10 / (1 - drag), 10 / (1 - drag))] * 4)
    observe(contention, SOME, *[(10 + drag * 2, 2.0)] * ENOUGH_STEPS)
    assert contention.drag == pytest.approx(drag, abs=0.02)


@pytest.mark.parametrize(
    ("before", "owned", "after", "starved", "drag"),
    [
        ((10.0, 8.0), SOME, [(12.0, 8.3)] * ENOUGH_STEPS, 1.0, TYPICAL_DRAG),
        ((10.0, 10.0), SOME, [(9.7, 8.5)] * ENOUGH_STEPS, 0.0, 0.0),
        ((10.0, 10.0), NONE, [(30.0, 10.0), (10.0, 10.0)], 1.0, TYPICAL_DRAG),
    ],
    ids=["plans that differ by little", "noise where the device never waits", "a lone long step"],
)
def test_what_says_nothing(before: Any, owned: frozenset[int], after: Any, starved: float, drag: float) -> None:
    contention = Contention()
    observe(contention, NONE, *[before] * 4, starved=starved)
    observe(contention, owned, *after, starved=starved)
    assert contention.drag == pytest.approx(drag, abs=0.01)


def test_other_work_begins_anew() -> None:
    contention = Contention()
    observe(contention, NONE, *[(10.0, 10.0)] * 4)
    observe(contention, NONE, *[(30.0, 10.0)] * ENOUGH_STEPS, starved=0.0)
    assert contention.drag == 0.0
    observe(contention, SOME, *[(25.0, 0.0)] * ENOUGH_STEPS, starved=0.0)
    assert contention.drag < 0.01, "the plan before was for other work"


@pytest.mark.parametrize("waits", [0.0, 0.9])
def test_a_host_that_slows_down_is_not_taken_for_other_work(waits: float) -> None:
    """All layers are the GPU's, so updates have no part in it; if the device does not wait, it has more to do."""
    contention = Contention()
    observe(contention, NONE, *[(16.0, 16.0)] * 4)
    observe(contention, ALL, *[(10.0, 0.0)] * 8, starved=0.3)
    learned = contention.drag
    assert learned == pytest.approx(6 / 16, abs=0.02)
    observe(contention, ALL, *[(14.0, 0.0)] * 8, starved=waits)
    if waits:
        assert contention.drag == pytest.approx(learned, abs=0.02)
        observe(contention, ALL, *[(9.0, 0.0)] * 8, starved=0.0)
        assert contention.drag == pytest.approx(learned, abs=0.02), "the host is as it was"
    else:
        assert contention.drag == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from([NONE, SOME, ALL]), st.floats(0, 10), st.floats(0, 10), st.floats(0, 20)), max_size=40
    )
)
def test_it_is_a_share_whatever_is_seen(steps: list[tuple[frozenset[int], float, float, float]]) -> None:
    contention = Contention()
    for owned, work_s, cpu_busy_s, starved in steps:
        observe(contention, owned, (work_s, beside(work_s, cpu_busy_s, 0.0)), starved=starved)
    assert 0.0 <= contention.drag <= MOST_LOST


TWO = facts(made(position, numel=1 << 24) for position in range(2))


@given(st.floats(0, MOST_LOST), st.frozensets(st.integers(0, 5)))
def test_drag_makes_no_step_shorter_and_none_that_the_cpu_has_no_part_in_longer(
    drag: float, owned: frozenset[int]
) -> None:
    layers = tuple(made(position, numel=1 << 24, cpu_update_s=1.0, gpu_update_s=0.1) for position in range(6))
    without, there = simulate(Profile(layers=layers), owned), simulate(Profile(layers=layers, drag=drag), owned)
    assert there.step_s >= without.step_s - 1e-9
    assert there.step_s <= without.step_s + 18.0 * drag / (1 - drag) + 1e-9
    if len(owned) == 6:
        assert there == without


def test_times_are_those_beside_an_idle_cpu_and_the_prediction_is_what_was_measured() -> None:
    book = MeasurementBook(TWO)
    for _ in range(6):  # of 10 s of work, 5 s beside updates; 1 s is the loop's own
        book.observe_contention(
            work_s=10.0,
            stall_s=0.0,
            cpu_busy_s=5.0,
            starved=1.0,
            places=Places.chosen(2, {0}),
            crowding=Crowding(),
            cpu_update_s={},
        )
        book.observe_trainer(
            forward_s={0: 2.0, 1: 2.0}, backward_s={0: 3.0, 1: 3.0}, d2h_s={1: 0.0}, h2d_s={1: 0.0}, gpu_update_s={0: 0}
        )
        book.observe_optimizer(cpu_update_s={1: 5.0})
        book.observe_step(step_s=11.0, stall_s=0.0, gpu_lids=(0,))
        book.check()
    profile = profile_of(book)
    assert profile.drag == pytest.approx(TYPICAL_DRAG)
    assert profile.forward_s + profile.backward_s == pytest.approx(8.0)
    assert profile.other_s == pytest.approx(1.0)
    assert simulate(profile, SOME).step_s == pytest.approx(11.0, rel=0.01)


@pytest.mark.parametrize(("beside_s", "is_forgotten"), [(4.0, True), (3.8, True), (2.5, False), (1.0, False)])
def test_waiting_that_has_ended_is_forgotten_if_the_cpu_updates_as_before(beside_s: float, is_forgotten: bool) -> None:
    """If it updates less, that may be why. In the end, this is forgotten, too."""
    contention = Contention()
    observe(contention, NONE, *[(5.0, 4.0)] * ENOUGH_STEPS)
    observe(contention, NONE, *[(5.0, beside_s)] * 100, starved=0.0)
    assert contention.drag < 0.01 if is_forgotten else contention.drag > 0.3
    observe(contention, NONE, *[(5.0, beside_s)] * 5000, starved=0.0)
    assert contention.drag < 0.01


def test_what_two_plans_told_is_not_forgotten_where_the_second_one_ends_the_waiting() -> None:
    contention = Contention()
    observe(contention, NONE, *[(0.7, 0.65)] * 8)
    observe(contention, SOME, *[(0.58, 0.32)] * 100, starved=0.0)
    assert contention.drag == pytest.approx(0.12 / 0.33, abs=0.05)


@pytest.mark.parametrize("busy", [ENOUGH_STEPS, 12])
def test_steps_while_a_host_is_busy_tell_nothing_of_others(busy: int) -> None:
    book = MeasurementBook(TWO)
    told = []
    steps = [(0.57, 0.0)] * 16 + [(0.85, 1.0)] * busy + [(0.57, 0.0)] * 2
    for work_s, starved in steps:
        step = {"work_s": work_s, "stall_s": 0.0, "cpu_busy_s": 0.5, "starved": starved}
        told.append(
            book.observe_contention(**step, places=Places.chosen(2, SOME), crowding=Crowding(), cpu_update_s={})
        )
        book.check()
    assert told == [starved == 0.0 for _, starved in steps]
    assert book._contention.drag < 0.01


@pytest.mark.parametrize(
    "changes",
    [{"work_s": 0.2}, {"stall_s": 0.2}, {"starved": 0.2}, {"gpu_lids": SOME}],
    ids=["shorter, as of a smaller batch", "a long stall", "hardly any waiting", "another plan"],
)
def test_what_makes_a_device_wait_but_a_busy_host(changes: dict[str, Any]) -> None:
    contention = Contention()
    observe(contention, NONE, *[(0.57, 0.5)] * 16, starved=0.0)
    busy: dict[str, Any] = {"gpu_lids": NONE, "work_s": 0.85, "stall_s": 0.0, "starved": 1.0}
    assert contention.is_unusual(**busy)
    assert not contention.is_unusual(**busy | changes)


@pytest.mark.parametrize("pattern", [(1.0,), (0.0, 1.0)])
def test_what_is_frequent_tells_of_others(pattern: tuple[float, ...]) -> None:
    contention = Contention()
    observe(contention, NONE, *[(0.57, 0.5)] * 16, starved=0.0)
    for starved in pattern * 24:
        observe(contention, NONE, (0.57 + 0.1 * starved, 0.5), starved=starved)
    assert not contention.is_unusual(NONE, work_s=0.67, stall_s=0.0, starved=1.0)


def test_a_host_that_is_busy_for_a_while_keeps_what_is_usual() -> None:
    """Also where the device waits for some launches anyway."""
    contention = Contention()
    observe(contention, NONE, *[(0.57, 0.5)] * 16, starved=0.2)
    usual = contention.drag
    observe(contention, NONE, *[(0.85, 0.6)] * 10)
    assert contention.drag == pytest.approx(usual, abs=0.01)


def test_steps_with_long_stalls_are_not_compared_with_others() -> None:
    """Work is longer there since nothing is launched ahead, not by the updates beside it."""
    contention = Contention()
    for _ in range(4):
        contention.observe(NONE, work_s=13.0, stall_s=6.0, beside_s=10.0, starved=0.5)
    observe(contention, SOME, *[(10.0, 4.0)] * ENOUGH_STEPS, starved=0.0)
    assert contention.drag == 0.0


@pytest.mark.parametrize(
    ("times", "cpu", "visits", "lost_for_s"),
    [
        ({"cpu_s": 1.0, "visits_s": 0.0, "copies_s": 1.0, "work_s": 4.0}, 1.0, 1.0, 0.0),
        ({"cpu_s": 0.0, "visits_s": 1.0, "copies_s": 0.0, "work_s": 4.0}, 1.0, 1.0, 1.0),
        ({"cpu_s": 2.0, "visits_s": 1.0, "copies_s": 2.0, "work_s": 4.0}, 1 + CPU_LOSS, 2 * (1 + VISIT_LOSS), 2.9),
        ({"cpu_s": 1.0, "visits_s": 4.0, "copies_s": 2.0, "work_s": 4.0}, 1 + CPU_LOSS, 1.5 + VISIT_LOSS / 4, 4.0),
        ({"cpu_s": 4.0, "visits_s": 1.0, "copies_s": 0.0, "work_s": 4.0}, 1 + CPU_LOSS / 4, 1 + VISIT_LOSS, 1.45),
        ({"cpu_s": 0.0, "visits_s": 1.0, "copies_s": 9.0, "work_s": 4.0}, 1.0, 2.0, 2.0),
        ({"cpu_s": 0.0, "visits_s": 9.0, "copies_s": 0.0, "work_s": 1.0, "other_s": 9.0}, 1.0, 1.0, 1.0),
    ],
    ids=[
        "no visits",
        "visits alone",
        "copies on half of the step",
        "longer than the step",
        "a part of the updates",
        "copies that take turns",
        "beside the loop's own work",
    ],
)
def test_what_updates_visits_and_copies_cost_each_other(
    times: dict[str, float], cpu: float, visits: float, lost_for_s: float
) -> None:
    crowding = Crowding.of(**times)
    assert (crowding.cpu, crowding.visits) == (pytest.approx(cpu), pytest.approx(visits))
    assert crowding.work_lost_s == pytest.approx(WORK_LOSS * lost_for_s)


@given(
    alone_s=st.floats(1e-6, 10),
    known_s=st.floats(1e-6, 10),
    cpu_s=st.floats(0, 10),
    copies_s=st.floats(0, 10),
    work_s=st.floats(1e-3, 10),
    other_s=st.floats(0, 10),
)
@example(alone_s=10.0, known_s=9.0, cpu_s=0.0, copies_s=6.0, work_s=1.0, other_s=0.0)  # longer than the step
def test_visits_are_known_from_what_they_take_beside_others(alone_s: float, known_s: float, **others: float) -> None:
    """However often: what is known of them comes nearer to the truth, from above and from below."""
    taken_s = alone_s * Crowding.of(visits_s=alone_s, **others).visits
    found_s = taken_s / Crowding.of(visits_s=known_s, **others).visits
    assert abs(math.log(found_s / alone_s)) <= abs(math.log(known_s / alone_s)) + 1e-9


def cost_of_updates() -> VisitsCost:
    return VisitsCost(CPU_LOSS)


def under(cost: VisitsCost, placed: str, beside: float, *times_s: float) -> None:
    """Steps under one plan, with visits beside this share of something."""
    for time_s in times_s:
        cost.observe(placed, beside=beside, time_s=time_s)
        cost.check()


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5])
@pytest.mark.parametrize(("first", "then"), [(0.0, 0.9), (0.9, 0.0), (0.2, 1.0)])
def test_what_visits_cost_is_learned_from_two_plans(fraction: float, first: float, then: float) -> None:
    """The first steps after layers have moved are slow for other reasons."""
    cost = cost_of_updates()
    under(cost, "few", first, *[2 * (1 + fraction * first)] * ENOUGH_STEPS)
    assert cost.value == pytest.approx(CPU_LOSS), "what is usual, so far"
    usual = 2 * (1 + fraction * then)
    under(cost, "many", then, *[3 * usual] * (SETTLED_STEPS - ENOUGH_STEPS), *[usual] * ENOUGH_STEPS)
    assert cost.value == pytest.approx(fraction, abs=0.1)


def test_plans_that_soon_end_are_passed_over() -> None:
    cost = cost_of_updates()
    under(cost, "none", 0.0, *[1.0] * ENOUGH_STEPS)
    for name in ("some", "more"):
        under(cost, name, 0.5, *[3.0] * (SETTLED_STEPS - 1))
    under(cost, "many", 1.0, *[1.5] * SETTLED_STEPS)
    assert cost.value == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.1, 1.3, 3.0])
@pytest.mark.parametrize("beside", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("more", [0.0, -0.9 * LITTLE])
def test_a_machine_that_changes_beside_as_many_visits_says_nothing_of_them(
    factor: float, beside: float, more: float
) -> None:
    cost = cost_of_updates()
    for placed, part, time_s in (("a", beside, 1.0), ("b", beside + more, factor)):
        under(cost, placed, part, *[time_s] * SETTLED_STEPS)
    assert cost.value == pytest.approx(CPU_LOSS)


@pytest.mark.parametrize(("then", "time_s"), [(0.3, 2.0), (0.9, 0.4), (0.9, 2.5)])
def test_what_visits_cannot_have_cost_had_another_reason(then: float, time_s: float) -> None:
    cost = cost_of_updates()
    under(cost, "none", 0.0, *[1.0] * SETTLED_STEPS)
    under(cost, "some", then, *[time_s] * SETTLED_STEPS)
    assert cost.value == pytest.approx(CPU_LOSS)


def test_a_plan_of_long_ago_is_not_compared() -> None:
    cost = cost_of_updates()
    under(cost, "none", 0.0, *[1.0] * SETTLED_STEPS)
    for number in range(REMEMBERED_STEPS // 4):
        under(cost, f"{number}", 0.9, *[1.9] * 4)
    under(cost, "last", 0.9, *[1.9] * SETTLED_STEPS)
    assert cost.value == pytest.approx(CPU_LOSS)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 1), st.lists(st.floats(0, 10), min_size=1, max_size=20)),
        max_size=8,
    )
)
@example([("b", 1.0, [0.0, 1.0, TINY_S]), ("a", 0.0, [*[0.0] * 6, 1.0, TINY_S])])
def test_the_cost_is_a_fraction_whatever_is_seen(plans: list[tuple[str, float, list[float]]]) -> None:
    cost = cost_of_updates()
    for placed, part, times_s in plans:
        under(cost, placed, part, *times_s)
    assert 0.0 <= cost.value <= MOST_LOST


def test_times_are_those_without_visits_also_after_their_cost_was_learned() -> None:
    """Beside visits updates take half longer, and of 10 s of work beside them 1.5 s are lost.

    Before that is known, times are corrected by what is usual.
    """
    book = MeasurementBook(TWO)
    both = frozenset({0, 1})
    for visiting, update_s, work_s in ((NONE, 1.0, 20.0), (frozenset({2}), 1.5, 21.5)):
        for _ in range(SETTLED_STEPS):
            crowding = Crowding(beside_cpu=1.0, beside_work_s=10.0) if visiting else Crowding()
            book.observe_contention(
                work_s=work_s,
                stall_s=0.0,
                cpu_busy_s=2 * update_s,
                starved=0.0,
                places=Places.chosen(3, NONE, visiting),
                crowding=crowding,
                cpu_update_s=dict.fromkeys(both, update_s),
            )
            book.observe_trainer(forward_s=dict.fromkeys(both, work_s / 4), backward_s=dict.fromkeys(both, work_s / 4))
            book.observe_step(step_s=work_s + 1.0, stall_s=0.0, gpu_lids=())
            cpu_loss = profile_of(book).cpu_loss
            book.observe_optimizer(cpu_update_s=dict.fromkeys(both, update_s / (1 + cpu_loss * crowding.beside_cpu)))
            book.check()
    profile = profile_of(book)
    assert profile.cpu_loss == pytest.approx(0.5, abs=0.05)
    assert profile.cpu_update_s * (1 + profile.cpu_loss) == pytest.approx(2 * 1.5, rel=0.05)
    assert profile.cpu_slack < 0.2, "nor does it look as if the CPU had been slower"
    assert profile.work_loss == pytest.approx(0.15, abs=0.03)
    assert profile.forward_s + profile.backward_s == pytest.approx(20.0, rel=0.02)
    assert profile.other_s == pytest.approx(1.0, abs=0.3)
