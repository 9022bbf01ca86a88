"""Measurements into a profile: what is smoothed, what is set aside, what is estimated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from planner_layers import facts, made, profile_of

from hytrain.planner.book import LEAST_SLACK, Ewma, MeasurementBook, Rates
from hytrain.planner.contention import REMEMBERED_STEPS, SETTLED_STEPS
from hytrain.planner.policies import drawn_visits
from hytrain.planner.profile import USUAL_SLACK, LayerProfile, Limits, Order, Profile
from hytrain.planner.simulate import simulate


def smoothed(*samples: float) -> Ewma:
    mean = Ewma()
    for sample in samples:
        mean.add(sample)
        mean.check()
    return mean


def book_of(*numels: int, rates: Rates | None = None, ranks: int = 1) -> MeasurementBook:
    """Layers of these sizes with lids 10, 11, …, the highest lid first in the forward order."""
    count = len(numels)
    layers = (made(count - index, lid=10 + index, numel=numel) for index, numel in enumerate(numels))
    return MeasurementBook(facts(layers), rates=rates, ranks=ranks)


def profile_from(book: MeasurementBook) -> dict[int, LayerProfile]:
    return {layer.lid: layer for layer in profile_of(book).layers}


@pytest.mark.parametrize(
    "samples", [(1.0, 1.0, 1.0, 40.0, 1.0, 0.01, 1.0), ([1.0] * 4 + [10.0]) * 50, (30.0, 1.0, 1.0, 1.0)]
)
def test_outliers_leave_no_trace(samples: Sequence[float]) -> None:
    """A lone one, one of five samples, a slow first step."""
    assert smoothed(*samples).value == 1.0


@pytest.mark.parametrize("level", [0.02, 0.3, 2.0, 50.0])
def test_a_new_level_gets_through_in_three_samples(level: float) -> None:
    settled = [1.0, 1.1, 0.9] * 5
    assert smoothed(*settled, level, level).value == smoothed(*settled).value
    assert smoothed(*settled, level, level, level).value == level


def test_wide_noise_is_averaged_and_not_rejected() -> None:
    rng = random.Random(5)
    value = smoothed(*(rng.uniform(0.2, 1.8) for _ in range(400))).value
    assert value is not None and 0.6 < value < 1.4


@pytest.mark.parametrize("wrong", [-1e-9, 1e300, float("nan"), float("inf")])  # a sum of times is a number
def test_impossible_numbers_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="measured time"):
        Ewma().add(wrong)


def test_no_profile_before_forward_and_backward_are_known() -> None:
    book = book_of(100)
    assert book.profile() is None
    book.observe_trainer(forward_s={10: 1.0}, d2h_s={10: 1.0})
    assert book.profile() is None
    book.observe_trainer(backward_s={10: 2.0})
    assert book.profile() is not None
    layer = profile_from(book)[10]
    assert (layer.forward_s, layer.backward_s, layer.d2h_s) == (1.0, 2.0, 1.0)


def test_waits_for_other_ranks_are_no_time_for_updates() -> None:
    """A rank that stalls is about to get other layers. All-gathers that are exposed in all steps are such time."""
    book = book_of(100)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 2.0})

    def other_s(*exposed_s: float) -> float:
        for each_s in exposed_s:
            book.observe_step(step_s=3.5 + each_s, stall_s=0.0, exposed_s=each_s, gpu_lids=())
        return profile_of(book).other_s

    assert other_s(*[0.25] * (SETTLED_STEPS - 1)) == pytest.approx(0.5), "too few to tell"
    assert other_s(0.25) == pytest.approx(0.5 + 0.25)
    assert other_s(*[0.75] * (REMEMBERED_STEPS - SETTLED_STEPS - 1), 0.0) == pytest.approx(0.5 + 0.25), "one without"
    assert other_s(*[0.75] * SETTLED_STEPS) == pytest.approx(0.5 + 0.75), "it lasts"


def test_unmeasured_roles_take_the_rate_of_the_measured_layers() -> None:
    book = book_of(100, 300, 1000)
    book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 2.0, 11: 2.0}, gpu_update_s={12: 5.0})
    book.observe_optimizer(cpu_update_s={10: 3.0, 11: 5.0})
    layers = profile_from(book)
    assert layers[12].cpu_update_s == pytest.approx(20.0)  # 8 s for 400 parameters
    assert layers[10].gpu_update_s == pytest.approx(0.5)
    assert layers[12].gpu_update_s == 5.0
    assert layers[12].forward_s == 0.0, "a layer that is not timed has no work of its own"


def test_visits_are_measured_and_others_take_as_much_longer_than_the_link() -> None:
    """Before, state takes the time of its copy one way."""
    book = book_of(100, 300, 100)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 2.0}, d2h_s={10: 1.0, 11: 3.0, 12: 1.0})
    assert all(layer.visit_s == layer.move_s == pytest.approx(5 * layer.d2h_s) for layer in profile_of(book).layers)
    book.observe_trainer(visit_s={10: 8.0, 12: 12.0})
    layers = profile_from(book)
    assert [layers[lid].visit_s for lid in (10, 11, 12)] == [8.0, pytest.approx(30.0), 12.0]


def test_no_visit_is_shorter_than_an_idle_link_needs() -> None:
    """What is measured beside other copies, and made shorter for that, may be made too short."""
    book = book_of(100, rates=Rates(d2h_s=1.0, h2d_s=2.0, cpu_update_s=3.0, gpu_update_s=4.0))
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0}, visit_s={10: 1.0})
    assert profile_from(book)[10].visit_s == 5 * 2.0 * 100


def test_calibrated_rates_replace_the_assumed_and_measured_layers_both() -> None:
    book = book_of(100, 300, rates=Rates(d2h_s=1.0, h2d_s=2.0, cpu_update_s=3.0, gpu_update_s=4.0))
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0})
    book.calibrate(cpu_update_s=0.5, gpu_update_s=None)
    book.calibrate(d2h_s=0.25)
    assert book._rates == Rates(d2h_s=0.25, h2d_s=2.0, cpu_update_s=0.5, gpu_update_s=4.0)
    assert profile_from(book)[11].cpu_update_s == 150.0
    book.observe_optimizer(cpu_update_s={10: 10.0})
    book.calibrate(cpu_update_s=9.0)
    assert (profile_from(book)[10].cpu_update_s, profile_from(book)[11].cpu_update_s) == (10.0, 30.0)


def test_a_known_change_of_the_cpu_scales_all_and_the_next_sample_counts_at_once() -> None:
    book = book_of(100, 100, 100)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0}, d2h_s={10: 1.0})
    for _ in range(5):
        book.observe_optimizer(cpu_update_s={10: 1.0, 11: 2.0})
    book.cpu_changed(0.5)
    layers = profile_from(book)
    assert layers[11].cpu_update_s == 2 * layers[10].cpu_update_s and 1.3 < layers[10].cpu_update_s < 2.0
    assert layers[10].d2h_s == 1.0
    book.observe_optimizer(cpu_update_s={10: 1.9})
    assert profile_from(book)[10].cpu_update_s == 1.9
    book.cpu_changed(2.0)
    assert 1.0 < profile_from(book)[10].cpu_update_s < 1.5
    assert book._rates.cpu_update_s == pytest.approx(Rates().cpu_update_s)


def test_what_is_not_measured_any_more_goes_with_what_is() -> None:
    book = book_of(100, 100, 100)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0})
    for _ in range(6):
        book.observe_optimizer(cpu_update_s={10: 1.0, 11: 2.0})
        book.observe_optimizer(cpu_update_s={12: 4.0})  # the same step's second report
    for _ in range(5):
        book.observe_optimizer(cpu_update_s={10: 3.0})
        book.observe_optimizer(cpu_update_s={11: 6.0})
    layers = profile_from(book)
    assert (layers[10].cpu_update_s, layers[11].cpu_update_s) == (3.0, 6.0)
    assert layers[12].cpu_update_s == pytest.approx(12.0), "and keeps its own proportion"


def test_few_layers_say_nothing_of_the_others() -> None:
    """Neither a tiny one, whether it is the first that is measured or changes alone, nor one that others delay."""
    book = book_of(100, 100, 100, 100, 1)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0})
    book.observe_optimizer(cpu_update_s={14: 0.1})
    assert profile_from(book)[10].cpu_update_s == 100 * book._rates.cpu_update_s
    for _ in range(6):
        book.observe_optimizer(cpu_update_s={10: 1.0, 11: 1.0, 12: 1.0, 13: 1.0, 14: 0.1})
    for _ in range(6):
        book.observe_optimizer(cpu_update_s={10: 1.0, 11: 1.0, 12: 40.0})
    for _ in range(6):
        book.observe_optimizer(cpu_update_s={14: 0.2})
    layers = profile_from(book)
    assert [layers[lid].cpu_update_s for lid in (10, 12, 13, 14)] == [1.0, 40.0, 1.0, 0.2]


def test_what_layers_do_not_explain_is_the_loop_s_own_time_but_not_stalls() -> None:
    book = book_of(100, 300)
    book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 2.0, 11: 2.0}, gpu_update_s={10: 0.5})

    assert profile_of(book).other_s == 0.0
    book.observe_step(step_s=9.0, stall_s=1.5, gpu_lids=(10,))
    assert profile_of(book).other_s == pytest.approx(1.0)
    book.observe_step(step_s=60.0, stall_s=1.5, gpu_lids=(10,))
    assert profile_of(book).other_s == pytest.approx(1.0), "an evaluation between two steps"
    for _ in range(9):
        book.observe_step(step_s=5.0, stall_s=0.0, gpu_lids=())
    assert profile_of(book).other_s == 0.0, "never negative"


def test_the_middle_of_a_step_with_several_backwards_hides_no_updates() -> None:
    book = book_of(100, 300)
    book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 2.0, 11: 2.0})
    book.observe_optimizer(cpu_update_s={10: 4.0, 11: 12.0})
    book.observe_step(step_s=106.0, stall_s=0.0, gpu_lids=(), middle_s=100.0)
    profile = profile_of(book)
    here, there = simulate(profile, frozenset()), simulate(replace(profile, middle_s=0.0), frozenset())
    assert profile.other_s == 0.0 and here.stalls_s == there.stalls_s and here.stall_s > 1.0
    assert here.step_s == pytest.approx(there.step_s + 100.0)


def test_where_updates_begin_says_what_the_loop_s_time_is() -> None:
    """What was its own before, the CPU's updates had, is in the middle now; until a step has shown it, nothing is."""
    book = book_of(100, 300)
    book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 2.0, 11: 2.0})
    book.observe_step(step_s=10.0, stall_s=0.0, gpu_lids=())
    assert profile_of(book).other_s == pytest.approx(4.0)
    book.begin_updates(in_step=True, layers=book._layers)
    assert profile_of(book).other_s == 0.0
    book.observe_step(step_s=10.0, stall_s=0.0, gpu_lids=(), middle_s=3.0)
    assert (profile_of(book).other_s, profile_of(book).middle_s) == (pytest.approx(1.0), 3.0)


