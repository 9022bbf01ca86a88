"""I1, I2 and I3 under random interleavings of gradients, weights, plans, acknowledgements and handovers.

`interleaving_run` has the run: the real code of all three processes among stand-ins for the device and the links.
Here are the property, and the faults that must break it: a search that finds none of them would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interleaving_run import Run
from interleaving_stand_ins import Coordinator, Link, Mortal, Planner, Streams, Visits
from interleaving_world import Violation, World
from variants import slow

from hytrain.memory.planes import ArenaPlanes, Moving
from hytrain.memory.transfer import Transfer
from hytrain.model.lifecycle import Event, InvalidTransition, LayerLife, State
from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from hytrain.step import handover
from hytrain.step.boundary import Boundary
from hytrain.step.gradient import RoundTrip
from hytrain.step.handover import Handover
from hytrain.step.offload import Offload
from protocol import messages as m
from protocol.placement import Placement
from workers.optimize.update_queue import Tile, UpdateQueue
from workers.optimize.work_log import Progress

EXAMPLES = 120


@pytest.mark.parametrize("coordinator", [Planner, slow(Coordinator), Mortal])
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(1, 4),
    steps=st.integers(1, 8),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
@example(seed=155784, layers=4, steps=3, share=0.0)  # a layer comes back to the CPU before it is given up
@example(seed=730890168, layers=4, steps=1, share=1.0)  # what is updated after the verdict is fetched ahead just then
def test_invariants_hold(coordinator: type[Any], seed: int, layers: int, steps: int, share: float) -> None:
    Run(seed, layers=layers, steps=steps, coordinator=coordinator, share=share).play()


@pytest.mark.parametrize("coordinator", [Planner, slow(Coordinator), Mortal])
def test_runs_have_handovers_late_plans_and_undone_updates(coordinator: type[Any]) -> None:
    """Or else the property above would say little."""
    steps = 12 if coordinator is Mortal else 8  # around deaths, few layers move
    worlds = [Run(seed, layers=3, steps=steps, coordinator=coordinator).play() for seed in range(40)]
    assert sum(world.evicted > 0 for world in worlds) >= 10
    for seen in ([world.moved > 3 for world in worlds], [world.postponed for world in worlds]):
        assert sum(map(bool, seen)) >= (5 if coordinator is Mortal else 10)
    if coordinator is Mortal:
        deaths = [world for world in worlds if world.moved_before_death is not None]
        assert len(deaths) >= 20 and sum(world.moved > world.moved_before_death for world in deaths) >= 10
    assert sum(world.undone > 0 for world in worlds) >= 10


def test_the_same_seed_is_the_same_run() -> None:
    stories = [Run(7, layers=3, steps=6, coordinator=Coordinator).play().story for _ in range(2)]
    assert stories[0] == stories[1]


# ---------------------------------------------------------------- planted faults: patches of the real code

#: Where, its name there, and the faulty code. What it replaces is its first argument.
Patch = tuple[Any, str, Callable[..., Any]]
FOUND = (Violation, InvalidTransition, OwnershipError, AssertionError, ValueError)


def search(*patches: Patch, share: float = 0.0) -> None:
    """Play runs until one goes wrong: the same runs each time."""
    with ExitStack() as stack:
        for where, name, fault in patches:
            real = getattr(where, name)
            stack.enter_context(mock.patch.object(where, name, lambda *a, f=fault, r=real, **o: f(r, *a, **o)))
        for seed in range(EXAMPLES):
            Run(seed, layers=2 + seed % 3, steps=4 + seed % 7, share=share).play()


def nothing(*arguments: Any, **options: Any) -> None:
    """What should happen does not."""


def lawless(real: Any, life: LayerLife, event: Event, step: int) -> None:
    """A layer's life takes whatever comes for what should have come."""
    before = {Event.COPIED: State.LEAVING, Event.WEIGHTS_READY: State.UPDATING, Event.AWAITED: State.LANDING}
    life.state = before.get(event, State.CURRENT)
    life.updated = life.updated if event is Event.FILLED else step
    real(life, event, step)


