"""I1, I2 and I3 under random interleavings of gradients, weights, plans, acknowledgements and handovers.

`interleaving_run` has the run: the real step code among stand-ins for the device, the link and the other processes.
Here are the property, and the faults that must break it: a search that finds none of them would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interleaving_run import Coordinator, Optimizer, Planner, Run, Streams
from interleaving_world import Violation, World

from hytrain.memory.planes import HOST_PLANES, ArenaPlanes
from hytrain.memory.transfer import Copy, Transfer
from hytrain.model.lifecycle import Command, Event, InvalidTransition, LayerLife, State
from hytrain.model.trained import TrainedLayer
from hytrain.run.link import Draft
from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from hytrain.step import handover
from hytrain.step.backward import Backward
from hytrain.step.boundary import Boundary
from hytrain.step.handover import Handover
from hytrain.step.reads import Reads
from hytrain.tensors import address, count_write
from protocol import messages as m
from protocol.placement import PLACEMENTS, Placement
from workers.update_queue import Tile, UpdateQueue

EXAMPLES = 120
#: What is patched, by whom and with what.
Patches = list[tuple[Any, str, Any]]


def search(patches: Patches, *, examples: int = EXAMPLES, **parties: Any) -> None:
    """Play runs until one goes wrong. The same runs each time, and no time spent on making a failure small."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(seed=st.integers(0, 2**32), layers=st.integers(2, 4), steps=st.integers(4, 10))
    def play(seed: int, layers: int, steps: int) -> None:
        Run(seed, layers=layers, steps=steps, **parties).play()

    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        play()


@pytest.mark.parametrize("coordinator", [Planner, Coordinator])
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 4), steps=st.integers(1, 8))
def test_invariants_hold(coordinator: type[Planner] | type[Coordinator], seed: int, layers: int, steps: int) -> None:
    Run(seed, layers=layers, steps=steps, coordinator=coordinator).play()


@pytest.mark.parametrize("coordinator", [Planner, Coordinator])
def test_runs_have_handovers_late_plans_and_undone_updates(coordinator: type[Planner] | type[Coordinator]) -> None:
    """Or else the property above would say little."""
    worlds = [Run(seed, layers=3, steps=8, coordinator=coordinator).play() for seed in range(60)]
    assert sum(world.moved > 3 for world in worlds) >= 10
    assert sum(world.postponed > 0 for world in worlds) >= 10
    assert sum(world.undone > 0 for world in worlds) >= 10


def test_the_same_seed_is_the_same_run() -> None:
    stories = [Run(7, layers=3, steps=6, coordinator=Coordinator).play().story for _ in range(2)]
    assert stories[0] == stories[1]


# ---------------------------------------------------------------- a third placement


class VisitingPlanes(ArenaPlanes):
    """State in host memory that the GPU updates."""

    def __init__(self, run: Run, file: Any, transfers: Any, *, gently: bool = False) -> None:
        super().__init__(file, transfers, gently=gently)
        self._layer = run.layers[file.layout.lid]

    def update(self, index: int, grads: Any, scalars: Any, host: Any = None, verdict: Any = None) -> None:
        weights, (exp_avg, exp_avg_sq) = (
            self._layer.weights[index],
            (self.state(plane)[index] for plane in ("exp_avg", "exp_avg_sq")),
        )
        assert exp_avg is not None and exp_avg_sq is not None
        host.update(
            weights=address(weights),
            grads=address(grads),
            exp_avg=address(exp_avg),
            exp_avg_sq=address(exp_avg_sq),
        )
        count_write(weights)


class PlannerOfVisits(Planner):
    choices = (("gpu", "visit"), ("cpu", "gpu"))


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 3), steps=st.integers(1, 8))
def test_a_third_placement_keeps_the_invariants(seed: int, layers: int, steps: int) -> None:
    """It is in the table of placements and in that of planes, and nowhere else."""
    visit = Placement("visit", state="host", updates="gpu")
    run = Run(seed, layers=layers, steps=steps, coordinator=PlannerOfVisits)
    with mock.patch.dict(PLACEMENTS, visit=visit), mock.patch.dict(HOST_PLANES, visit=partial(VisitingPlanes, run)):
        run.play()


# ---------------------------------------------------------------- I1: planted stale and torn reads

_on, _place, _wait_for, _land = LayerLife.on, LayerLife.place, Reads.wait_for, Streams.land
_gradients_out, _on_weights_ready, _on_departure = Streams.gradients_out, Backward.on_weights_ready, Backward.on_departure
_begin, _state_in, _place_on = Handover.begin, Handover.state_in, Handover._place