def test_layers_come_by_rank_and_ranks_can_be_learned_again() -> None:
    book = book_of(1, 1, 1)
    book.observe_trainer(forward_s={10: 1.0}, backward_s={10: 1.0})
    assert list(profile_from(book)) == [12, 11, 10]
    book.reorder({10: 0, 12: 5, 11: 7})
    assert list(profile_from(book)) == [10, 12, 11]
    with pytest.raises(ValueError, match="every layer"):
        book.reorder({10: 0})
    with pytest.raises(ValueError, match="layer 99"):
        book.observe_optimizer(cpu_update_s={99: 1.0})


def test_sums_and_limits() -> None:
    book = book_of(100, 300)
    book.observe_trainer(forward_s={10: 1.0, 11: 2.0}, backward_s={10: 2.0, 11: 3.0}, gpu_update_s={10: 1.0})
    book.observe_optimizer(cpu_update_s={10: 4.0})
    profile = profile_of(book)
    assert (profile.numel, profile.forward_s, profile.backward_s) == (400, 3.0, 5.0)
    assert (profile.cpu_update_s, profile.alpha) == (16.0, 0.25)
    first = frozenset({11})
    assert profile.k_of(first) == 0.75
    assert profile.gpu_state_bytes(first) == 3000 and profile.host_bytes(first) == 1400
    assert Limits(gpu_state_bytes=3000, host_bytes=1400).allow(profile, first)
    assert not Limits(gpu_state_bytes=2999).allow(profile, first)
    assert not Limits(host_bytes=1399).allow(profile, first)


