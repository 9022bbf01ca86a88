"""I1, I2 and I3 under random interleavings of gradients, weights, plans, acknowledgements and handovers.

`interleaving_model` has the run, the real state machines in a model of memory. Here are the property, and the
faults that must break it: a search that finds none of them would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interleaving_model import Coordinator, Optimizer, Planner, Run
from interleaving_trainer import Trainer, Waiting
from interleaving_world import Job, Mark, Violation

from hytrain.model.lifecycle import Command, Event, InvalidTransition, LayerLife, State
from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from protocol import messages as m
from protocol.placement import Placement
from workers.update_queue import Tile, UpdateQueue

EXAMPLES = 250


def search(*, examples: int = EXAMPLES, **parties: Any) -> None:
    """Play runs until one goes wrong. The same runs each time, and no time spent on making a failure small."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(seed=st.integers(0, 2**32), layers=st.integers(1, 4), steps=st.integers(2, 8))
    def play(seed: int, layers: int, steps: int) -> None:
        Run(seed, layers=layers, steps=steps, **parties).play()

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


# ---------------------------------------------------------------- I1: planted stale and torn reads


class Lawless(LayerLife):
    """A layer's life that takes whatever comes for what should have come."""

    BEFORE = {
        Event.FILLED: State.CURRENT,
        Event.COPIED: State.LEAVING,
        Event.WEIGHTS_READY: State.UPDATING,
        Event.AWAITED: State.LANDING,
    }

    def on(self, event: Event, step: int) -> Command | None:
        self.state = self.BEFORE[event]
        self.updated = self.updated if event is Event.FILLED else step
        return super().on(event, step)


class ReadsWithoutWaiting(Trainer):
    def await_layer(self, lid: int) -> Waiting:
        yield None


class ReadsWithoutWaitingUnguarded(ReadsWithoutWaiting):
    life_type = Lawless


class StreamDoesNotWait(Trainer):
    """The pre-hook waits for the message, and nobody for the copy."""

    def await_layer(self, lid: int) -> Waiting:
        life = self.lives[lid]
        if life.is_current:
            return
        yield lambda: life.state is State.LANDING
        life.on(Event.AWAITED, life.updated)


class SendsBeforeTheCopy(Trainer):
    """GradReady as soon as the copy has been enqueued."""

    def send_off(self, lid: int, ready: m.GradReady, copied: Mark) -> None:
        super().send_off(lid, ready, Mark())
        self.jobs[-1].after = None


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


class ReadsTheFirstBank(Trainer):
    """As if there were no other."""

    def weights_ready(self, lid: int, step: int) -> None:
        self.banks[lid] = (0,) * len(self.banks[lid])
        super().weights_ready(lid, step)


class HandsOverTheFirstBank(Trainer):
    def state_in(self, lid: int) -> None:
        self.banks[lid] = (0,) * len(self.banks[lid])
        super().state_in(lid)


# ---------------------------------------------------------------- I2: planted collisions in the planes


class OverwritesGradients(ReadsWithoutWaitingUnguarded):
    """Backward goes on as if every update had ended, and what it reads is not looked at."""

    def reading(self, lid: int, step: int) -> Callable[[], None]:
        return lambda: None


class CopiesWeightsUnasked(Trainer):
    """The copy in follows right after GradReady, while the optimizer writes."""

    def send_next(self) -> None:
        job: Job = self.jobs[0]
        super().send_next()
        if isinstance(job.message, m.GradReady):
            self.weights_ready(job.message.lid, job.message.step)


# ---------------------------------------------------------------- I3: planted quarrels over a layer


class HandsOverWhileUpdating(Trainer):
    def finish_update(self, lid: int) -> Waiting:
        yield None


class ReadsStateBeforeTheUpdate(Trainer):
    """The state goes to the device as soon as the plan holds, whatever the optimizer still does with it."""

    def begin(self, step: int) -> None:
        super().begin(step)
        for lid, moving in self.moving.items():
            if moving.arrival is None:
                self.state_in(lid)

    def weights_ready(self, lid: int, step: int) -> None:
        moving = self.moving.pop(lid, None)
        super().weights_ready(lid, step)
        if moving is not None:
            self.moving[lid] = moving


