"""The pipeline on paper, and the decisions made with it."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_layers import NONE, made, with_cpu

import hytrain.planner.contention as contention
import hytrain.planner.policies as policies
from hytrain.planner.deadline import explained_s
from hytrain.planner.ladder import Infeasible, balance_k, prefix_for
from hytrain.planner.policies import Decision, decide
from hytrain.planner.profile import Known, LayerProfile, Limits, Profile, Question, Split
from hytrain.planner.simulate import Timeline, simulate
from protocol.messages import OBJECTIVES
from protocol.placement import Places
from workers.planning.mode import ahead, gain

LAST = 63  # the lid of the first layer


def layer(position: int, **changes: float) -> LayerProfile:
    """Lids run against positions, so that mixing them up is seen."""
    return made(position, **{"lid": LAST - position} | changes)


def uniform(count: int, **changes: float) -> Profile:
    return Profile(layers=tuple(layer(position, **changes) for position in range(count)))


def lids(*positions: int) -> frozenset[int]:
    return frozenset(LAST - position for position in positions)


def choose(policy: str, profile: Profile, limits: Limits | None = None, **changes: Any) -> Decision:
    usual: dict[str, Any] = {"fixed_k": 0.5, "current": NONE, "horizon_steps": 100, "min_gain": 0.02}
    return decide(Question(policy=policy, limits=limits or Limits(), **(usual | changes)), profile)


def busy_s(timeline: Timeline) -> float:
    """How long the GPU works in a step without micro-batches."""
    work = ("forward", "backward", "gpu_update")
    return sum(end_s - start_s for kind, _, start_s, end_s in timeline.events if kind in work)


times = st.just(0.0) | st.floats(1e-6, 10)
profiles = st.lists(
    st.fixed_dictionaries(
        {name: times for name in ("forward_s", "backward_s", "d2h_s", "h2d_s", "cpu_update_s", "gpu_update_s")}
        | {"numel": st.integers(1, 1000)}
    ),
    min_size=1,
    max_size=12,
).map(lambda many: Profile(layers=tuple(layer(position, **one) for position, one in enumerate(many))))
tile_numels = st.integers(1, 2000)


def subsets(profile: Profile) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.sampled_from(sorted(profile.lids)))


def test_two_layers_in_one_tile_each() -> None:
    two = uniform(2, d2h_s=1.0, h2d_s=1.0)
    timeline = simulate(two, NONE)
    first, second = LAST, LAST - 1
    assert set(timeline.events) == {
        ("backward", second, 0, 2),
        ("backward", first, 2, 4),
        ("d2h", second, 2, 3),
        ("d2h", first, 4, 5),
        ("cpu_update", second, 3, 6),
        ("cpu_update", first, 6, 9),
        ("h2d", second, 6, 7),
        ("h2d", first, 9, 10),
        ("stall", first, 4, 10),
        ("forward", first, 10, 11),
        ("forward", second, 11, 12),
    }
    assert (timeline.step_s, busy_s(timeline), timeline.cpu_busy_s) == (12, 6, 6)
    assert timeline.stalls_s == {first: 6}
    assert simulate(replace(two, other_s=2.0), NONE).stalls_s == {first: 4}, "the loop's own time hides updates"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits, updates on the CPU and the GPU's work do not slow each other down."""
    monkeypatch.setattr(contention, "VISIT_LOSS", 0.0)
    for name in ("cpu_loss", "work_loss"):
        monkeypatch.setitem(Profile.__init__.__kwdefaults__, name, 0.0)


@pytest.mark.usefixtures("alone")
def test_a_visit_takes_the_link_in_both_directions_while_other_copies_pass() -> None:
    """State is five times as long on its way as weights. Copies that pass make the visits longer."""
    two = replace(uniform(2, d2h_s=1.0, h2d_s=1.0), visit=0.5)
    timeline, first, second = simulate(two, NONE), LAST, LAST - 1
    assert two.places(NONE).visiting == {second} and two.places(two.lids).visiting == NONE
    assert [event for event in timeline.events if event[0] in ("visit", "cpu_update", "stall")] == [
        ("cpu_update", first, 5, 8),
        ("visit", second, 2, 8),
        ("stall", first, 4, 9),
    ]
    both = replace(two, visit=1.0)
    for profile, order in ((both, [(second, 2, 7), (first, 7, 12)]), (_held(both), [(first, 4, 9), (second, 9, 14)])):
        events = simulate(profile, NONE).events
        assert [event[1:] for event in events if event[0] == "visit"] == order
    assert (_held(both).held_for_visits_bytes, both.held_for_visits_bytes) == (400, 0), "gradients await the verdict"