@pytest.mark.parametrize("parts", [1, 2])
def test_slack_is_what_the_slower_steps_have_taken_longer(parts: int) -> None:
    """One in five takes twice as long; a report may have a part of the layers."""
    book = book_of(1000, 1000)
    book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 1.0, 11: 1.0})
    assert profile_of(book).cpu_slack == USUAL_SLACK
    for step in range(40):
        update_s = 40.0 if step % 5 == 3 else 20.0
        for lids in ((10, 11),) if parts == 1 else ((10,), (11,)):
            book.observe_optimizer(cpu_update_s=dict.fromkeys(lids, update_s))
    assert profile_of(book).cpu_slack == pytest.approx(2 * (1 + LEAST_SLACK) - 1, rel=0.15)
    book.cpu_changed(0.5)
    assert profile_of(book).cpu_slack == USUAL_SLACK, "what was seen with other threads says nothing"


def test_the_slowest_of_several_ranks_is_more_often_slow() -> None:
    """One step in eight takes twice as long on each rank, so two in five on one of four."""
    found = {}
    for ranks in (1, 4):
        book = book_of(1000, 1000, ranks=ranks)
        book.observe_trainer(forward_s={10: 1.0, 11: 1.0}, backward_s={10: 1.0, 11: 1.0})
        for step in range(24):
            book.observe_optimizer(cpu_update_s=dict.fromkeys((10, 11), 40.0 if step % 8 == 3 else 20.0))
        found[ranks] = [pace > 1.5 for pace in profile_of(book).cpu_paces]
        slack = profile_of(book).cpu_slack
    assert found == {1: [False, False, False], 4: [False, False, True]} and slack > 0.5