class UpdatesBeforeTheStateIsThere(Trainer):
    def await_state(self, arrival: Mark) -> None:
        pass


class TakesOverBeforeTheCopy(Trainer):
    def take_over(self, taking: m.TakeOver, copied: Mark) -> None:
        super().take_over(taking, Mark())
        self.jobs[-1].after = None


class ClosesArenasEarly(Trainer):
    """The arena is given up at once, not when its state has been read."""

    def to_gpu(self, *arguments: Any) -> None:
        super().to_gpu(*arguments)
        self.closing[-1][0].closed = True


class NeverRefusesAHandover(LayerLife):
    def place(self, placement: Placement) -> None:
        self.placement, self.state = placement, State.CURRENT


class HandsOverWhileUpdatingUnguarded(HandsOverWhileUpdating):
    life_type = NeverRefusesAHandover


class AppliesPlansEarly(Trainer):
    def boundary(self, step: int) -> Waiting:
        if self.move is not None and self.move.prepared:
            self.begin(step)
            yield None


class OneIsEnough(PlanLedger):
    """Commits as soon as one side has acknowledged."""

    def on_ack(self, role: str, ack: m.PlanAck) -> m.Reassign | None:
        for party in ("trainer", "optimizer"):
            reassign = super().on_ack(party, ack)
        return reassign


class HastyPlanner(Planner):
    ledger_type = OneIsEnough


class OnlyTheLastPlan(PlanBook):
    """Judges a handover by the newest plan, which may not be the one that it belongs to."""

    def allows(self, plan_id: int, lid: int, updates: str) -> bool:
        return self.plan is not None and self.plan.placement(lid).updates == updates


class ForgetfulOptimizer(Optimizer):
    book_type = OnlyTheLastPlan


@pytest.mark.parametrize(
    ("party", "error", "said"),
    [
        ({"trainer": ReadsWithoutWaiting}, (InvalidTransition, Violation), "FILLED of step .* while|I1"),
        ({"trainer": ReadsWithoutWaitingUnguarded}, Violation, "I1: "),
        ({"trainer": StreamDoesNotWait}, Violation, "I1: step .* reads layer|I1: .* at the end|I3: .* in the middle"),
        ({"trainer": SendsBeforeTheCopy}, Violation, "I1: the optimizer reads a gradient that has not arrived"),
        ({"optimizer": AnnouncesHalfAnUpdate}, Violation, "I1|I2|I3"),
        ({"optimizer": AnnouncesBeforeTheVerdict}, (InvalidTransition, Violation), "I1|I2|I3|WEIGHTS_READY"),
        ({"optimizer": UndoesNothing}, Violation, "I1"),
        ({"trainer": ReadsTheFirstBank}, Violation, "I1: the copy of update"),
        ({"trainer": HandsOverTheFirstBank}, Violation, "I1|I3"),
        ({"trainer": OverwritesGradients}, Violation, "I1|I2"),
        ({"trainer": CopiesWeightsUnasked}, Violation, "I1|I2"),
        ({"trainer": HandsOverWhileUpdating}, InvalidTransition, "handover to .pu while"),
        ({"trainer": HandsOverWhileUpdatingUnguarded}, (InvalidTransition, Violation), "while|I2|I3"),
        (
            {"trainer": ReadsStateBeforeTheUpdate},
            Violation,
            "I1: an update on another's leftovers|I3: .* in the middle",
        ),
        ({"trainer": UpdatesBeforeTheStateIsThere}, Violation, "I1: an update on another's leftovers"),
        ({"trainer": TakesOverBeforeTheCopy}, Violation, "I1: an update on another's leftovers"),
        ({"trainer": ClosesArenasEarly}, Violation, "I2: the state of layer .* that was given up"),
        ({"trainer": AppliesPlansEarly}, Violation, "I3: a plan holds from its step on"),
        ({"coordinator": HastyPlanner}, Violation, "I3: both acknowledge"),
        ({"optimizer": ForgetfulOptimizer}, OwnershipError, "cannot go to"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_planted_fault_is_found(party: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        search(**party)