@pytest.mark.usefixtures("alone")
def test_visits_that_would_make_others_wait_are_put_off() -> None:
    """Forward, which needs the first layer first, would otherwise wait for all of them."""
    four = Profile(layers=tuple(replace(each, waiting_bytes=200) for each in uniform(4).layers), visit=1.0)
    four = replace(four, layers=tuple(replace(each, visit_s=3.0, forward_s=3.0) for each in four.layers))
    first, second, third, fourth = (LAST - position for position in range(4))
    timelines = [simulate(replace(four, hold_bytes=nbytes), NONE) for nbytes in (399, 800)]
    visits = [[event[1:] for event in each.events if event[0] == "visit"] for each in timelines]
    assert visits[0] == [(fourth, 2, 5), (third, 5, 8), (second, 8, 11), (first, 11, 14)], "there is no memory for it"
    assert visits[1] == [(fourth, 2, 5), (third, 5, 8), (first, 8, 11), (second, 11, 14)]
    assert [each.step_s for each in timelines] == [14 + 12, 11 + 12]


@pytest.mark.usefixtures("alone")
def test_offloaded_weights_that_are_put_off_stay_until_forward() -> None:
    """They take no room in the window meanwhile, and none is put off where they have no other."""
    many = offloadable(uniform(10, h2d_s=0.5))
    layers = tuple(replace(each, visit_s=3.0, waiting_bytes=200, forward_s=3.0) for each in many.layers)
    many = replace(many, layers=layers, offload=1.0, visit=1.0)
    for nbytes, put_off, fetched in ((800, [], [3, 4, 5, 6, 7, 8, 9]), (2400, [6, 8], [5, 7, 9])):
        events = simulate(replace(many, hold_bytes=nbytes), NONE).events
        over_s = max(end_s for kind, _, _, end_s in events if kind == "backward")
        visits = [LAST - lid for kind, lid, *_ in events if kind == "visit"]
        assert visits[visits.index(0) + 1 :] == put_off, "in forward order, after those that are not put off"
        assert [LAST - lid for kind, lid, start_s, _ in events if kind == "fetch" and start_s >= over_s] == fetched


@pytest.mark.usefixtures("alone")
def test_blocks_that_wait_for_visits_widen_the_window_of_offloaded_weights() -> None:
    """By half of what may wait."""
    many = offloadable(uniform(8, h2d_s=0.1))
    layers = tuple(replace(each, visit_s=2.5, waiting_bytes=1) for each in many.layers)
    many = replace(many, layers=layers, offload=1.0, visit=1.0)
    waited = [simulate(replace(many, hold_bytes=nbytes), NONE).fetch_s for nbytes in (399, 400, 1600, 2000)]
    assert waited[0] > waited[1] > waited[2] == waited[3], "four blocks at most"
    held = [simulate(replace(_held(many), hold_bytes=nbytes), NONE).step_s for nbytes in (0, 2000)]
    assert held[0] == held[1], "visits that await a verdict are made after backward"


@pytest.mark.usefixtures("alone")
def test_offloaded_weights_come_through_a_window() -> None:
    """Of one layer here: the next ones are fetched when it has left, in forward only once they are updated."""
    three = offloadable(uniform(3, h2d_s=1.0))
    first, second, third = (LAST - position for position in range(3))
    timeline = simulate(replace(three, offload=1.0), NONE)
    events = [event for event in timeline.events if event[0] in ("backward", "fetch", "forward", "stall")]
    assert events == [
        ("backward", third, 0, 2),
        ("fetch", second, 2, 3),
        ("backward", second, 3, 5),
        ("fetch", first, 5, 6),
        ("backward", first, 6, 8),
        ("stall", first, 8, 11),  # its update
        ("fetch", first, 11, 12),
        ("forward", first, 12, 13),
        ("fetch", second, 13, 14),
        ("forward", second, 14, 15),
        ("fetch", third, 15, 16),
        ("forward", third, 16, 17),
    ]
    assert (timeline.step_s, timeline.fetch_s, timeline.stalls_s, busy_s(timeline)) == (17, 2 + 3, {first: 3}, 9)
    visiting = simulate(replace(three, offload=1.0, visit=1.0, hold_bytes=0), NONE)
    assert [event[1] for event in visiting.events if event[0] == "fetch"] == [second, first, second, third]
    on_link = sorted((event for event in visiting.events if event[0] in ("visit", "fetch")), key=lambda event: event[2])
    assert on_link[:4] == [
        ("visit", third, 2, 8),  # five copies of weights, and the time of a fetch for each layer
        ("fetch", second, 8, 9),  # its weights have stayed until then
        ("visit", second, 11, 17),
        ("fetch", first, 17, 18),
    ]