def test_what_must_visit_does_so_before_others() -> None:
    """Unless the GPU owns it; the share counts it, and what visits take on the GPU counts the share."""
    layers = [made(lid, must_visit=lid % 2 == 1, held_bytes=200, grads_bytes=200) for lid in range(8)]
    must = {1, 3, 5, 7}
    for gpu_lids in (frozenset[int](), frozenset({1, 2}), frozenset(must), frozenset(range(8))):
        for share in (0.0, 0.3, 0.5, 0.75, 1.0):
            found = Order(layers).visiting(gpu_lids, frozenset(), share)
            assert must - gpu_lids <= found and not found & gpu_lids
            assert len(found) == max(len(must - gpu_lids), min(8 - len(gpu_lids), round(8 * share + 0.4)))
        for seed in range(20):
            drawn = drawn_visits(layers, gpu_lids, seed)
            assert must - gpu_lids <= drawn and not drawn & gpu_lids
    profile = Profile(layers=tuple(layers), for_visits_bytes=70)
    assert profile.must_visit == 0.5 and profile.held_for_visits_bytes == 70
    waiting = replace(profile, awaits_verdict=True)
    assert waiting.held_for_visits_bytes == 70 + 4 * 200 + 200
    assert replace(waiting, visit=0.75).held_for_visits_bytes == 70 + 6 * 200 + 200
    assert profile.host_bytes(frozenset()) == 8 * 1400 - 4 * 200
