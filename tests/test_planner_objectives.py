"""What is to be saved beside time: objectives, and the first plan, before any step has run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_layers import NONE, facts, made

from hytrain.planner.ladder import Infeasible
from hytrain.planner.policies import Decision, decide, first_lids
from hytrain.planner.profile import LayerFacts, Limits, Profile, Question
from protocol.messages import OBJECTIVES


def sized(*numels: int) -> Profile:
    """The CPU is late without help."""
    times = {"d2h_s": 0.01, "h2d_s": 0.01, "cpu_update_s": 5.0, "gpu_update_s": 0.1}
    return Profile(layers=tuple(made(position, numel=numel, **times) for position, numel in enumerate(numels)))


def choose(
    objective: str, profile: Profile, limits: Limits, current: frozenset[int] = NONE, *, policy: str = "deadline"
) -> Decision:
    asked = Question(
        policy=policy, limits=limits, current=current, objective=objective, fixed_k=0.5, horizon_steps=10**6
    )
    return decide(asked, profile)


def blocks(count: int) -> list[LayerFacts]:
    """Lids run against positions."""
    return facts(made(position, lid=count - 1 - position, numel=10**8) for position in range(count))


def test_each_objective_without_limits() -> None:
    ten = sized(*[100] * 10)
    assert 0 < len(choose("speed", ten, Limits()).gpu_lids) < 10
    least, most = choose("gpu-memory", ten, Limits(), current=ten.lids), choose("host-memory", ten, Limits())
    assert not least.gpu_lids and "host memory holds everything" in least.reason
    assert most.gpu_lids == ten.lids and "GPU memory holds everything" in most.reason
    assert least.predicted_step_s > choose("speed", ten, Limits()).predicted_step_s


def test_memory_objectives_go_to_the_limits() -> None:
    ten = sized(*[100] * 10)
    limits = Limits(gpu_state_bytes=7500, host_bytes=9900)
    least, most = choose("gpu-memory", ten, limits), choose("host-memory", ten, limits)
    assert least.gpu_lids == frozenset(range(3)) and "the least that host memory allows" in least.reason
    assert most.gpu_lids == frozenset(range(7)) and "all that GPU memory has room for" in most.reason


@pytest.mark.parametrize(
    ("objective", "numels", "limits", "gpu_lids"),
    [
        # The third brings the host below its limit by itself, and the first two are no longer needed.
        ("gpu-memory", (10, 20, 300, *[10] * 7), Limits(host_bytes=14 * 100), {2}),
        # Three small ones will do, where the lowest positions would bring the large one along.
        ("gpu-memory", (1, 1, 5, 1), Limits(host_bytes=14 * 5), {0, 1, 3}),
        # Large layers first, where they fill the GPU better.
        ("host-memory", (30, 60, 70, *[200] * 6), Limits(gpu_state_bytes=1000), {0, 2}),
    ],
)
def test_not_always_the_lowest_positions(
    objective: str, numels: tuple[int, ...], limits: Limits, gpu_lids: set[int]
) -> None:
    assert choose(objective, sized(*numels), limits).gpu_lids == gpu_lids


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=7)


@given(sizes, st.integers(0, 10**4), st.integers(0, 10**4), st.data())
def test_objectives_respect_limits_and_settle(numels: list[int], gpu: int, host: int, data: st.DataObject) -> None:
    profile, limits = sized(*numels), Limits(gpu_state_bytes=gpu, host_bytes=host)
    current = data.draw(st.frozensets(st.sampled_from(range(len(numels)))))
    found: dict[str, frozenset[int]] = {}
    for objective in OBJECTIVES:
        try:
            decision = choose(objective, profile, limits, current)
        except Infeasible:
            return
        assert limits.allow(profile, decision.gpu_lids)
        assert decision.reason and "\n" not in decision.reason
        again = choose(objective, profile, limits, decision.gpu_lids)
        if objective != "speed":
            assert not again.changed
        found[objective] = choose(objective, profile, limits).gpu_lids
    if limits.allow(profile, NONE):
        assert found["gpu-memory"] == NONE
    assert profile.gpu_state_bytes(found["gpu-memory"]) <= profile.gpu_state_bytes(found["speed"])
    assert profile.host_bytes(found["host-memory"]) <= profile.host_bytes(found["gpu-memory"])


def test_a_little_more_room_on_the_gpu_moves_nothing() -> None:
    """Free memory wobbles from step to step; layers do not have to."""
    profile = sized(*[100] * 100)
    owned = choose("host-memory", profile, Limits(gpu_state_bytes=50_000)).gpu_lids
    little = choose("host-memory", profile, Limits(gpu_state_bytes=53_000), owned)
    assert not little.changed and "too little for a move" in little.reason
    assert choose("host-memory", profile, Limits(gpu_state_bytes=60_000), owned).changed
    assert len(choose("host-memory", profile, Limits(gpu_state_bytes=49_000), owned).gpu_lids) == 49


@pytest.mark.parametrize("policy", ["fixed", "balance", "random"])
def test_other_policies_say_that_they_do_not_heed_the_objective(policy: str) -> None:
    profile = sized(100, 100)
    memory, speed = (choose(objective, profile, Limits(), policy=policy) for objective in ("host-memory", "speed"))
    assert memory.gpu_lids == speed.gpu_lids and "objective" not in speed.reason
    assert 'only policy "deadline" heeds objective "host-memory"' in memory.reason


@pytest.mark.parametrize("gpu_state_bytes", [None, 10**12])
def test_the_first_plan_takes_of_the_gpu_only_what_the_host_needs(gpu_state_bytes: int | None) -> None:
    """Before a step has run, nobody knows how much its activations leave."""
    ten = blocks(10)
    assert first_lids(ten, Limits(gpu_state_bytes=gpu_state_bytes), None) == NONE
    enough = Limits(gpu_state_bytes=gpu_state_bytes, host_bytes=14 * 10**9)
    assert first_lids(ten, enough, None) == NONE
    short = Limits(gpu_state_bytes=gpu_state_bytes, host_bytes=7 * 10**9)
    assert first_lids(ten, short, None) == frozenset({9, 8, 7, 6, 5})


def test_where_nothing_fits_both_sides_are_told() -> None:
    ten = blocks(10)
    assert len(first_lids(ten, Limits(gpu_state_bytes=5 * 10**9, host_bytes=7 * 10**9), None)) == 5
    both = (
        r"need 13\.04 GiB of host memory, where 6\.52 GiB .* 4\.56 GiB allowed .* \(3\.73 GiB\) still leaves 7\.82 GiB"
    )
    with pytest.raises(Infeasible, match=both):
        first_lids(ten, Limits(gpu_state_bytes=49 * 10**8, host_bytes=7 * 10**9), None)


def test_a_given_k_is_the_first_plan() -> None:
    ten = blocks(10)
    assert first_lids(ten, Limits(), 0.3) == frozenset({9, 8, 7})
    assert first_lids(ten, Limits(gpu_state_bytes=2 * 10**9), 0.3) == frozenset({9, 8})
    assert len(first_lids(ten, Limits(), 1.0)) == 10