@pytest.mark.usefixtures("alone")
def test_backward_waits_for_visits_whose_gradients_take_all_the_memory_that_they_may() -> None:
    """Of one layer here, besides the last one's."""
    grads = [replace(each, waiting_bytes=200) for each in uniform(3, d2h_s=1.0, h2d_s=1.0).layers]
    three = Profile(layers=tuple(grads), visit=1.0)
    first, second, third = (LAST - position for position in range(3))
    timeline = simulate(replace(three, hold_bytes=200), NONE)
    assert [event for event in timeline.events if event[0] in ("backward", "visit")] == [
        ("backward", third, 0, 2),
        ("backward", second, 2, 4),
        ("backward", first, 7, 9),  # the third one's visit
        ("visit", third, 2, 7),
        ("visit", second, 7, 12),
        ("visit", first, 12, 17),
    ]
    assert (timeline.fetch_s, busy_s(timeline)) == (3 + 3, 9), "and so does forward"
    assert simulate(replace(three, hold_bytes=600), NONE).fetch_s == simulate(three, NONE).fetch_s == 0


def test_activations_take_their_time_on_the_link() -> None:
    """In backward they come with offloaded weights, as long as these if as many bytes. Visits wait for them."""
    profile = offloadable(uniform(3, d2h_s=1.0, h2d_s=1.0))
    profile = replace(profile, offload=1.0)
    loaded = replace(profile, activation_bytes=600)  # as many as all weights
    assert loaded.activations_s == pytest.approx(3.0) and not profile.activations_s
    fetches = [
        [(kind, lid, end_s - start_s) for kind, lid, start_s, end_s in simulate(each, NONE).events if kind == "fetch"]
        for each in (profile, loaded)
    ]
    in_backward = 2
    assert [s for *_, s in fetches[0]] == [1.0] * 5
    assert [s for *_, s in fetches[1]] == [2.0] * in_backward + [1.0] * 3
    assert simulate(loaded, NONE).fetch_s > simulate(profile, NONE).fetch_s
    visiting = Places.chosen(LAST + 1, NONE, profile.lids)
    alone, beside = (each.crowding(visiting).visits for each in (profile, loaded))
    assert alone == 1.0 < beside