def lands_all_but(stream: str) -> Callable[..., None]:
    """Compute does not wait for the copies on this stream."""

    def land(real: Any, streams: Streams, transfer: Any, on: None = None) -> None:
        if transfer.done.stream is not getattr(streams, stream):
            real(streams, transfer)

    return land


def is_copied_at_once(real: Any, streams: Streams, copies: Any) -> Transfer:
    """GradReady is sent as soon as the copy has been enqueued."""
    return replace(real(streams, copies), done=None)


def announces_half(real: Any, queue: UpdateQueue, tile: Tile) -> m.WeightsReady | None:
    real(queue, tile)
    return m.WeightsReady(step=tile.step, lid=tile.lid, banks=queue.banks[tile.lid]) if tile.begins else None


def announces_unjudged(real: Any, queue: UpdateQueue, tile: Tile) -> m.WeightsReady | None:
    """WeightsReady when a layer has been updated, whatever the norm will say."""
    done: m.WeightsReady | None = real(queue, tile)
    if done is None and tile.lid in queue._unjudged and queue._work[tile.lid].is_complete:
        banks = tuple(1 - bank for bank in queue.banks[tile.lid])
        return m.WeightsReady(step=tile.step, lid=tile.lid, banks=banks)
    return done


def trusts_verdicts(real: Any, queue: UpdateQueue, message: m.Verdict) -> Any:
    return real(queue, m.Verdict(step=message.step, scale=1.0, skipped=False))


def reads_the_first_bank(real: Any, trip: RoundTrip, done: m.WeightsReady) -> None:
    real(trip, replace(done, banks=(0,) * len(done.banks)))


def hands_over_the_first_bank(real: Any, moving: Moving, arena: ArenaPlanes, streams: Any) -> None:
    arena.banks = (0,) * len(arena.banks)
    real(moving, arena, streams)


def takes_over_the_first_bank(real: Any, queue: UpdateQueue, lid: int, banks: tuple[int, ...]) -> None:
    real(queue, lid, (0,) * len(banks))


def copies_unasked(real: Any, link: Any) -> None:
    """The copy in follows right after GradReady, while the optimizer writes."""
    _, what, _ = link._jobs[0]
    real(link)
    if isinstance(what, partial):
        layer, step, *_ = what.args
        link.listener._trip.on_weights_ready(m.WeightsReady(step=step, lid=layer.lid, banks=layer.arena.banks))


def hears_once(real: Any, trip: RoundTrip, done: m.WeightsReady) -> None:
    """What was copied unasked is not copied again."""
    if trip._layers[done.lid].life.state is State.UPDATING:
        real(trip, done)


def awaits_no_update(real: Any, moves: Handover, *arguments: Any, **parts: Any) -> None:
    real(moves, *arguments, **parts)
    moves._trip = SimpleNamespace(wait_for=nothing)  # type: ignore[assignment]


def refuses_no_placement(real: Any, life: LayerLife, placement: Placement) -> None:
    life.placement, life.state = placement, State.CURRENT


def reads_state_at_once(real: Any, moves: Handover, step: int) -> None:
    """The state goes to the device as soon as the plan holds, whatever the optimizer still does with it."""
    real(moves, step)
    assert moves._move is not None
    for layer in moves._move.coming:
        assert layer.moving is not None
        layer.moving.start(layer.arena, moves._transfers)


def reads_state_once(real: Any, moving: Moving, arena: ArenaPlanes, streams: Any) -> None:
    if moving.arrival is None:
        real(moving, arena, streams)


def places_before_the_copy(real: Any, moves: Handover, *arguments: Any, after: Any = None, **others: Any) -> None:
    """TakeOver is sent while the state is on its way."""
    real(moves, *arguments, after=None if after is None else replace(after, done=None), **others)


def closes_early(real: Any, copied: Any, closing: Any, *others: Any) -> None:
    """Arenas are given up at once, not when their state has been read."""
    real(copied, [(arena, []) for arena, _ in closing], *others)