def lawless(self: LayerLife, event: Event, step: int) -> Command | None:
    """A layer's life takes whatever comes for what should have come."""
    self.state = {
        Event.FILLED: State.CURRENT,
        Event.COPIED: State.LEAVING,
        Event.WEIGHTS_READY: State.UPDATING,
        Event.AWAITED: State.LANDING,
    }[event]
    self.updated = self.updated if event is Event.FILLED else step
    return _on(self, event, step)


def waits_for_nothing(self: Reads, layer: TrainedLayer, *, on_host: bool = False) -> None:
    """Forward does not wait for updates."""


def lands_all_but(stream: str) -> Callable[[Streams, Transfer], None]:
    """Compute waits for the message that copies on this stream belong to, and not for the copies."""

    def land(self: Streams, transfer: Transfer) -> None:
        done: Any = transfer.done
        if done.stream is not getattr(self, stream):
            _land(self, transfer)

    return land


def copied_at_once(self: Streams, copies: list[Copy]) -> Transfer:
    """GradReady is sent as soon as the copy has been enqueued."""
    return replace(_gradients_out(self, copies), done=None)


class AnnouncesHalfAnUpdate(Optimizer):
    """WeightsReady after a layer's first tile."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.announced: set[tuple[int, int]] = set()

    def tile_done(self, tile: Tile) -> None:
        assert self.queue is not None
        self.queue.tile_done(tile)
        self.tell(tile, self.queue.banks[tile.lid])

    def tell(self, tile: Tile, banks: tuple[int, ...]) -> None:
        if (tile.lid, tile.step) not in self.announced:
            self.announced.add((tile.lid, tile.step))
            self.world.send("optimizer", "trainer", m.WeightsReady(step=tile.step, lid=tile.lid, banks=banks))


class AnnouncesBeforeTheVerdict(AnnouncesHalfAnUpdate):
    """WeightsReady when a layer has been updated, whatever the norm will say."""

    def tile_done(self, tile: Tile) -> None:
        queue = self.queue
        assert queue is not None
        done = queue.tile_done(tile)
        if done is None and tile.lid in queue._unjudged and queue._work[tile.lid].is_complete:
            self.tell(tile, tuple(1 - bank for bank in queue.banks[tile.lid]))
        self.announce(done)


class Trusting(UpdateQueue):
    """Takes every verdict for one that changes nothing."""

    def verdict(self, message: m.Verdict) -> list[m.WeightsReady]:
        return super().verdict(m.Verdict(step=message.step, scale=1.0, skipped=False))


class UndoesNothing(Optimizer):
    queue_type = Trusting


def reads_the_first_bank(self: Backward, done: m.WeightsReady) -> None:
    """As if there were no other."""
    _on_weights_ready(self, replace(done, banks=(0,) * len(done.banks)))


def hands_over_the_first_bank(self: Handover, layer: TrainedLayer) -> None:
    layer.arena.banks = (0,) * len(layer.arena.banks)
    _state_in(self, layer)


# ---------------------------------------------------------------- I2: planted collisions in the planes


def looks_at_nothing(self: World, layer: TrainedLayer) -> Callable[[], None]:
    """What forward and backward read is not looked at."""
    return lambda: None


def copies_weights_unasked(self: Backward, draft: Draft) -> m.Message:
    """The copy in follows right after GradReady, while the optimizer writes."""
    message = _on_departure(self, draft)
    if isinstance(message, m.GradReady):
        banks = self._layers[message.lid].arena.banks
        _on_weights_ready(self, m.WeightsReady(step=message.step, lid=message.lid, banks=banks))
    return message


def hears_of_no_update(self: Backward, done: m.WeightsReady) -> None:
    """The copy was made before."""


# ---------------------------------------------------------------- I3: planted quarrels over a layer


def hands_over_while_updating(self: Handover, *arguments: Any, **parts: Any) -> None:
    _init(self, *arguments, **parts)
    self._reads = SimpleNamespace(wait_for=lambda layer: None)  # type: ignore[assignment]


_init = Handover.__init__


def refuses_no_handover(self: LayerLife, placement: Placement) -> None:
    self.placement, self.state = placement, State.CURRENT


def reads_state_before_the_update(self: Handover, step: int) -> None:
    """The state goes to the device as soon as the plan holds, whatever the optimizer still does with it."""
    _begin(self, step)
    assert self._move is not None
    for layer in self._move.coming:
        reads_state_once(self, layer)


def reads_state_once(self: Handover, layer: TrainedLayer) -> None:
    assert layer.moving is not None
    if layer.moving.arrival is None:
        _state_in(self, layer)


def takes_over_before_the_copy(self: Handover, *arguments: Any, after: Any = None, **others: Any) -> None:
    _place_on(self, *arguments, after=None if after is None else replace(after, done=None), **others)


def closes_arenas_early(copied: list[tuple[ArenaPlanes, Transfer]], closing: list[tuple[ArenaPlanes, Transfer]]) -> None:
    """Arenas are given up at once, not when their state has been read."""
    for arena, departure in copied:
        departure.synchronize()
        arena.unpin_state()
    for arena, _ in closing:
        arena.close()


def begins_plans_early(self: Boundary, step: int) -> None:
    if self._plans.holds and self._handover.is_prepared:
        self._handover.begin(step)


class OneIsEnough(PlanLedger):
    """Commits as soon as one side has acknowledged."""

    def on_ack(self, ack: m.PlanAck) -> m.Reassign | None:
        for role in ("trainer", "optimizer"):
            reassign = super().on_ack(m.PlanAck(plan_id=ack.plan_id, role=role, accepted=ack.accepted, reason=""))
        return reassign


class HastyPlanner(Planner):
    ledger_type = OneIsEnough


class OnlyTheLastPlan(PlanBook):
    """Judges a handover by the newest plan, which may not be the one that it belongs to."""

    def allows(self, plan_id: int, lid: int, updates: str) -> bool:
        return self.plan is not None and self.plan.placement(lid).updates == updates


class ForgetfulOptimizer(Optimizer):
    book_type = OnlyTheLastPlan


READS: Patches = [(Reads, "wait_for", waits_for_nothing)]
LAWLESS: Patches = [(LayerLife, "on", lawless)]
HANDS_OVER: Patches = [(Handover, "__init__", hands_over_while_updating)]
WRONG_TIME = (InvalidTransition, AssertionError)  # a Violation is an AssertionError


@pytest.mark.parametrize(
    ("patches", "parties", "error", "said"),
    [
        pytest.param(patches, parties, error, said, id=name)
        for name, patches, parties, error, said in (
            ("reads without waiting", READS, {}, WRONG_TIME, "FILLED of step .* while|I1"),
            ("the same, unguarded", READS + LAWLESS, {}, Violation, "I1: "),
            (
                "compute does not wait",
                [(Streams, "land", lands_all_but("into"))],
                {},
                Violation,
                "I1: step .* reads layer|I1: .* at the end|I3: .* in the middle",
            ),
            (
                "sends before the copy",
                [(Streams, "gradients_out", copied_at_once)],
                {},
                Violation,
                "I1: the optimizer reads a gradient that has not arrived",
            ),
            ("half an update", [], {"optimizer": AnnouncesHalfAnUpdate}, Violation, "I1|I2|I3"),
            (
                "before the verdict",
                [],
                {"optimizer": AnnouncesBeforeTheVerdict},
                WRONG_TIME,
                "I1|I2|I3|WEIGHTS_READY",
            ),
            ("undoes nothing", [], {"optimizer": UndoesNothing}, Violation, "I1"),
            (
                "the first bank",
                [(Backward, "on_weights_ready", reads_the_first_bank)],
                {},
                Violation,
                "I1: the copy of an update",
            ),
            ("the first bank's state", [(Handover, "state_in", hands_over_the_first_bank)], {}, Violation, "I1|I3"),
            (
                "overwrites gradients",
                [*READS, *LAWLESS, (World, "reading", looks_at_nothing)],
                {},
                Violation,
                "I1|I2",
            ),
            (
                "copies weights unasked",
                [
                    (Backward, "on_departure", copies_weights_unasked),
                    (Backward, "on_weights_ready", hears_of_no_update),
                ],
                {},
                Violation,
                "I1|I2",
            ),
            ("hands over while updating", HANDS_OVER, {}, WRONG_TIME, "handover to .pu while|started with"),
            (
                "the same, unguarded",
                [*HANDS_OVER, (LayerLife, "place", refuses_no_handover)],
                {},
                WRONG_TIME,
                "while|I2|I3|started with",
            ),
            (
                "state before the update",
                [(Handover, "begin", reads_state_before_the_update), (Handover, "state_in", reads_state_once)],
                {},
                Violation,
                "I1: an update on another's leftovers|I3: .* in the middle",
            ),
            (
                "updates before the state is there",
                [(Streams, "land", lands_all_but("state"))],
                {},
                Violation,
                "I1: an update on another's leftovers",
            ),
            (
                "takes over before the copy",
                [(Handover, "_place", takes_over_before_the_copy)],
                {},
                Violation,
                "I1: an update on another's leftovers",
            ),
            ("closes arenas early", [(handover, "_clear_up", closes_arenas_early)], {}, Violation, "I2: .* given up"),
            (
                "applies plans early",
                [(Boundary, "begin_plan", begins_plans_early)],
                {},
                Violation,
                "I3: a plan holds from its step on",
            ),
            ("one acknowledges", [], {"coordinator": HastyPlanner}, Violation, "I3: both acknowledge"),
            ("the last plan counts", [], {"optimizer": ForgetfulOptimizer}, OwnershipError, "cannot go to"),
        )
    ],
)
def test_planted_fault_is_found(patches: Patches, parties: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        search(patches, **parties)