def test_shares_between_those_that_are_tried_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only they fit: waiting gradients bound visits from above, host memory from below."""
    tried = set()

    def only_one_fits(asked: Any, profile: Profile, shares: tuple[float, float]) -> tuple[float, int] | None:
        tried.add(shares)
        return (1.0, 1) if shares == (0.3, 0.0) else None

    monkeypatch.setattr(policies, "_tried", only_one_fits)
    assert choose("deadline", uniform(28), visit=None).visit == 0.3
    monkeypatch.setattr(policies, "_tried", lambda *arguments: None)
    assert choose("deadline", uniform(28), visit=None).visit == 0.0, "nothing fits"


def test_shares_that_were_slower_than_simulated_are_left_alone() -> None:
    """Others are assumed to miss as the nearest of those do. From those that are slow the way back is open."""
    profile = uniform(28, cpu_update_s=5.0, d2h_s=0.2, h2d_s=0.2)
    wanted = choose("deadline", profile, visit=None).visit
    assert wanted > 0

    def missed(**by_visit: float) -> dict[Split, Known]:
        return {(0.0, float(visit), 0.0): Known(NONE, miss, 0.0, None, 9) for visit, miss in by_visit.items()}

    slow = missed(**{str(wanted): 1.5, "0.0": 1.0})
    assert 0.0 < choose("deadline", profile, visit=None, tried=slow).visit < wanted / 2
    slow |= missed(**{"0.1": 1.5, "0.2": 1.5})
    assert choose("deadline", profile, visit=None, tried=slow).visit == 0.0, "what is beside them is slow as well"
    everywhere = missed(**{str(wanted): 1.5, "0.0": 1.5})
    assert choose("deadline", profile, visit=None, tried=everywhere).visit == wanted
    there = replace(profile, visit=wanted)
    assert choose("deadline", there, visit=None, tried=slow).visit != wanted
    left_s = 0.9 * simulate(profile, choose("deadline", profile).gpu_lids).step_s
    left = {(0.0, 0.0, 0.0): Known(NONE, 1.0, 0.0, left_s, 9)}
    assert choose("deadline", there, visit=None, tried=left).visit == 0.0, "what was faster than all that is simulated"
    faster_now = missed(**{"0.0": 0.5, str(wanted): 1.0})
    assert choose("deadline", profile, visit=None, tried=faster_now).visit < wanted, "than simulated"
    assert choose("deadline", profile, visit=None, tried=missed(**{"1.0": 0.1})).visit == wanted, "with another k"


def test_a_plan_that_was_faster_is_returned_to() -> None:
    """Although it is simulated to be slower than now. It must have been faster by as much as steps scatter."""
    profile = uniform(28, cpu_update_s=5.0, gpu_update_s=0.1)
    now = choose("deadline", profile, horizon_steps=10**6, min_gain=0.0).gpu_lids
    left, step_s = lids(*range(len(now) - 3)), simulate(profile, now).step_s
    now_s, left_s = 1.2 * step_s, step_s
    here = {(profile.k_of(now), 0.0, 0.0): Known(now, 1.2, now_s - explained_s(profile, now), now_s, 9)}
    there = {(profile.k_of(left), 0.0, 0.0): Known(left, 0.9, left_s - explained_s(profile, left), left_s, 9)}

    def chosen(min_gain: float) -> frozenset[int]:
        return choose(
            "deadline", profile, current=now, tried=here | there, min_gain=min_gain, horizon_steps=10**6
        ).gpu_lids

    assert simulate(profile, left).step_s > step_s
    assert chosen(0.01) == left and chosen(0.2) == now
    assert choose("deadline", profile, current=now, tried=here, horizon_steps=10**6).gpu_lids == now


def test_between_two_k_that_were_tried_lies_what_is_expected() -> None:
    tried = {(k, 0.0, 0.0): Known(NONE, miss, 10 * miss, None, 9) for k, miss in ((0.2, 1.0), (0.6, 2.0))}
    asked = Question(policy="deadline", limits=Limits(), current=NONE, tried=tried)
    expected = {0.0: 1.0, 0.2: 1.0, 0.3: 1.25, 0.5: 1.75, 0.6: 2.0, 1.0: 2.0}
    for k, miss in expected.items():
        assert asked.miss((k, 0.0, 0.0)) == pytest.approx(miss)
        assert asked.rest_s((k, 0.0, 0.0)) == pytest.approx(10 * miss)
    assert asked.rest_s((0.3, 0.5, 0.0)) is None and asked.miss((0.3, 0.5, 0.0)) == pytest.approx(1.25)


def offloadable(profile: Profile, window: int = 200) -> Profile:
    layers = (replace(each, weights_bytes=2 * each.numel, block=each.lid) for each in profile.layers)
    return replace(profile, layers=tuple(layers), window_bytes=window)


def _held(profile: Profile) -> Profile:
    layers = tuple(replace(layer, gpu_state_bytes=1200, held_bytes=200) for layer in profile.layers)
    return replace(profile, layers=layers, awaits_verdict=True)


@given(st.data(), st.sampled_from(OBJECTIVES))
def test_limits_hold_with_planned_streams_too(data: st.DataObject, objective: str) -> None:
    """What of the weights is not offloaded takes GPU memory, as does the window of what is."""
    profile = offloadable(data.draw(profiles), window=data.draw(st.integers(0, 3000)))
    profile = replace(profile, offload=data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    least = replace(profile, offload=1.0).gpu_state_bytes(NONE)
    room = least + data.draw(st.integers(0, 2 * profile.gpu_state_bytes(profile.lids)))
    limits, current = Limits(gpu_state_bytes=room), data.draw(subsets(profile))
    decision = choose("deadline", profile, limits, current=current, offload=None, objective=objective)
    there = replace(profile, offload=decision.offload)
    offloaded, owned = there.places(decision.gpu_lids).offloaded, decision.gpu_lids
    assert not offloaded & owned
    at_home = sum(one.weights_bytes for one in there.layers if one.lid not in offloaded)
    state = sum(one.gpu_state_bytes for one in there.layers if one.lid in owned)
    assert at_home + state + (profile.window_bytes if offloaded else 0) <= there.gpu_state_bytes(owned) <= room


def test_weights_are_offloaded_only_while_memory_is_short_or_wanted() -> None:
    profile = replace(offloadable(uniform(8, h2d_s=0.5)), offload=1.0)
    room = profile.gpu_state_bytes(NONE)
    assert choose("deadline", profile, Limits(gpu_state_bytes=room), offload=None).offload == 1.0
    roomy = choose("deadline", profile, Limits(gpu_state_bytes=10 * room), offload=None)
    assert roomy.offload < 1.0 and roomy.changed
    now = replace(profile, offload=roomy.offload)
    kept = choose("deadline", now, Limits(gpu_state_bytes=10 * room), current=roomy.gpu_lids, offload=None)
    assert not kept.changed
    tight = choose("deadline", now, Limits(gpu_state_bytes=room), current=roomy.gpu_lids, offload=None)
    assert (tight.offload, tight.gpu_lids) == (1.0, NONE)
    saved = choose("deadline", now, offload=None, objective="gpu-memory")
    assert saved.offload == 1.0


def test_layers_whose_weights_stay_on_the_gpu_visit_first() -> None:
    """Offloaded ones would have to stay until their visit is over."""
    four = replace(offloadable(uniform(4)), offload=0.5)
    offloaded = four.places(NONE).offloaded
    assert len(offloaded) == 2
    for visit, count in ((0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)):
        visiting = replace(four, visit=visit).places(NONE).visiting
        assert len(visiting) == count and len(visiting & offloaded) == max(0, count - 2)
    assert len(replace(four, visit=0.5).places(four.lids - offloaded).visiting) == 2, "the GPU owns the others"


def test_blocks_are_offloaded_whole() -> None:
    four = replace(offloadable(uniform(5)), offload=0.4)
    layers = tuple(replace(each, block=each.position // 2 if each.position < 4 else -1) for each in four.layers)
    layers = (*layers[:4], replace(layers[4], weights_bytes=0))
    two = replace(four, layers=layers)
    assert two.places(NONE).offloaded == lids(0, 1)
    assert two.places(lids(1)).offloaded == lids(2, 3), "not where the GPU owns a layer"
    all_offloaded = replace(two, offload=1.0)
    assert all_offloaded.places(NONE).offloaded == lids(0, 1, 2, 3)
    assert all_offloaded.gpu_state_bytes(lids(1)) == 1000 + 2 * 200 + 200, "its state, the block's weights, the window"
    for room, owned in ((1600, lids(0)), (1599, lids(4))):  # the last one is not of a block
        assert choose("fixed", all_offloaded, Limits(gpu_state_bytes=room), offload=1.0, fixed_k=0.2).gpu_lids == owned


@given(st.data(), st.sampled_from(OBJECTIVES))
def test_limits_hold_with_planned_visits_too(data: st.DataObject, objective: str) -> None:
    """Gradients that await a verdict take GPU memory, whether the GPU owns their layer or it visits."""
    profile = _held(replace(data.draw(profiles), visit=data.draw(st.sampled_from([0.0, 0.5, 1.0]))))
    room = data.draw(st.integers(0, 2 * profile.gpu_state_bytes(profile.lids)))
    current = data.draw(subsets(profile))
    decision = choose(
        "deadline", profile, Limits(gpu_state_bytes=room), current=current, visit=None, objective=objective
    )
    there = replace(profile, visit=decision.visit)
    held = sum(one.held_bytes for one in there.layers if one.lid in there.places(decision.gpu_lids).visiting)
    assert held <= there.held_for_visits_bytes
    assert there.gpu_state_bytes(decision.gpu_lids) + held <= room


def test_visits_save_memory_and_not_time_where_that_is_asked_for() -> None:
    slow = uniform(28, cpu_update_s=5.0, d2h_s=0.2, h2d_s=0.2)
    assert choose("deadline", slow, visit=None, objective="gpu-memory").visit > 0
    assert choose("deadline", _held(slow), visit=None, objective="gpu-memory").visit == 0, "gradients take memory"


@given(st.data(), st.floats(0, 1), st.floats(0, 1))
def test_visits_are_of_layers_that_the_gpu_does_not_own(data: st.DataObject, share: float, larger: float) -> None:
    """As many as are wanted. Those of a larger share are others besides, so few layers move if it changes."""
    profile = data.draw(profiles)
    gpu_lids = data.draw(subsets(profile))
    others = [one for one in profile.layers if one.lid not in gpu_lids]
    visiting, more = (replace(profile, visit=each).places(gpu_lids).visiting for each in sorted((share, larger)))
    assert visiting <= more <= {one.lid for one in others}
    wanted = min(min(share, larger) * profile.numel, sum(one.numel for one in others))
    numels = [one.numel for one in others if one.lid in visiting]
    assert wanted - 1e-6 * profile.numel <= sum(numels) <= wanted + max(numels, default=0)


def test_visits_are_spread_evenly() -> None:
    """So link and CPU both work all the time. The first layer, which forward waits for first, visits last."""
    profile = uniform(16)
    positions = {layer.lid: layer.position for layer in profile.layers}
    found = [
        sorted(positions[lid] for lid in replace(profile, visit=share).places(NONE).visiting) for share in (0.25, 0.5)
    ]
    assert found == [[2, 4, 8, 12], [1, 2, 4, 6, 8, 10, 12, 14]]


def test_visits_are_planned_where_they_save_memory_at_the_same_speed() -> None:
    """A CPU that needs half of the layers taken off it, and a link that can do that."""
    profile = uniform(28, cpu_update_s=5.0, d2h_s=0.2, h2d_s=0.2)
    without, planned = choose("deadline", profile), choose("deadline", profile, visit=None)
    assert without.visit == 0 < planned.visit and f"the state of {planned.visit:.0%} visits the GPU; " in planned.reason
    assert planned.predicted_step_s <= 1.01 * without.predicted_step_s and len(planned.gpu_lids) < len(without.gpu_lids)
    there = replace(profile, visit=planned.visit)
    assert not choose("deadline", there, current=planned.gpu_lids, visit=None).changed
    assert choose("deadline", profile, current=planned.gpu_lids, visit=planned.visit).changed, "from no visits to these"
    back = choose("deadline", there, current=planned.gpu_lids, visit=0.0)
    assert back.changed and back.gpu_lids == without.gpu_lids
    slow_link = uniform(28, cpu_update_s=5.0, d2h_s=4.0, h2d_s=4.0)
    assert choose("deadline", slow_link, visit=None).visit == 0
    assert choose("deadline", slow_link, visit=None, objective="gpu-memory").gpu_lids == NONE


@given(st.data())
def test_every_server_does_one_thing_at_a_time_in_its_order(data: st.DataObject) -> None:
    profile = replace(data.draw(profiles), visit=data.draw(st.sampled_from([0.0, 0.3])))
    timeline = simulate(profile, data.draw(subsets(profile)), tile_numel=data.draw(tile_numels))
    by_kind = defaultdict(list)
    for kind, lid, start_s, end_s in timeline.events:
        by_kind[kind].append((lid, start_s, end_s))
    gpu = sorted(by_kind["backward"] + by_kind["gpu_update"] + by_kind["forward"], key=lambda event: event[1:])
    for events in (gpu, by_kind["d2h"], by_kind["cpu_update"], by_kind["h2d"], by_kind["visit"]):
        assert all(a[2] <= b[1] for a, b in zip(events, events[1:]))

    landed = {lid: end_s for lid, _, end_s in by_kind["d2h"]}
    updated = {lid: end_s for lid, _, end_s in by_kind["cpu_update"]}  # its last part
    back = {lid: end_s for lid, _, end_s in by_kind["h2d"]}
    assert list(landed) == [lid for lid, _, _ in by_kind["backward"] if lid in landed], "first in, first out"
    assert [updated[lid] for lid in back] == sorted(updated.values()), "first in, first out"
    for lid, start_s, _ in by_kind["cpu_update"]:
        assert start_s >= landed[lid]
        for other in landed:  # lids run against positions
            assert other <= lid or landed[other] > start_s or updated[other] <= start_s, "in forward order"
    assert all(start_s >= updated[lid] for lid, start_s, _ in by_kind["h2d"])
    assert all(start_s >= back.get(lid, 0.0) for lid, start_s, _ in by_kind["forward"]), "a stale read"


@given(st.data())
def test_a_step_is_the_work_of_the_gpu_and_its_stalls(data: st.DataObject) -> None:
    profile = data.draw(profiles)
    owned = data.draw(subsets(profile))
    timeline = simulate(profile, owned)
    work_s = profile.forward_s + profile.backward_s
    work_s += sum(layer.gpu_update_s for layer in profile.layers if layer.lid in owned)
    assert busy_s(timeline) == pytest.approx(work_s)
    assert timeline.step_s == pytest.approx(busy_s(timeline) + timeline.stall_s)
    assert timeline.step_s >= timeline.cpu_busy_s * (1 - 1e-9)
    cpu_s = sum(layer.cpu_update_s for layer in profile.layers if layer.lid not in owned)
    assert timeline.cpu_busy_s == pytest.approx(cpu_s)
    assert all(stall_s > 0 for stall_s in timeline.stalls_s.values()) and not timeline.stalls_s.keys() & owned


def test_the_formula_by_hand() -> None:
    profile = uniform(10, cpu_update_s=4.0, gpu_update_s=1.0)  # t_U 40, t_B 20, t_F 10, alpha 1/4
    assert balance_k(profile) == 20 / 50
    hopeless = uniform(3, cpu_update_s=99.0, backward_s=0.0, forward_s=0.0, gpu_update_s=0.0)
    assert balance_k(hopeless) == 1.0
    assert balance_k(with_cpu(profile, 0.1)) == 0


def test_k_is_rounded_up_to_whole_layers_of_the_lowest_ranks() -> None:
    ten = uniform(10)
    assert prefix_for(0.0, ten) == NONE and prefix_for(1.0, ten) == ten.lids
    assert prefix_for(0.3, ten) == prefix_for(0.1 + 0.2, ten) == lids(0, 1, 2)
    assert prefix_for(0.31, ten) == lids(0, 1, 2, 3)
    assert prefix_for(0.01, Profile(layers=(layer(0, numel=900), layer(1)))) == lids(0)


def test_policies_without_limits() -> None:
    profile = uniform(10, cpu_update_s=4.0, gpu_update_s=1.0)
    assert choose("fixed", profile, fixed_k=0.55).gpu_lids == lids(*range(6))
    assert choose("balance", profile).gpu_lids == lids(*range(4))
    decision = choose("deadline", profile, min_gain=0.0, horizon_steps=10**6)
    assert decision.gpu_lids == lids(0, 1, 2) and decision.changed
    assert decision.predicted_step_s == simulate(profile, decision.gpu_lids).step_s == 33
    assert decision.reason == "the CPU's updates would end 4000 ms late at k=0.20; at k=0.30 nothing waits for them"


@given(st.data(), st.sampled_from(["fixed", "balance", "deadline", "random"]))
def test_limits_always_hold(data: st.DataObject, policy: str) -> None:
    profile = data.draw(profiles)
    most_gpu, most_host = profile.gpu_state_bytes(profile.lids), profile.host_bytes(NONE)
    limits = Limits(
        gpu_state_bytes=data.draw(st.none() | st.integers(0, most_gpu)),
        host_bytes=data.draw(st.none() | st.integers(0, most_host)),
    )
    current = data.draw(subsets(profile))
    k, seed = data.draw(st.floats(0, 1)), data.draw(st.integers(0, 9))
    try:
        decision = choose(policy, profile, limits, current=current, fixed_k=k, seed=seed)
    except Infeasible:
        positions = range(len(profile.layers) + 1)
        assert not any(limits.allow(profile, lids(*range(count))) for count in positions)
    else:
        assert limits.allow(profile, decision.gpu_lids)
        assert decision.changed == (decision.gpu_lids != current)
        assert decision.reason and "\n" not in decision.reason


def test_memory_bounds_k_from_both_sides_and_the_reason_says_so() -> None:
    slow, fast = uniform(10, cpu_update_s=9.0), uniform(10, cpu_update_s=0.1)
    tight = choose("deadline", slow, Limits(gpu_state_bytes=2500), horizon_steps=10**6)
    assert tight.gpu_lids == lids(0, 1) and "GPU memory has no room for more" in tight.reason
    pushed = choose("deadline", fast, Limits(host_bytes=9000))
    assert pushed.gpu_lids == lids(0, 1, 2, 3) and "host memory" in pushed.reason
    assert "GPU memory has room for k=0.20" in choose("fixed", slow, Limits(gpu_state_bytes=2500)).reason
    assert "host memory needs k=0.90" in choose("fixed", slow, Limits(host_bytes=1400)).reason


def test_with_little_gpu_memory_a_large_layer_can_be_left_out() -> None:
    """One large layer with a cheap update would take the room of five with a dear one."""
    large = layer(0, numel=500, cpu_update_s=1.0, forward_s=0.5)
    profile = Profile(layers=(large, *(layer(position, cpu_update_s=9.0) for position in range(1, 9))))
    decision = choose("deadline", profile, Limits(gpu_state_bytes=5000), horizon_steps=10**6)
    assert decision.gpu_lids == lids(1, 2, 3, 4, 5)
    assert decision.predicted_step_s < 0.99 * simulate(profile, lids(0)).step_s


def test_a_move_must_repay_its_cost_within_the_horizon() -> None:
    profile = uniform(10, cpu_update_s=4.0, gpu_update_s=1.0, d2h_s=1.0, h2d_s=1.0)
    brief = choose("deadline", profile, horizon_steps=1)
    assert not brief.changed and brief.gpu_lids == NONE and "k=0.00 stays" in brief.reason
    assert choose("deadline", profile, horizon_steps=100).changed
    assert not choose("deadline", profile, horizon_steps=100, min_gain=0.9).changed
    too_many, room = lids(*range(9)), Limits(gpu_state_bytes=8000)
    assert choose("deadline", profile, room, current=too_many, horizon_steps=0).changed, "there is no room to stay"


def test_memory_is_given_back_when_that_is_clear_and_free() -> None:
    profile = uniform(40, cpu_update_s=3.5, d2h_s=0.1, h2d_s=0.1)
    least = len(choose("deadline", profile, horizon_steps=10**6, min_gain=0.0).gpu_lids)
    plenty: dict[str, Any] = {"current": lids(*range(least + 12)), "min_gain": 0.5}
    shrunk = choose("deadline", profile, horizon_steps=1000, **plenty)
    assert least < len(shrunk.gpu_lids) < least + 12
    told = r"k=0\.\d\d frees [\d.]+ [GM]iB of GPU memory, and the CPU keeps up, even when it is \d+% slower"
    assert re.fullmatch(told, shrunk.reason)
    slower = with_cpu(profile, 1.1)
    assert simulate(slower, shrunk.gpu_lids).stall_s < 0.01 * simulate(slower, slower.lids).step_s
    assert not choose("deadline", profile, horizon_steps=0, **plenty).changed
    for little in (least + 1, len(shrunk.gpu_lids) + 1):
        assert not choose("deadline", profile, current=lids(*range(little)), horizon_steps=1000).changed


@given(st.data(), st.sampled_from(["balance", "deadline"]))
def test_a_decision_stands_when_nothing_has_changed(data: st.DataObject, policy: str) -> None:
    """From anywhere: at most one move for memory and one for speed."""
    profile = data.draw(profiles)
    current = data.draw(subsets(profile))
    for _ in range(2):
        current = choose(policy, profile, current=current).gpu_lids
    assert not choose(policy, profile, current=current).changed


def test_a_formulas_k_has_to_change_clearly() -> None:
    profile = uniform(28, cpu_update_s=4.0)
    current = choose("balance", profile).gpu_lids
    assert current and not choose("balance", with_cpu(profile, 1.05), current=current).changed
    assert len(choose("balance", with_cpu(profile, 2.0), current=current).gpu_lids) >= len(current) + 2


def test_random_moves_layers_at_every_call_and_is_the_seed_s_alone() -> None:
    profile = uniform(6)
    limits = Limits(gpu_state_bytes=4000, host_bytes=6000)
    current, seen = NONE, set()
    for seed in range(200):
        decision = choose("random", profile, limits, current=current, seed=seed)
        assert decision == choose("random", profile, limits, current=current, seed=seed)
        assert decision.changed
        current = decision.gpu_lids
        seen.add(current)
    assert {len(owned) for owned in seen} == {2, 3, 4}
    prefixes = {lids(*range(count)) for count in range(7)}
    assert len(seen - prefixes) > 30


def test_where_updates_wait_for_the_end_of_backward_the_cpu_has_only_the_forward() -> None:
    free = uniform(10, d2h_s=0.1, h2d_s=0.1, cpu_update_s=1.0, gpu_update_s=0.1)
    bound, few = replace(free, awaits_verdict=True), lids(0, 1)
    assert simulate(free, few).stall_s == 0 < simulate(bound, NONE).stall_s
    backward_s = 10 * 2.0
    updates = [begin for kind, _, begin, _ in simulate(bound, few).events if kind == "cpu_update"]
    assert min(updates) == pytest.approx(backward_s)
    assert simulate(bound, free.lids).step_s == pytest.approx(simulate(free, free.lids).step_s)


def test_ahead_of_the_verdict_updates_run_beside_backward_and_weights_come_after_it() -> None:
    free = uniform(10, d2h_s=0.1, h2d_s=0.1, cpu_update_s=1.0, gpu_update_s=0.1)
    waiting = replace(free, awaits_verdict=True)
    timeline = simulate(ahead(waiting, 0.0), NONE)
    begun = {
        kind: [begin_s for each, _, begin_s, _ in timeline.events if each == kind] for kind in ("cpu_update", "h2d")
    }
    assert min(begun["cpu_update"]) == pytest.approx(2.1) and min(begun["h2d"]) == pytest.approx(20.0)
    up = [lid for kind, lid, *_ in timeline.events if kind == "h2d"]
    assert up[:-1] == sorted(lids(*range(1, 10)), reverse=True), "in forward order"
    assert simulate(free, NONE).step_s <= timeline.step_s < simulate(waiting, NONE).step_s


@given(profiles, st.floats(0, 1))
def test_being_ahead_saves_what_is_not_clipped(profile: Profile, clipped: float) -> None:
    waiting = replace(profile, awaits_verdict=True)
    never, some = gain(waiting, NONE, 0.0), gain(waiting, NONE, clipped)
    assert some == pytest.approx((1 - clipped) * never, abs=1e-9) and gain(waiting, NONE, 1.0) == pytest.approx(0.0)
    assert gain(waiting, profile.lids, 0.0) == 0.0, "the GPU waits for its own"


def test_held_gradients_take_memory_and_do_not_move() -> None:
    """With a verdict to await, the GPU keeps 2 bytes a parameter more of a layer, and 10 of them travel."""
    plain = layer(0, numel=100, d2h_s=1.0, h2d_s=2.0)
    held = replace(plain, gpu_state_bytes=1200, held_bytes=200)
    spare = replace(plain, host_bytes=2600, spare_bytes=1200)
    assert held.move_s == plain.move_s == spare.move_s == 10.0, "the slower direction's time, for five times as much"
    limits = Limits(gpu_state_bytes=1100)
    assert limits.allow(Profile(layers=(plain,)), lids(0)) and not limits.allow(Profile(layers=(held,)), lids(0))