def drops_early(real: Any, handover: Handover, move: Any) -> None:
    """When a plan has come by which the layers will visit, not when it has begun."""
    for layer in move.visiting:
        layer.arena.drop_gradients()
    real(handover, move)


def begins_early(real: Any, boundary: Boundary, step: int) -> None:
    if boundary._plans.holds and boundary._handover.is_prepared:
        boundary._handover.begin(step)


def one_is_enough(real: Any, ledger: PlanLedger, role: str, ack: m.PlanAck) -> Any:
    return [real(ledger, party, ack) for party in ("trainer", "optimizer")][-1]


def only_the_last_counts(real: Any, book: PlanBook, plan_id: int, lid: int) -> Placement | None:
    """A handover is judged by the newest plan, which may not be the one that it belongs to."""
    return None if book.plan is None else book.plan.places[lid]


def fetches_at_once(real: Any, streams: Streams, copies: Any, *, after: Any) -> Transfer:
    """Neither the slot's nor the state's last copy is waited for."""
    return real(streams, copies, after=())  # type: ignore[no-any-return]


@contextmanager
def visits_at_once(real: Any, streams: Streams, made: Any) -> Iterator[None]:
    """The gradients are not waited for."""
    streams.current = streams.visiting
    yield
    streams.current = streams.compute


def lets_go_at_once(real: Any, visits: Any) -> None:
    """The memory of gradients is used again while their visit may still read it."""
    while visits.is_full:
        visits._let_go()


def sends_back_at_once(real: Any, streams: Streams, copies: Any) -> Transfer:
    """The update is not waited for."""
    return streams._copy(streams.returning, [(copy, nothing) for copy in copies], host=0)


UNGUARDED: Patch = (LayerLife, "on", lawless)
NO_WAIT: Patch = (RoundTrip, "wait_for", nothing)
NO_PATIENCE: Patch = (Handover, "__init__", awaits_no_update)
PLACED: Patch = (LayerLife, "place", refuses_no_placement)
ANY_NUMBER: Patch = (Progress, "sent", nothing)
UNJUDGED: list[Patch] = [ANY_NUMBER, (UpdateQueue, "tile_done", announces_unjudged)]
TO_BEGIN: list[Patch] = [(Handover, "begin", reads_state_at_once), (Moving, "start", reads_state_once)]
UNASKED: list[Patch] = [(Link, "_send", copies_unasked), (RoundTrip, "on_weights_ready", hears_once)]
LEFTOVERS = "I1: an update on another's leftovers"


def waits_for_nobody(real: Any, streams: Streams, *arguments: Any, after: Any) -> Any:
    return real(streams, *arguments, after=())


def waits_for_all_but(stream: str) -> Callable[..., Any]:
    """Copies out of the weights, or into their place in host memory, on this stream are not waited for."""

    def call(real: Any, streams: Streams, *arguments: Any, after: Any) -> Any:
        marks = [mark for mark in after if mark is not None and mark.stream is not getattr(streams, stream)]
        return real(streams, *arguments, after=marks)

    return call


def nobody(real: Any, offload: Offload, block: Any) -> list[Any]:
    return []


def keeps_what_is_stale(real: Any, offload: Offload, block: Any) -> None:
    if not block.life.is_present:
        real(offload, block)


def closes_before_the_fetch(real: Any, copied: Any, closing: Any, *others: Any) -> None:
    real(copied, [(arena, copies[:1]) for arena, copies in closing], *others)


#: Weights are offloaded in these runs.
OFFLOADED: Final = "offloaded: "

FAULTS: dict[str, tuple[list[Patch], str]] = {
    "reads without waiting": ([NO_WAIT], "FILLED of step .* while|I1"),
    "reads without waiting, unguarded": ([NO_WAIT, UNGUARDED], "I1|I2"),
    "compute does not wait for weights": ([(Streams, "land", lands_all_but("into"))], "I1|I3: .* in the middle"),
    "sends before the copy": (
        [(Streams, "gradients_out", is_copied_at_once)],
        "I1: an update without its gradient|I2: the gradient .* is overwritten unread",
    ),
    "announces half an update": ([ANY_NUMBER, (UpdateQueue, "tile_done", announces_half)], "I1|I2|I3"),
    "announces before the verdict": (UNJUDGED, "I1|I2|I3|WEIGHTS_READY"),
    "undoes nothing": ([(UpdateQueue, "verdict", trusts_verdicts)], "I1"),
    "reads the first bank": ([(RoundTrip, "on_weights_ready", reads_the_first_bank)], "I1: the copy of an update"),
    "hands over the first bank": ([(Moving, "start", hands_over_the_first_bank)], "I1|I3"),
    "takes over the first bank": ([(UpdateQueue, "take_over", takes_over_the_first_bank)], "I1"),
    "overwrites gradients": (
        [NO_WAIT, UNGUARDED, (World, "reading", lambda *arguments: nothing)],
        "I1|I2|handover to .* while",
    ),
    "copies weights unasked": (UNASKED, "I1|I2"),
    "hands over while updating": ([NO_PATIENCE], "handover to (.pu|visit) while|started with"),
    "hands over while updating, unguarded": ([NO_PATIENCE, PLACED], "while|I1|I2|I3|started with"),
    "reads state before the update": (TO_BEGIN, f"{LEFTOVERS}|I3: .* in the middle|I2: .* given up"),
    "updates before the state is there": ([(Streams, "land", lands_all_but("state"))], LEFTOVERS),
    "takes over before the copy": ([(Handover, "_place", places_before_the_copy)], LEFTOVERS),
    "closes arenas early": ([(handover, "_clear_up", closes_early)], "I2: a copy touches an arena that was given up"),
    "gradients without memory": ([(Handover, "_prepare_gradients", nothing)], "I2: a copy touches"),
    "drops gradients early": ([(Handover, "_prepare_visits", drops_early)], "I1|I2"),
    "visits before the gradient": ([(Streams, "visit", visits_at_once)], "I1"),
    "lets gradients go before their visit": ([(Visits, "make_room", lets_go_at_once)], "I1"),
    "fetches too early": ([(Streams, "fetch", fetches_at_once)], LEFTOVERS),
    "updates what is not fetched": ([(Streams, "land", lands_all_but("fetching"))], LEFTOVERS),
    "sends back too early": ([(Streams, "send_back", sends_back_at_once)], LEFTOVERS),
    "compute does not wait for visits": ([(Streams, "land", lands_all_but("visiting"))], "I1"),
    "hands over before the return": ([(Streams, "land", lands_all_but("returning"))], f"{LEFTOVERS}|I2: .* given up"),
    "applies plans early": ([(Boundary, "begin_plan", begins_early)], "I3: a plan holds from its step on"),
    "one acknowledges": ([(PlanLedger, "on_ack", one_is_enough)], "I3: both acknowledge"),
    OFFLOADED + "fetches at once": ([(Streams, "free", waits_for_nobody)], "I1"),
    OFFLOADED + "fetches before a visit is back": ([(Streams, "free", waits_for_all_but("returning"))], "I1"),
    OFFLOADED + "compute does not wait": ([(Streams, "land", lands_all_but("window"))], "I1"),
    OFFLOADED + "keeps what is stale": ([(Offload, "_bring", keeps_what_is_stale)], "I1"),
    OFFLOADED + "frees what is read": ([(Offload, "_users", nobody)], "I1"),
    OFFLOADED + "closes before the fetch": ([(handover, "_clear_up", closes_before_the_fetch)], "I2: .* given up"),
    OFFLOADED + "updates what is away": ([(Offload, "before_update", nothing)], f"I1|{LEFTOVERS}"),
    "the last plan counts": ([(PlanBook, "planned", only_the_last_counts)], "cannot go to|already has them"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    patches, said = FAULTS[fault]
    with pytest.raises(FOUND, match=said):
        search(*patches, share=float(fault.startswith(OFFLOADED)))
