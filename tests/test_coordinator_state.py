"""What the coordinator decides, message by message: joining, plans, records, commands, one trainer after another."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hytrain.planner.book import THREADS_EXPONENT
from hytrain.planner.contention import ENOUGH_STEPS
from hytrain.planner.policies import Decision
from hytrain.planner.profile import Limits, Profile
from hytrain.run.ownership import OwnershipError
from protocol import messages as m
from protocol.address import Address
from protocol.handles import layout
from protocol.metrics import BY_NAME
from protocol.placement import CPU, GPU, VISIT, Places
from protocol.sizes import Sizes
from workers.coordinate.coordinator_state import CoordinatorState
from workers.coordinate.fleet import GATHER_STEPS, LATE_S
from workers.coordinate.members import SILENT_S, HandshakeError
from workers.coordinate.records import LOG_PATIENCE_STEPS
from workers.coordinate.tracing import Tracing
from workers.effects import Abort, Amend, Answer, Command, Draw, Note, Publish, Send, Write
from workers.planning.measured import OPEN_STEPS, WARM_UP_STEPS
from workers.planning.planning import BESIDE_TRAINING, Planning
from workers.planning.room import MARGIN_TO_OTHERS, Room
from workers.watch import status_text as view

LAYERS = 4
ALL = tuple(range(LAYERS))
TRAINER, OPTIMIZER, MONITOR = Address("trainer", 0), Address("optimizer", 0), Address("monitor", 9)
Sent = list[tuple[Address, m.Message]]


def on_gpu(places: Places) -> tuple[int, ...]:
    return tuple(sorted(places.gpu))


def placed(gpu_lids: Sequence[int], layers: int = LAYERS) -> Places:
    return Places.chosen(layers, frozenset(gpu_lids))


def usual_sender(message: m.Message) -> Address:
    if isinstance(message, m.OptimizerReport):
        return OPTIMIZER
    return MONITOR if isinstance(message, m.StatusRequest | m.Command) else TRAINER


class Driver:
    """Feeds a coordinator's state and sorts what comes out; its `check()` runs after every event."""

    def __init__(self, *, replan_every: int = 1) -> None:
        self.state = CoordinatorState(
            run_name="run", run_dir="/runs/run", pid=1, host="here", replan_every=replan_every, ranks=2
        )
        self.commands: list[Command] = []
        self.now_s = 0.0
        self.written: list[dict[str, Any]] = []  # all records

    def handle(self, message: m.Message, sender: Address | None = None) -> list[Command]:
        """Let `message` arrive: from a trainer, unless it is one that only optimizers or monitors send."""
        try:
            self.commands = self.state.handle(message, sender or usual_sender(message), self.now_s)
        finally:
            self.state.check()
        self.written += self.records
        for command in self.commands:
            assert not isinstance(command, Send | Answer) or "coordinator" in command.message.by, "it would be dropped"
        return self.commands

    def sent(self, message: m.Message, sender: Address | None = None) -> Sent:
        """Handle `message`; what is sent to whom."""
        return [(c.to, c.message) for c in self.handle(message, sender) if isinstance(c, Send)]

    def plan(self, message: m.Message, sender: Address | None = None) -> m.Plan:
        """Handle `message`, which brings a plan, for both alike."""
        (trainer, plan), other = self.sent(message, sender)
        assert trainer == TRAINER and isinstance(plan, m.Plan) and other == (OPTIMIZER, plan)
        return plan

    def answer(self, message: m.Message) -> m.Message:
        (answer,) = [command.message for command in self.handle(message) if isinstance(command, Answer)]
        return answer

    def ask(self, name: str, value: str) -> Sent:
        """A monitor's command, which is taken; what is sent to whom."""
        assert self.answer(m.Command(name=name, value=value)).text == f"{name}={value} from the next plan on"
        return [(c.to, c.message) for c in self.commands if isinstance(c, Send)]

    @property
    def planning(self) -> Planning:
        planning = self.state.fleet.seat(0).planning
        assert planning is not None
        return planning

    @property
    def profile(self) -> Profile:
        profile = self.planning._book.profile()
        assert profile is not None
        return profile

    @property
    def notes(self) -> str:
        return "\n".join(command.text for command in self.commands if isinstance(command, Note))

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(command.line) for command in self.commands if isinstance(command, Write)]

    def status(self) -> m.Status:
        return self.answer(m.StatusRequest())

    @property
    def owned(self) -> tuple[int, ...]:
        return on_gpu(self.status().places)

    # ------------------------------------------------------------ a run

    def join(self, who: Address, pid: int = 10, cores: int = 0) -> None:
        assert self.sent(hello(pid), who) == [(who, WELCOME)]
        self.handle(m.Ready(detail=f"{who.role} is up", cores=cores), who)

    def start(self, *, cores: int = 0, **changes: Any) -> m.Plan:
        """Optimizer and trainer join, and agree on the first plan."""
        self.join(OPTIMIZER, 10, cores)
        self.join(TRAINER, 11)
        plan = self.first_plan(**changes)
        self.hold(plan, moved=0)
        return plan

    def first_plan(self, **changes: Any) -> m.Plan:
        """A table goes to the optimizer; once both have calibrated, both get the plan."""
        asked = table(**changes)
        assert self.sent(asked) == [(OPTIMIZER, asked)]
        assert self.sent(TRAINERS) == []
        return self.plan(OPTIMIZERS, OPTIMIZER)

    def hold(self, plan: m.Plan, gpu_lids: tuple[int, ...] | None = None, moved: int = 2) -> Sent:
        """The plan is agreed on and applied, as it is or with these layers; what follows."""
        assert self.sent(ack(plan.plan_id), OPTIMIZER) == []
        assert self.sent(ack(plan.plan_id)) == [(TRAINER, m.Reassign(plan_id=plan.plan_id))]
        return self.sent(applied(plan, gpu_lids, moved))

    def next_plan(self, first_step: int = 0, steps: int = 30) -> m.Plan | None:
        """Report steps until a plan is proposed."""
        for step in range(first_step, first_step + steps):
            if sent := self.sent(report(step, self.owned)):
                assert [to for to, _ in sent] == [TRAINER, OPTIMIZER]
                return sent[0][1]
        return None

    def leave(self) -> None:
        self.handle(m.Goodbye())
        self.handle(m.Goodbye(), OPTIMIZER)


def hello(pid: int) -> m.Hello:
    return m.Hello(pid=pid, inbox=f"inbox-{pid}")


WELCOME = m.Welcome(coordinator_pid=1)
TRAINERS = m.Calibration(d2h_s=1e-10, h2d_s=1e-10, gpu_update_s=1e-9)
OPTIMIZERS = m.Calibration(cpu_update_s=1e-9)
SEGMENT = m.Segment(name="w", numel=1 << 20, dtype="bfloat16", grads_dtype="bfloat16", group=0)
NAMES = {"inbox": "trainer-11", "device": "cpu", "policy": "random", "objective": "speed", "backend": "auto"}
TABLE = m.LayerTable(
    layers=tuple(m.Layer(lid=lid, position=lid, name=f"block {lid}", segments=(SEGMENT,)) for lid in ALL),
    **NAMES,
    **dict.fromkeys(("awaits_verdict", "speculate", "continues"), False),
    **dict.fromkeys(("k", "gpu_bytes", "host_bytes")),
)


def table(**changes: Any) -> m.LayerTable:
    return replace(TABLE, **changes)


def ack(plan_id: int, accepted: bool = True, reason: str = "") -> m.PlanAck:
    return m.PlanAck(plan_id=plan_id, accepted=accepted, reason=reason)


def applied(plan: m.Plan, gpu_lids: tuple[int, ...] | None = None, moved: int = 2) -> m.PlanApplied:
    places = plan.places if gpu_lids is None else placed(gpu_lids)
    return m.PlanApplied(plan_id=plan.plan_id, step=plan.step, places=places, moved=moved, handover_s=0.25)


def times(forward_s: float = 1e-3, backward_s: float = 2e-3, layers: int = LAYERS) -> tuple[m.LayerTimes, ...]:
    return tuple(m.LayerTimes(lid=lid, forward_s=forward_s, backward_s=backward_s) for lid in range(layers))


STEP: dict[str, Any] = {"step": 0, "number": 1, "measured": 0, "at_s": 100.0, "step_s": 0.5, "stall_s": 0.1, "k": 0.0}
STEP |= {
    "wall_time": 1e9,
    "middle_s": 0.0,
    "exposed_s": 0.0,
    "starved": 0.0,
    "gather_s": None,
    "moving": False,
    "gpu_usable_bytes": None,
    "gpu_needed_bytes": None,
    "host_free_bytes": None,
    "waited_bytes": 0,
    "activation_bytes": 0,
    "to_device_bytes": 3 << 20,
    "to_host_bytes": 2 << 20,
}
REPORT = m.TrainerReport(**STEP, places=placed(()), layers=times())


def report(step: int, gpu_lids: tuple[int, ...] = (), **changes: Any) -> m.TrainerReport:
    usual = {"step": step, "number": step + 1, "at_s": 100.0 + step, "measured": step, "k": len(gpu_lids) / LAYERS}
    return replace(REPORT, **({**usual, "places": placed(gpu_lids)} | changes))


def cpu_report(step: int, update_s: float, lids: Sequence[int] = (2, 3), threads: int = 4) -> m.OptimizerReport:
    updates = tuple(m.CpuUpdate(lid=lid, update_s=update_s) for lid in lids)
    return m.OptimizerReport(step=step, threads=threads, busy_s=update_s * len(lids), updates=updates)


def judge(step: int, *, clipped: bool = False, skipped: bool = False) -> m.Verdict:
    return m.Verdict(step=step, scale=0.5 if clipped else 1.0, skipped=skipped)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_processes_join_and_become_ready(driver: Driver) -> None:
    driver.join(OPTIMIZER, 10)
    driver.handle(hello(11))
    seen = [(process.address.role, process.pid, process.detail) for process in driver.status().processes]
    others = [("optimizer", 10, "optimizer is up"), ("trainer", 11, "starting")]
    assert seen == [("coordinator", 1, "plans and records"), *others]
    with pytest.raises(HandshakeError, match="joined as process 10, now 11"):
        driver.handle(hello(11), OPTIMIZER)


@pytest.mark.parametrize("message", [report(0), m.Log(step=1, numbers={}), ack(0)], ids=type)
def test_without_a_trainer_nothing_counts(driver: Driver, message: m.Message) -> None:
    assert driver.handle(message) == [Note(f"{type(message).__name__} without a trainer: dropped")]
    assert driver.answer(m.Command(name="k", value="1")) == m.CommandReply(ok=False, text="there is no trainer")


def test_what_is_not_for_the_coordinator_does_not_end_it(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0)
    assert driver.handle(m.GiveUp(plan_id=0, lid=0, step=1)) == [
        Note("GiveUp from trainer-0 is not for the coordinator: dropped")
    ]


@pytest.mark.parametrize(("k", "gpu_lids"), [(0.0, ()), (0.3, (0, 1)), (1.0, ALL)])
@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_first_plan_waits_for_both_calibrations(
    driver: Driver, k: float, gpu_lids: tuple[int, ...], trainer_first: bool
) -> None:
    measured = [(TRAINERS, TRAINER), (OPTIMIZERS, OPTIMIZER)]
    first, last = measured if trainer_first else measured[::-1]
    driver.handle(table(k=k, policy="fixed"))
    assert driver.sent(*first) == []
    plan = driver.plan(*last)
    assert (plan.plan_id, plan.step, on_gpu(plan.places), plan.k) == (0, 0, gpu_lids, len(gpu_lids) / LAYERS)
    driver.hold(plan)
    assert driver.notes == "plan 0 in effect from step 0 on: moved 2 layers, the loop waited 250.0 ms"
    assert driver.owned == gpu_lids and driver.status().layer_names == tuple(f"block {lid}" for lid in ALL)


@pytest.mark.parametrize("objective", m.OBJECTIVES)
def test_k_auto_begins_with_what_the_host_cannot_hold(driver: Driver, objective: str) -> None:
    """And grows once a step was measured, if that makes steps shorter."""
    size = layout(TABLE.layers[0]).nbytes
    room = {"host_bytes": 3 * size, "gpu_bytes": 1 << 40, "device": "cuda"}
    plan = driver.start(policy="deadline", objective=objective, **room)
    assert on_gpu(plan.places) == (0,)
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    grown = driver.sent(report(WARM_UP_STEPS, (0,), gpu_usable_bytes=1 << 40, gpu_needed_bytes=0))
    assert bool(grown) == (objective != "gpu-memory")
    assert all(len(on_gpu(plan.places)) > 1 for _, plan in grown)


@pytest.mark.parametrize(("gpu_update_s", "moves"), [(1e-12, True), (1e-3, False)])
def test_calibration_stands_in_for_what_was_not_measured(driver: Driver, gpu_update_s: float, moves: bool) -> None:
    driver.handle(table(policy="deadline"))
    driver.handle(replace(TRAINERS, gpu_update_s=gpu_update_s))
    driver.hold(driver.plan(OPTIMIZERS, OPTIMIZER), moved=0)
    driver.handle(cpu_report(WARM_UP_STEPS, 1.0, ALL))
    assert bool(driver.sent(report(WARM_UP_STEPS))) is moves


def test_offloaded_weights_need_room_on_the_gpu_with_the_state(driver: Driver) -> None:
    """So fewer layers fit there than without them."""
    assert driver.start(k=1.0, gpu_bytes=LAYERS * 10 * SEGMENT.numel).k == 1.0
    offloaded, blocks = Driver(), tuple((lid,) for lid in ALL)
    room = {"gpu_bytes": (LAYERS * 10 + 3) * SEGMENT.numel, "window_bytes": 2 * SEGMENT.numel}
    plan = offloaded.start(k=1.0, offload_weights=1.0, blocks=blocks, **room)
    assert (plan.k, plan.places.offloaded) == (0.75, {3})


def test_where_gradients_have_no_room_all_layers_visit_at_first(driver: Driver) -> None:
    """So the GPU need not own any."""
    whole = layout(TABLE.layers[0]).nbytes
    room = {"device": "cuda", "gpu_bytes": 1 << 40, "policy": "deadline", "visit": None}
    plan = driver.start(**room, host_bytes=LAYERS * whole)
    assert set(plan.places) == {CPU}
    tight = Driver().start(**room, host_bytes=LAYERS * whole - 1)
    assert set(tight.places) == {VISIT}


def test_gradients_get_host_memory_after_others_have_left(driver: Driver) -> None:
    """All visit, and the host has room for the gradients of one: the others' come when the GPU has taken two over."""
    whole, grads = layout(TABLE.layers[0]).nbytes, layout(TABLE.layers[0]).plane_nbytes["grads"]
    first = driver.start(
        policy="deadline", visit=None, device="cuda", gpu_bytes=1 << 40, host_bytes=LAYERS * (whole - grads) + grads
    )
    assert set(first.places) == {VISIT}
    found = []
    for step in (4, 8):
        wanted = Decision(gpu_lids=frozenset({0, 1}), visit=0.0, offload=0.0, reason="so", predicted_step_s=1.0)
        _, to_trainer, _ = driver.planning._propose(wanted, step)
        assert isinstance(to_trainer, Send) and isinstance(plan := to_trainer.message, m.Plan)
        driver.hold(plan)
        found.append(plan.places)
    assert found == [Places.of([GPU, GPU, CPU, other]) for other in (VISIT, CPU)]


def test_what_steps_need_is_told_from_what_is_placed(driver: Driver) -> None:
    """So what leaves the GPU makes room there, although the peak of all steps stays."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40)
    state, waiting = 10 * SEGMENT.numel, 2 * 2 * SEGMENT.numel

    def room(step: int, gpu_lids: tuple[int, ...], needed: int, *, moving: bool = False) -> int | None:
        driver.handle(report(step, gpu_lids, gpu_usable_bytes=100 * state, gpu_needed_bytes=needed, moving=moving))
        found = driver.planning.room.limits.gpu_state_bytes
        assert found is not None
        return (found + waiting) // state

    assert room(1, (), 20 * state) == 80
    assert room(2, (), 22 * state, moving=True) == 78, "two layers are on their way"
    assert room(3, (0, 1), 22 * state) == 78, "and have come in the middle of this step"
    assert [room(step, (0, 1), 22 * state) for step in (4, 5)] == [78, 80]
    assert [room(step, (), 22 * state) for step in (6, 7, 8, 9)] == [80] * 4, "they have left"
    assert room(10, (), 23 * state) == 77, "now steps need more"


def test_what_a_step_has_needed_stays_counted_when_state_has_come(driver: Driver) -> None:
    """The longest batch comes first, and may come again. Or updates no longer wait for step()."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40, in_step=True)
    room, numel = driver.planning.room, SEGMENT.numel
    state, gradients = 10 * numel, 2 * numel

    def for_steps(step: int, gpu_lids: tuple[int, ...], needed: int, **changes: Any) -> int:
        report_of = {"gpu_usable_bytes": 100 * state, "gpu_needed_bytes": needed * numel, "in_step": True} | changes
        driver.handle(report(step, gpu_lids, **report_of))
        return room._for_steps_bytes // numel

    assert for_steps(1, (), 300) == 300
    assert for_steps(2, (), 300, moving=True) == 300
    placed = 2 * (state + gradients) // numel
    assert [for_steps(step, (0, 1), 310) for step in (3, 4, 5)] == [300] * 3, "a usual batch, beside two layers"
    assert for_steps(6, (0, 1), 330) == 330 - placed, "a longer one"
    without = 330 - placed + 2 * gradients // numel
    assert for_steps(7, (0, 1), 330, in_step=False) == without, "gradients were not there at the peak"
    for number, in_step in enumerate([True, False] * 3):
        found = [for_steps(step, (0, 1), 330, in_step=in_step) for step in range(8 + 4 * number, 12 + 4 * number)]
    assert found[-1] == without, "not more each time"


def test_a_layer_that_was_evicted_visits_and_its_memory_is_planned_for_steps(driver: Driver) -> None:
    """Although the peak of all steps has not grown."""
    driver.start(policy="fixed", k=0.5, device="cuda", gpu_bytes=1 << 40)
    state, waiting = 10 * SEGMENT.numel, 2 * 2 * SEGMENT.numel
    now = Places.of([GPU, GPU, CPU, CPU])
    assert driver.planning.places == now

    def step(number: int, needed: int) -> int:
        places = driver.planning.places
        driver.handle(report(number, places=places, gpu_usable_bytes=100 * state, gpu_needed_bytes=needed * state))
        found = driver.planning.room.limits.gpu_state_bytes
        assert found is not None
        return (found + waiting) // state

    assert [step(number, 32) for number in (1, 2, 3)] == [70] * 3
    told = m.Evicted(lid=1, step=4, nbytes=3_000_000_000, evict_s=0.5, reason="a batch of 9 tokens")
    driver.handle(told)
    assert "1 layer has left the GPU, 2.79 GiB in 0.50 s, for a batch of 9 tokens: " in driver.notes
    assert driver.planning.places == Places.of([GPU, VISIT, CPU, CPU])
    assert driver.status().reason.endswith("for a batch of 9 tokens")
    assert driver.planning._shares == (0.25, 0.0)
    driver.handle(replace(told, lid=0))
    assert step(4, 32) == 68 and step(5, 20) == 68
    for number in range(6, 16):
        step(number, 20)
    evicted = [record for record in driver.written if "evict_s" in record]
    assert [record["evict_s"] for record in evicted] == [1.0]
    assert evicted[0]["reason"].startswith("the state of 2 layers has left the GPU, 5.59 GiB in 1.00 s")
    assert driver.written[-1]["evicted_bytes"] == 6_000_000_000 and "evicted_bytes" not in driver.written[0]
    with pytest.raises(OwnershipError, match="was not there"):
        driver.handle(told)


def test_memory_that_state_has_not_found_is_not_planned_with(driver: Driver) -> None:
    """A third layer has found none. The trainer is asked again once more seems to be there, by a layer's state."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40)
    state = 10 * SEGMENT.numel
    usable = 100 * state

    def step(number: int) -> m.Plan | None:
        owned = driver.owned
        driver.handle(cpu_report(number, 10.0, lids=sorted(set(ALL) - {*owned})))
        needed = (20 + len(owned)) * state
        sent = driver.sent(report(number, owned, gpu_usable_bytes=usable, gpu_needed_bytes=needed))
        return sent[0][1] if sent else None

    def asked(steps: range) -> tuple[int, m.Plan]:
        return next((number, plan) for number in steps if (plan := step(number)) is not None)

    number, plan = asked(range(30))
    assert plan.places.gpu == {*ALL}
    driver.hold(plan, (0, 1))
    assert [step(number) for number in range(number + 1, number + 30)] == [None] * 29
    usable -= 30 * state
    assert [step(number) for number in range(number + 30, number + 60)] == [None] * 30
    usable += state - 1
    assert [step(number) for number in range(number + 60, number + 90)] == [None] * 30
    usable += 1
    number, plan = asked(range(number + 90, number + 99))
    assert plan.places.gpu == {*ALL}
    driver.hold(plan, (0, 1))
    again, plan = asked(range(number + 1, number + 9999))
    assert plan.places.gpu == {*ALL}, "it may have been there again before the first report"
    assert again >= number + OPEN_STEPS**3


@pytest.mark.parametrize("evicts", [True, False])
def test_what_a_plan_lacks_since_an_eviction_tells_nothing_of_memory(driver: Driver, evicts: bool) -> None:
    """The trainer leaves out what a plan from before it would bring to the GPU."""
    driver.start(policy="fixed", k=0.5, device="cuda", gpu_bytes=1 << 40)
    driver.ask("k", "1.0")
    plan = driver.next_plan(WARM_UP_STEPS)
    assert plan is not None and plan.k == 1.0
    driver.sent(ack(plan.plan_id), OPTIMIZER)
    driver.sent(ack(plan.plan_id))
    if evicts:
        driver.handle(m.Evicted(lid=1, step=plan.step, nbytes=1, evict_s=0.5, reason="a batch of 9 tokens"))
    driver.sent(replace(applied(plan), places=Places.of([GPU, VISIT if evicts else GPU, CPU, CPU])))
    limit = driver.planning.room.limits.gpu_state_bytes
    assert limit is not None and (limit == 1 << 40) is evicts


def test_copies_that_wait_for_visits_do_not_tell_how_fast_the_link_is(driver: Driver) -> None:
    driver.start()
    visits = REPORT.places.moved({0}, VISIT)
    found = []
    for first, places, copy_s in ((0, REPORT.places, 1e-3), (10, visits, 1.0), (20, REPORT.places, 2e-3)):
        for step in range(first, first + 10):
            driver.handle(cpu_report(step, 1e-3, ALL))
            layers = tuple(replace(each, h2d_s=copy_s, d2h_s=copy_s) for each in times())
            driver.handle(report(step, places=places, layers=layers))
        found += [(layer.h2d_s, layer.d2h_s) for layer in driver.profile.layers[:1]]
    assert found == [pytest.approx(2 * (copy_s,)) for copy_s in (1e-3, 1e-3, 2e-3)]


def test_layers_stay_if_no_memory_has_room_for_one_more(driver: Driver) -> None:
    """Two layers are to change places, where GPU and host are full. It is said why nothing happens."""
    driver.start(policy="fixed", k=0.25, device="cuda", gpu_bytes=1 << 40)
    planning, whole = driver.planning, layout(TABLE.layers[0]).nbytes
    wanted = Decision(gpu_lids=frozenset({1}), visit=0.0, offload=0.0, reason="asked")
    planning.room.limits = Limits(gpu_state_bytes=10 * SEGMENT.numel, host_bytes=3 * whole)
    [note] = planning._propose(wanted, 9)
    assert isinstance(note, Note) and "no room to move any" in note.text and planning.reason == note.text
    assert planning._propose(wanted, 9) == [], "it is told once"
    planning.room.limits = Limits(gpu_state_bytes=10 * SEGMENT.numel, host_bytes=4 * whole)
    assert len(planning._propose(wanted, 9)) == 3 and planning.reason.startswith("first what there is room for")


def test_layers_that_are_beyond_their_bounds_can_leave(driver: Driver) -> None:
    """The GPU has less room than its layers take by now, so one goes to the host."""
    driver.start(policy="fixed", k=0.5, device="cuda", gpu_bytes=1 << 40)
    planning = driver.planning
    planning.room.limits = Limits(gpu_state_bytes=10 * SEGMENT.numel, host_bytes=None)
    _, to_trainer, _ = planning._propose(Decision(gpu_lids=frozenset({0}), visit=0.0, offload=0.0, reason="so"), 9)
    assert isinstance(to_trainer, Send) and on_gpu(to_trainer.message.places) == (0,)


@pytest.mark.parametrize("room_for_both", [True, False])
def test_what_comes_to_the_gpu_waits_for_what_leaves(driver: Driver, room_for_both: bool) -> None:
    """State comes before the weights that are to be offloaded have left. What has no room beside them comes later."""
    element = SEGMENT.numel
    state, weights, waiting = 10 * element, 2 * element, 2 * 2 * element
    blocks = tuple((lid,) for lid in ALL)
    start = driver.start(policy="fixed", k=0.0, device="cuda", gpu_bytes=1 << 40, offload_weights=0.5, blocks=blocks)
    assert start.places.offloaded == {0, 2}
    usable = 2 * state + (2 + room_for_both) * weights + waiting

    def follow(step: int, plan: m.Plan) -> Sent:
        where = {"places": plan.places}
        needed = len(on_gpu(plan.places)) * state + (LAYERS - len(plan.places.offloaded)) * weights
        return driver.sent(report(step, **where, gpu_usable_bytes=usable, gpu_needed_bytes=needed))

    def asked(first_step: int, plan: m.Plan) -> m.Plan:
        found = next(sent for step in range(first_step, first_step + 9) if (sent := follow(step, plan)))
        return found[0][1]

    follow(1, start)
    driver.answer(m.Command(name="k", value="0.5"))
    plan = asked(2, start)
    if not room_for_both:
        assert (on_gpu(plan.places), plan.places.offloaded) == ((0,), {2, 3}) and "first what there is" in plan.reason
        driver.hold(plan, moved=0)
        driver.planning.wishes.k = 0.0  # the rest of that plan comes, not another one
        plan = asked(12, plan)
    assert (on_gpu(plan.places), plan.places.offloaded) == ((0, 1), {2, 3})


def test_the_rest_of_a_plan_is_decided_anew_if_it_has_no_room_any_more(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, device="cuda", gpu_bytes=1 << 40)
    driver.handle(report(WARM_UP_STEPS))
    planning = driver.planning
    planning._rest = Decision(gpu_lids=frozenset({0, 1}), visit=0.0, offload=0.0, reason="the rest")
    usable = 10 * SEGMENT.numel
    needed = {"gpu_usable_bytes": usable, "gpu_needed_bytes": 0}
    for step in range(WARM_UP_STEPS + 1, WARM_UP_STEPS + 6):
        assert driver.sent(report(step, **needed)) == [], "k=0 stays"
    assert planning._rest is None


def test_planes_give_way_to_others_who_take_host_memory(driver: Driver) -> None:
    """They may take a part of the margin. What they free is planned with again. Moving layers have memory twice."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40, host_bytes=1 << 40)
    planes = LAYERS * driver.planning._facts[0].host_bytes
    found, usable = [], {"gpu_usable_bytes": 1 << 40, "gpu_needed_bytes": 0}
    for step, free in enumerate((5, -1, -MARGIN_TO_OTHERS, None, 7), WARM_UP_STEPS):
        driver.handle(report(step, host_free_bytes=free, **usable))
        found.append((driver.planning.room.limits.host_bytes or 0) - planes)
    assert found == [5, 0, 0, 0, 7]
    driver.handle(report(step + 1, host_free_bytes=9, moving=True, **usable))
    assert driver.planning.room.limits.host_bytes == planes + 7
    plan = driver.plan(report(step + 2, host_free_bytes=-MARGIN_TO_OTHERS - 1, **usable))
    assert len(on_gpu(plan.places)) == LAYERS and "host memory" in plan.reason


def test_activations_take_host_memory_that_planes_cannot_have(driver: Driver) -> None:
    """Once, and where the machine is asked, it knows. Plans simulate their copies."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40, host_bytes=1 << 40)
    planes, usable = LAYERS * driver.planning._facts[0].host_bytes, {"gpu_usable_bytes": 1 << 40, "gpu_needed_bytes": 0}
    found = []
    reports = ((100, None), (100, None), (130, None), (130, 5), (120, None))
    for step, (nbytes, free) in enumerate(reports, WARM_UP_STEPS):
        done = report(step, activation_bytes=nbytes, host_free_bytes=free, **usable)
        driver.handle(done)
        found.append(driver.planning.room.limits.host_bytes)
        expected = planes + nbytes + driver.planning.room._process_bytes
        assert driver.planning.record(done)["predicted_host_bytes"] == expected
    assert found == [(1 << 40) - 100, (1 << 40) - 100, (1 << 40) - 130, planes + 5, planes + 15]
    profile = driver.planning._profile()
    assert profile is not None and profile.activation_bytes == 120


def test_that_no_plan_fits_is_told_once(driver: Driver) -> None:
    """And again after one has fitted. Meanwhile layers stay, and the reason is that of now."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40, host_bytes=1 << 40)
    notes = []
    for step, room in enumerate((0, 0, 1 << 40, 0), WARM_UP_STEPS):
        where = {"gpu_usable_bytes": room, "gpu_needed_bytes": 0}
        assert driver.sent(report(step, host_free_bytes=room if room else -(1 << 40), **where)) == []
        notes.append(driver.notes.count("no plan fits"))
        assert ("no plan fits" in driver.planning.reason) is (not room)
    assert notes == [1, 0, 0, 1]


def test_visits_are_planned_if_they_are_wanted(driver: Driver) -> None:
    """They can do what the CPU is late with, over a link that is fast, and go back to it with a number for k."""
    driver.start(policy="deadline", visit=None, device="cuda")
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    plan = driver.plan(report(WARM_UP_STEPS))
    assert plan.places.visiting and "visits the GPU" in plan.reason
    driver.hold(plan)
    driver.ask("k", "0.5")
    fixed = driver.plan(report(plan.step + 1, on_gpu(plan.places)))
    assert not fixed.places.visiting and fixed.k == 0.5


def test_visits_for_which_there_was_no_room_are_not_counted_on(driver: Driver) -> None:
    driver.start(policy="deadline", visit=None, device="cuda")
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    plan = driver.plan(report(WARM_UP_STEPS))
    owned = on_gpu(plan.places)
    driver.hold(plan, owned)
    assert plan.places.visiting and driver.planning._shares == (0.0, 0.0)
    again = driver.plan(report(plan.step + 1, owned))
    assert again.places.visiting, "it may have room by now"


def test_visits_that_were_drawn_end_with_the_policy(driver: Driver) -> None:
    driver.start(policy="random")
    step = WARM_UP_STEPS
    while not driver.status().places.visiting:
        if sent := driver.sent(report(step, driver.owned, places=driver.status().places)):
            driver.hold(sent[0][1])
        step += 1
    before = driver.status().places
    driver.ask("k", str(len(on_gpu(before)) / LAYERS))
    plan = driver.plan(report(step, driver.owned, places=before))
    assert not plan.places.visiting and plan.k == len(on_gpu(before)) / LAYERS


def test_a_trainer_that_no_plan_fits_is_told_so(driver: Driver) -> None:
    driver.join(TRAINER, 11)
    driver.handle(table(host_bytes=1, gpu_bytes=1))
    driver.handle(TRAINERS)
    ((to, failure),) = driver.sent(OPTIMIZERS, OPTIMIZER)
    assert to == TRAINER and isinstance(failure, m.Failure) and "host memory" in failure.error
    driver.leave()
    driver.join(TRAINER, 12)
    assert driver.first_plan().plan_id == 0


def late(driver: Driver, lids: Sequence[int] = (1, 2, 3)) -> m.Plan:
    """Policy "deadline" hears that the CPU is late by 10 s a layer, and plans."""
    driver.start(policy="deadline")
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids))
    return driver.plan(report(WARM_UP_STEPS))


def test_the_first_measured_step_is_planned_from_at_once() -> None:
    driver = Driver(replan_every=100)
    driver.start(policy="deadline")
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    assert [driver.sent(report(step)) for step in range(WARM_UP_STEPS)] == [[]] * WARM_UP_STEPS, "warming up"
    plan = driver.plan(report(WARM_UP_STEPS))
    assert plan.step == WARM_UP_STEPS + 2 and len(on_gpu(plan.places)) > 1


def test_a_coordinator_that_is_late_records_steps_and_plans_once_it_has_caught_up() -> None:
    driver = Driver()
    driver.start(policy="deadline")
    late = WARM_UP_STEPS + LOG_PATIENCE_STEPS
    driver.handle(cpu_report(late, 10.0, lids=(1, 2, 3)))
    driver.now_s = report(late).at_s + LATE_S
    assert [driver.sent(report(step)) for step in range(late)] == [[]] * late
    assert len(driver.written) == WARM_UP_STEPS, "the others await the loop's own numbers"
    assert driver.planning._book.profile() is None, "nothing is estimated from these steps"
    plan = driver.plan(report(late))
    assert plan.step == late + 2 and len(on_gpu(plan.places)) > 1
    driver.hold(plan, moved=1)
    driver.ask("policy", "random")
    driver.now_s += 2.0
    assert driver.sent(report(late + 1)) == [], "although it is known by now how long all takes"
    assert driver.plan(report(late + 3)).step == late + 5


@pytest.mark.parametrize("moving", [True, False])
def test_steps_in_which_layers_or_memory_moved_are_not_planned_from(driver: Driver, moving: bool) -> None:
    """Of memory the trainer says so with the step's report; what was measured in the step comes later."""
    plan = late(driver)
    driver.hold(plan, moved=0 if moving else 2)
    before, owned, slow = driver.profile, on_gpu(plan.places), {"layers": times(1.2e-3, 2.4e-3), "step_s": 9.0}
    driver.handle(report(plan.step, owned, moving=moving, measured=None))
    driver.handle(cpu_report(plan.step, 99.0))
    driver.handle(report(plan.step + 1, owned, measured=plan.step, **slow))
    assert driver.profile == before
    driver.handle(report(plan.step + 2, owned, measured=plan.step + 1, **slow))
    assert driver.profile != before


@pytest.mark.parametrize("starved", [0.0, 1.0])
def test_work_that_waits_for_launches_is_slowed_down_by_updates(driver: Driver, starved: float) -> None:
    """Of LAYERS * 3 ms of work, half went on beside updates. What they cost is no layer's own."""
    driver.start(policy="fixed", k=0.0)
    work_s = LAYERS * 3e-3
    for step in range(1, 4):
        driver.handle(cpu_report(step, work_s / 4))
        driver.handle(report(step, stall_s=0.0, starved=starved))
    assert driver.profile.drag == pytest.approx(0.4 * starved)
    assert driver.profile.forward_s + driver.profile.backward_s == pytest.approx(work_s * (1 - 0.2 * starved))


def test_times_belong_to_the_step_that_was_measured(driver: Driver) -> None:
    """A GPU runs behind: what a report brings is of an earlier step, and that step's own duration goes with it."""
    driver.start(policy="fixed", k=0.0)
    for step, measured in enumerate((None, 0, 1, 2)):
        driver.handle(report(step, measured=measured, stall_s=0.0, step_s=100.0 if step == 2 else 0.5))
    assert driver.profile.other_s == pytest.approx(0.5 - LAYERS * 3e-3)


def test_the_prediction_is_that_of_the_layers_that_are_owned(driver: Driver) -> None:
    """Also of a plan that was cut short."""
    plan = late(driver, ALL)
    all_on_cpu_s = driver.planning.predicted_step_s
    driver.hold(plan, (0, 1))
    assert driver.owned == (0, 1) and plan.predicted_step_s < driver.planning.predicted_step_s < all_on_cpu_s
    driver = Driver()
    plan = late(driver)
    driver.hold(plan)
    assert driver.planning.predicted_step_s == plan.predicted_step_s < 10


def test_while_a_plan_is_under_way_there_is_no_other(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    assert driver.next_plan(plan.step) is None
    driver.handle(ack(plan.plan_id), OPTIMIZER)
    assert driver.next_plan(plan.step + 30) is None
    with pytest.raises(OwnershipError, match="was not committed"):
        driver.handle(applied(plan))
    driver.handle(ack(plan.plan_id, accepted=False, reason="no"))
    assert driver.notes == "trainer-0 refuses plan 1: no"
    assert driver.next_plan(plan.step + 60) is not None


def test_plans_come_every_so_many_steps_and_only_where_they_change_something() -> None:
    """A command does not wait for the next look."""
    driver = Driver(replan_every=100)
    driver.start(policy="fixed", k=0.5)
    assert driver.next_plan(0, 5) is None
    driver.ask("k", "1.0")
    plan = driver.next_plan(5, 1)
    assert plan.step == 7 and on_gpu(plan.places) == ALL and plan.policy == "fixed"


def test_positions_that_were_learned_decide_what_the_gpu_owns(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.25)
    driver.handle(m.PositionsLearned(positions=(3, 2, 1, 0)))
    assert driver.status().layer_positions == (3, 2, 1, 0)
    assert on_gpu(driver.next_plan().places) == (3,)
    with pytest.raises(ValueError, match="every layer"):
        driver.handle(m.PositionsLearned(positions=(0, 1)))


CLIPPED: dict[str, Any] = {"awaits_verdict": True, "speculate": None}


def long_step(step: int, gpu_lids: tuple[int, ...] = ()) -> m.TrainerReport:
    """Backward takes as long as the CPU's updates, so it could hide them."""
    return report(step, gpu_lids, step_s=4.4, stall_s=0.0, layers=times(0.1, 1.0))


def follow(driver: Driver, step: int, *, clipped: bool) -> list[m.Message]:
    """One such step with the layers that are owned; what is sent."""
    owned = driver.owned
    driver.handle(cpu_report(step, 0.9, sorted({*ALL} - {*owned})))
    driver.handle(judge(step, clipped=clipped))
    return [message for _, message in driver.sent(long_step(step, owned))]


def modes(driver: Driver, first_step: int, steps: int, *, clipped: bool) -> list[bool]:
    """The modes that the optimizer is told in so many steps that are clipped, or not."""
    sent = [follow(driver, step, clipped=clipped) for step in range(first_step, first_step + steps)]
    return [message.speculate for messages in sent for message in messages if isinstance(message, m.SetMode)]


def test_the_mode_follows_the_share_of_clipped_steps(driver: Driver) -> None:
    """And does not flap where half of them are. A step that is skipped counts as a clipped one."""
    driver.start(policy="fixed", k=0.0, **CLIPPED)
    assert modes(driver, 0, 20, clipped=False) == []
    assert modes(driver, 20, 90, clipped=True) == [False]
    driver.handle(m.Log(step=110, numbers={}))
    assert driver.records[-1]["mode"] == "defer"
    assert modes(driver, 110, 40, clipped=False) == [True]
    driver.handle(m.Log(step=150, numbers={}))
    assert driver.records[-1]["mode"] == "speculate"
    alternating = [modes(driver, step, 1, clipped=step % 2 == 0) for step in range(150, 200)]
    assert not any(alternating)
    for step in range(200, 300):
        driver.handle(judge(step, skipped=True))
    assert modes(driver, 300, 3, clipped=True) == [False]


def test_a_mode_that_needs_other_layers_waits_for_them(driver: Driver) -> None:
    """To wait for verdicts while all layers are the CPU's would take longer than to be ahead in vain now and then."""
    driver.start(policy="deadline", **CLIPPED)
    for step in range(40):
        if sent := follow(driver, step, clipped=step >= 10):
            plan, _ = sent
            assert isinstance(plan, m.Plan), "no SetMode yet"
            if after := driver.hold(plan):
                break
    assert step >= 10 and after == [(OPTIMIZER, m.SetMode(speculate=False))] and len(driver.owned) > 1
    assert driver.sent(long_step(step + 1, driver.owned)) == [], "said once"


def test_plans_follow_where_updates_begin(driver: Driver) -> None:
    """Backward hides all of the CPU's updates that begin in it; what begins in `step()`, forward hides only in part."""

    def held_bytes() -> int:
        return driver.status().device_planes.get("grads", 0)

    def settle(steps: range, *, in_step: bool) -> None:
        for step in steps:
            driver.handle(cpu_report(step, 0.4, sorted({*ALL} - {*driver.owned})))
            for _, message in driver.sent(replace(long_step(step, driver.owned), in_step=in_step)):
                if isinstance(message, m.Plan):
                    driver.hold(message)
                    break

    driver.start(policy="deadline", in_step=True)
    settle(range(20), in_step=True)
    assert len(driver.owned) > 1 and held_bytes() == len(driver.owned) * 2 * SEGMENT.numel
    settle(range(20, 60), in_step=False)
    assert len(driver.owned) <= 1 and held_bytes() == 0
    settle(range(60, 100), in_step=True)
    assert len(driver.owned) > 1 and held_bytes()


def test_nobody_is_ahead_of_step(driver: Driver) -> None:
    """Where updates begin in `step()`, a CPU that may update ahead of the norm has no more time than another."""
    predicted = []
    for banks in (1, 2):
        driver = Driver()
        driver.start(policy="fixed", k=0.0, in_step=True, awaits_verdict=True, speculate=None if banks == 2 else False)
        for step in range(20):
            driver.handle(cpu_report(step, 0.4, ALL))
            driver.handle(replace(long_step(step), in_step=True))
        driver.handle(m.Log(step=20, numbers={}))
        predicted.append(driver.records[-1]["predicted_step_s"])
    assert predicted[0] and predicted[0] == predicted[1]


@pytest.mark.parametrize(("speculate", "mode"), [(True, "speculate"), (False, "defer"), (None, None)])
def test_a_mode_that_was_asked_for_is_kept(driver: Driver, speculate: bool | None, mode: str | None) -> None:
    driver.start(policy="random", awaits_verdict=mode is not None, speculate=speculate or False)
    driver.handle(judge(0, clipped=True))
    for step in range(30):
        assert not any(isinstance(message, m.SetMode) for _, message in driver.sent(report(step, driver.owned)))
    driver.handle(m.Log(step=30, numbers={}))
    assert driver.records[-1]["mode"] == mode


@pytest.mark.parametrize(("speculate", "bytes_each"), [(None, 26), (False, 14)])
def test_a_second_bank_is_host_memory_that_stays(driver: Driver, speculate: bool | None, bytes_each: int) -> None:
    driver.start(policy="fixed", k=0.0, awaits_verdict=True, speculate=speculate)
    facts = driver.planning._facts[0]
    assert (facts.host_bytes, facts.spare_bytes) == (bytes_each << 20, (bytes_each - 14) << 20)
    assert (facts.gpu_state_bytes, facts.held_bytes) == (12 << 20, 2 << 20)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "stop",
            "now",
            "unknown command 'stop'; known: k, policy, objective, threads, gpu_memory_limit, host_memory_limit",
        ),
        ("k", "1.5", "k is '1.5'"),
        ("k", "nan", "k is 'nan'"),
        ("policy", "best", "policy 'best' is unknown; known: fixed, balance"),
        ("policy", "fixed", 'policy "fixed" needs a k'),
        ("objective", "fun", "objective 'fun' is unknown; known: speed"),
        ("threads", "0", "threads is '0': give a number from 1 to 9999"),
        ("threads", "9" * 400, "give a number from 1 to 9999"),
        ("gpu_memory_limit", "much", "gpu_memory_limit is 'much': give bytes, as in 24GiB, or \"none\""),
        ("gpu_memory_limit", "nan", "give bytes"),
        ("gpu_memory_limit", "-1GB", "give bytes"),
        ("host_memory_limit", "none", "host_memory_limit is 'none': give bytes, as in 24GiB"),
        ("host_memory_limit", "1e300GiB", "give bytes"),
    ],
)
def test_only_known_commands_with_values_that_can_be(driver: Driver, name: str, value: str, reason: str) -> None:
    driver.start(policy="deadline")
    before = driver.status()
    reply = driver.answer(m.Command(name=name, value=value))
    assert not reply.ok and reason in reply.text and driver.status() == before


def test_more_threads_than_the_optimizer_has_cores_are_refused(driver: Driver) -> None:
    """The planner would count on them until the next report."""
    driver.start(policy="deadline", cores=2)
    before = driver.status()
    reply = driver.answer(m.Command(name="threads", value="64"))
    assert reply == m.CommandReply(ok=False, text="threads is 64: at most 2, one per core of the optimizer")
    assert driver.status() == before and driver.planning.wishes.threads is None
    assert driver.ask("threads", "2") == [(OPTIMIZER, m.SetThreads(threads=2))]


@pytest.mark.parametrize(("objective", "gpu_lids"), [("gpu-memory", ()), ("host-memory", ALL)])
def test_policy_and_objective_are_commands(driver: Driver, objective: str, gpu_lids: tuple[int, ...]) -> None:
    driver.start(policy="fixed", k=0.5, gpu_bytes=1 << 40)
    for name, value in (("k", "1.0"), ("k", "auto"), ("objective", objective)):
        driver.ask(name, value)
    plan = driver.next_plan(1)
    assert plan.policy == "deadline" and on_gpu(plan.places) == gpu_lids
    driver.handle(m.Log(step=2, numbers={}))
    assert driver.records[-1]["objective"] == objective and driver.records[-1]["policy"] == "deadline"


def test_memory_limits_are_commands(driver: Driver) -> None:
    """The trainer is told of the GPU's: what it reports follows."""
    driver.start(policy="deadline", device="cuda", gpu_bytes=1 << 40, host_bytes=1 << 40)
    assert driver.ask("gpu_memory_limit", "1.5GiB") == [(TRAINER, m.SetGpuMemory(nbytes=3 << 29))]
    assert driver.ask("gpu_memory_limit", "2GB") == [(TRAINER, m.SetGpuMemory(nbytes=2_000_000_000))]
    assert driver.ask("gpu_memory_limit", "none") == [(TRAINER, m.SetGpuMemory(nbytes=None))]
    planes = LAYERS * driver.planning._facts[0].host_bytes
    assert driver.ask("host_memory_limit", str(planes + 1000)) == []
    limits = driver.planning.room
    assert limits.limits.host_bytes == planes + 1000
    usable = {"gpu_usable_bytes": 1 << 40, "gpu_needed_bytes": 0}
    for step, free in enumerate((0, 1 << 30, -(1 << 33)), start=1):
        for again in range(4):
            driver.handle(report(10 * step + again, host_free_bytes=free, activation_bytes=100, **usable))
        assert limits.limits.host_bytes == max(0, min(planes + 900, planes + free))
    driver.handle(m.Command(name="host_memory_limit", value="7"), TRAINER)
    assert "trainer-0 asks: host_memory_limit=7 from the next plan on" in driver.notes
    assert limits.limits.host_bytes == 0 and driver.planning.wishes.kept["limits"]["host_memory_limit"] == 7


def test_other_threads_reach_the_optimizer_and_the_planner(driver: Driver) -> None:
    """Times with the number before do not count, but from an optimizer that has no more cores, in the end."""
    driver.start(policy="fixed", k=0.5)
    driver.handle(cpu_report(1, 1.0))
    driver.handle(report(1, (0, 1)))
    assert driver.profile.cpu_update_s == pytest.approx(4.0)
    driver.handle(cpu_report(2, 9.0))  # of a step whose times are not yet measured
    assert driver.ask("threads", "2") == [(OPTIMIZER, m.SetThreads(threads=2))]
    expected_s = 4.0 * 2**THREADS_EXPONENT
    assert driver.profile.cpu_update_s == pytest.approx(expected_s)
    driver.handle(cpu_report(2, 1.0, threads=4))  # done before the command arrived
    assert driver.profile.cpu_update_s == pytest.approx(expected_s)
    driver.handle(report(2, (0, 1)))
    assert driver.profile.cpu_update_s == pytest.approx(expected_s)
    driver.handle(cpu_report(2, 3.0, threads=2))
    assert driver.profile.cpu_update_s == pytest.approx(12.0)
    driver.handle(report(3, (0, 1)))
    driver.handle(m.Log(step=4, numbers={}))
    assert driver.records[-1]["threads"] == 2
    driver.ask("threads", "64")
    driver.handle(cpu_report(4, 3.0, threads=2))
    driver.handle(cpu_report(5, 3.0, threads=2))
    driver.handle(report(5, (0, 1)))
    assert driver.profile.cpu_update_s == pytest.approx(12.0)


@pytest.mark.parametrize("told", [True, False])
def test_after_a_change_of_threads_a_plan_waits_for_the_cpus_times(driver: Driver, told: bool) -> None:
    driver.start(policy="fixed", k=0.0)
    driver.handle(cpu_report(1, 1e-4, ALL))
    driver.handle(report(1))
    driver.ask("policy", "deadline")
    driver.ask("threads", "1")
    assert driver.sent(report(2, measured=None)) == []
    if told:
        driver.handle(cpu_report(2, 10.0, ALL, threads=1))
        assert driver.planning.measured.awaits_cpu_times(2), "they are taken in once their step was measured"
        assert len(on_gpu(driver.plan(report(3, measured=2)).places)) > 0
    else:
        fast = [driver.sent(report(step, measured=None)) for step in range(3, 9)]
        assert fast == [[]] * 6 and driver.planning.measured.awaits_cpu_times(8), "no step was measured"
        waited = [driver.sent(report(step)) for step in range(9, 9 + ENOUGH_STEPS)]
        assert waited == [[]] * ENOUGH_STEPS and not driver.planning.measured.awaits_cpu_times(8 + ENOUGH_STEPS)
        driver.ask("threads", "2")
        assert driver.planning.measured.awaits_cpu_times(12) and not driver.planning.measured.awaits_cpu_times(99)


@pytest.mark.parametrize("continues", [True, False])
def test_commands_and_clipping_are_remembered_while_the_same_training_goes_on(driver: Driver, continues: bool) -> None:
    driver.start(policy="balance", **CLIPPED)
    for step in range(20):
        driver.handle(judge(step, clipped=True))
    for name, value in (("objective", "gpu-memory"), ("k", "1.0"), ("threads", "2")):
        driver.ask(name, value)
    driver.leave()
    driver.join(TRAINER, 11)
    asked = table(policy="balance", continues=continues, **CLIPPED)
    assert driver.sent(asked) == [(OPTIMIZER, replace(asked, threads=2 if continues else None))]
    driver.handle(TRAINERS)
    plan = driver.plan(OPTIMIZERS, OPTIMIZER)
    assert (plan.policy == "fixed" and plan.k == 1.0) is continues
    assert driver.planning.wishes.objective == ("gpu-memory" if continues else "speed")
    assert driver.planning.mode.clipped == (pytest.approx(1.0, abs=0.2) if continues else 0.0)


def test_a_record_waits_for_the_loops_own_numbers(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(replace(cpu_report(3, 0.1, lids=(2,)), busy_s=0.25))
    driver.handle(report(4, (0, 1), places=Places(("gpu", "gpu", "visit", "cpu"))))
    assert driver.records == []
    driver.handle(m.Log(step=5, numbers={"loss": 1.5}))
    (record,) = driver.records
    assert record["step"] == 5 and record["loss"] == 1.5 and record["k"] == 0.5
    assert record["cpu_busy_s"] == 0.25 and record["gpu_layers"] == 2 and record["moved"] == 0
    assert record["visiting_layers"] == 1
    (published,) = [command.status for command in driver.commands if isinstance(command, Publish)]
    assert json.loads(published.record) == record
    assert driver.status() == published
    driver.handle(m.Log(step=5, numbers={"validation": 2.0}))
    assert driver.commands == [Amend(5, {"validation": 2.0}, 0)], "too late for the line as it was written"


def test_a_record_gets_the_stall_of_its_own_step(driver: Driver) -> None:
    """And the last ones are written at the trainer's goodbye."""
    driver.start(policy="fixed", k=0.5)
    for step, measured in enumerate((None, 0, 1, 2)):
        driver.handle(report(step, number=step + 11, measured=measured, stall_s=0.0 if measured is None else measured))
    driver.handle(m.Log(step=13, numbers={}))
    assert [record["stall_s"] for record in driver.records] == [0, 1, 2]
    driver.handle(m.Goodbye())
    assert [record["step"] for record in driver.records] == [14]


def test_a_record_has_the_reason_of_the_plan_that_takes_effect(driver: Driver) -> None:
    """Not of one that is proposed; and every number that a record has is in the table of metrics."""
    first = driver.start()
    second = driver.next_plan()
    assert second is not None
    assert driver.status().reason == f"next k={second.k:.2f}: {second.reason}", "it stands beside the k of now"
    for step in range(40, 40 + LOG_PATIENCE_STEPS):
        driver.handle(report(step))
    driver.hold(second)
    assert driver.status().reason == second.reason
    last = 40 + LOG_PATIENCE_STEPS
    for step in (last, last + 1):
        driver.handle(report(step))
    driver.handle(m.Log(step=last + 2, numbers={}))
    told = {record["step"]: record["reason"] for record in driver.written if "reason" in record}
    assert told == {1: first.reason, last + 1: second.reason}
    assert all(record.keys() <= BY_NAME.keys() for record in driver.written)


def test_a_loops_numbers_do_not_replace_the_records_own(driver: Driver) -> None:
    """Whether they come before the step's end or after it."""
    driver.start(policy="fixed", k=0.5)
    driver.handle(m.Log(step=1, numbers={"k": 9.0, "reason": 1.0, "own": 2.0}, ahead=True))
    driver.handle(report(0, k=0.5))
    driver.handle(m.Log(step=1, numbers={"stall_s": 9.0, "loss": 3.0}))
    (record,) = driver.records
    assert (record["k"], record["stall_s"], record["own"], record["loss"]) == (0.5, 0.1, 2.0, 3.0)
    assert isinstance(record["reason"], str)


def test_monitors_get_each_record_though_several_are_written_at_once(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    for step in range(3):
        driver.handle(report(step))
    driver.handle(m.Log(step=3, numbers={"loss": 1.0}))
    published = [json.loads(command.status.record) for command in driver.commands if isinstance(command, Publish)]
    assert published == driver.records and [record["step"] for record in published] == [1, 2, 3]


def test_a_status_has_the_plan_that_is_to_come(driver: Driver) -> None:
    assert driver.status().plan is None
    first = driver.start(policy="fixed", k=0.0, offload_weights=1.0, blocks=tuple((lid,) for lid in ALL))
    assert driver.status().plan == first and not driver.status().places.offloaded
    driver.handle(report(0, places=placed(()).offload({1, 2})))
    driver.handle(m.Command(name="k", value="1"))
    plan = driver.next_plan(1)
    status = driver.status()
    assert status.plan == plan and plan is not None and status.reason == f"next k=1.00: {plan.reason}"
    assert (set(status.places), set(plan.places)) == ({CPU}, {GPU})


@pytest.mark.parametrize("awaits_verdict", [False, True])
def test_a_status_says_what_each_plane_takes(driver: Driver, awaits_verdict: bool) -> None:
    """On the host as the plan expects it: 2 bytes per parameter of grads, weights and remainder, 4 of each moment.

    With a second bank of all but the grads, if updates may be undone. A layer whose state visits has no grads there.
    """
    shares = {
        "policy": "fixed",
        "k": 0.25,
        "visit": 0.25,
        "offload_weights": 0.25,
        "blocks": tuple((lid,) for lid in ALL),
    }
    memory = {"device": "cuda", "gpu_bytes": 1 << 40, "window_bytes": 700, "ring_bytes": 900}
    undoes = {"awaits_verdict": awaits_verdict, "speculate": None if awaits_verdict else False}
    driver.start(**shares, **memory, **undoes)
    status, numel = driver.status(), 1 << 20
    assert sorted(status.places.names) == [CPU.name, CPU.name, GPU.name, VISIT.name]
    banks = 2 if awaits_verdict else 1
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), 4 * numel)
    state = {"weights": 2 * numel, "remainder": 2 * numel, **moments}
    host = {"grads": 2 * 2 * numel, **{plane: 3 * banks * nbytes for plane, nbytes in state.items()}}
    assert status.host_planes == host
    held = {"grads": 2 * 2 * numel} if awaits_verdict else {}
    device = {**held, "weights": 4 * 2 * numel, "remainder": 2 * numel, **moments}
    assert status.device_planes == {**device, "ring": 900}
    lid = min(status.places.cpu)
    driver.handle(report(0, places=status.places.offload({lid})))
    assert driver.status().device_planes == {**device, "weights": 3 * 2 * numel, "window": 700, "ring": 900}
    driver.handle(m.Log(step=1, numbers={}))
    [record] = driver.records
    assert sum(status.host_planes.values()) == record["predicted_host_bytes"] - driver.planning.room._process_bytes


def test_planes_are_those_of_the_rule() -> None:
    numel = 1 << 20
    segments = [
        m.Segment(name=rule, numel=numel, dtype="bfloat16", grads_dtype="bfloat16", group=0, rule=rule)
        for rule in ("lion", "sgd_momentum", "sgd")
    ]
    layers = tuple(m.Layer(lid=0, position=0, name="0", segments=(segment,)) for segment in segments)
    sizes = [Sizes([layer], banks=1, waits=False) for layer in layers]
    rooms = [Room(table(layers=(layer,)), each) for layer, each in zip(layers, sizes, strict=True)]
    found = [room.by_plane(Places.of([CPU]))[0] for room in rooms]
    always = {"grads": 2 * numel, "weights": 2 * numel, "remainder": 2 * numel}
    assert found == [always | {"exp_avg": 4 * numel}, always | {"momentum_buffer": 4 * numel}, always]


def test_monitors_hear_what_a_process_is_writing_until_it_says_otherwise(driver: Driver) -> None:
    driver.start()
    said = []
    for pong in (m.Pong(writing="/c/step-4", writing_s=3.0), m.Pong()):
        driver.state.members.answered(TRAINER, pong)
        said.append({one.address.role: (one.writing, one.writing_s) for one in driver.status().processes})
    nothing = dict.fromkeys(("coordinator", "optimizer", "trainer"), ("", 0.0))
    assert said == [{**nothing, "trainer": ("/c/step-4", 3.0)}, nothing]


def test_a_record_counts_skipped_steps(driver: Driver) -> None:
    """Where steps can be skipped; and on with other layers."""
    driver.start(awaits_verdict=True)
    for step, skipped in enumerate((True, False, True)):
        driver.handle(judge(step, skipped=skipped))
    driver.handle(report(3))
    driver.handle(m.Log(step=4, numbers={}))
    assert [record["skipped_steps"] for record in driver.records] == [2]


def test_a_record_has_what_was_last_read_of_its_gpu(driver: Driver) -> None:
    driver.start()
    driver.state.fleet.seat(0).gauges = {"gpu_watts": 600.0}
    driver.handle(report(0))
    driver.state.fleet.seat(0).gauges = {}
    driver.handle(report(1))
    driver.handle(m.Log(step=2, numbers={}))
    assert [record.get("gpu_watts") for record in driver.records] == [600.0, None]


def test_a_record_does_not_wait_for_ever(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    for step in range(LOG_PATIENCE_STEPS):
        driver.handle(report(step))
        assert driver.records == []
    driver.handle(report(LOG_PATIENCE_STEPS))
    assert [record["step"] for record in driver.records] == [1]
    driver.handle(m.Log(step=4, numbers={"loss": 1.0}))  # and what is older goes first
    assert [record["step"] for record in driver.records] == [2, 3, 4]
    assert "loss" in driver.records[2] and "loss" not in driver.records[1]


def test_numbers_that_json_does_not_have_are_null(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(report(0))
    driver.handle(m.Log(step=1, numbers={"loss": 2.5, "grad_norm": math.inf}))
    (record,) = driver.records
    assert (record["loss"], record["grad_norm"]) == (2.5, None)
    shown = view.line(driver.status())
    assert "loss 2.5000" in shown and "norm" not in shown
    driver.handle(m.Log(step=1, numbers={"loss": math.nan}))
    assert driver.commands == [Amend(1, {"loss": None}, 0)]


def test_who_hangs_is_ended_before_that_is_news(driver: Driver) -> None:
    """A reader of the news may resume a process that somebody has stopped; then it is no stopped one any more."""
    driver.start()
    driver.state.members._limit = SILENT_S  # as soon as they are called silent
    found = [[type(command) for command in driver.state.beat()] for _ in range(6)]
    assert [kinds for kinds in found if Abort in kinds] == [[Abort, Abort, Note, Note, Send, Send]]


@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_next_trainer_waits_until_both_have_ended_the_session(driver: Driver, trainer_first: bool) -> None:
    driver.start()
    first, last = (TRAINER, OPTIMIZER) if trainer_first else (OPTIMIZER, TRAINER)
    assert driver.state.beat() == [Send(TRAINER, m.Ping()), Send(OPTIMIZER, m.Ping())]
    assert driver.sent(m.Goodbye(), first) == []
    assert driver.state.beat() == [], "who leaves is not asked whether it lives"
    assert driver.sent(hello(12)) == []
    assert "waits until the current one has left" in driver.notes
    assert driver.sent(m.Goodbye(), last) == [(TRAINER, WELCOME)]
    assert driver.status().layer_names == () and driver.state.inbox(TRAINER) == "inbox-12"
    driver.handle(m.Ready(detail=""))
    assert driver.first_plan().plan_id == 0, "a new session counts its plans anew"


def test_a_plan_that_the_last_trainer_left_behind_is_not_for_the_next(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    driver.handle(ack(plan.plan_id))
    driver.handle(m.Goodbye())
    assert driver.sent(ack(plan.plan_id), OPTIMIZER) == [], "a Reassign, for nobody"


OTHER, SERVING = Address("trainer", 1), Address("optimizer", 1)


def second(driver: Driver, **changes: Any) -> m.Plan:
    """A trainer of rank 1 joins with its optimizer; its first plan."""
    driver.join(SERVING, 20)
    driver.join(OTHER, 21)
    asked = table(policy="fixed", **changes)
    assert driver.sent(asked, OTHER) == [(SERVING, asked)]
    assert driver.sent(TRAINERS, OTHER) == [] == driver.sent(OPTIMIZERS, OPTIMIZER), "another's optimizer"
    (to, plan), same = driver.sent(OPTIMIZERS, SERVING)
    assert to == OTHER and same == (SERVING, plan) and plan.plan_id == 0
    return plan


def test_trainers_are_planned_each_by_itself(driver: Driver) -> None:
    """Two with an optimizer each: what one does, is commanded to and leaves behind is not the other's."""
    driver.start(policy="fixed", k=0.5)
    plan = second(driver, k=1.0, layers=TABLE.layers[:2])
    assert driver.sent(ack(0), OPTIMIZER) == [] == driver.sent(ack(0), OTHER)
    assert driver.sent(ack(0), SERVING) == [(OTHER, m.Reassign(plan_id=0))]
    driver.handle(applied(plan, moved=0), OTHER)
    assert driver.state.fleet.seat(1).planning.places == placed((0, 1), layers=2) and driver.owned == (0, 1)
    driver.handle(report(0, (0, 1)))
    driver.handle(report(4, places=placed((0, 1), layers=2), layers=times(layers=2)), OTHER)
    for sender, step in ((OTHER, 5), (TRAINER, 1)):
        driver.handle(m.Log(step=step, numbers={"loss": 2.0}), sender)
        lines = [(c.rank, json.loads(c.line)["step"]) for c in driver.commands if isinstance(c, Write)]
        assert lines == [(sender.rank, step)]
        published = [c.status.record for c in driver.commands if isinstance(c, Publish)]
        assert len(published) == (sender == TRAINER), "a status shows the first trainer"
    assert [process.address for process in driver.status().processes[1:]] == [OPTIMIZER, TRAINER, SERVING, OTHER]
    both = [(OPTIMIZER, m.SetThreads(threads=2)), (SERVING, m.SetThreads(threads=2))]
    assert driver.ask("threads", "2") == both


def test_the_timeline_of_some_steps_has_all_ranks(driver: Driver) -> None:
    """It is written once all who draw it are done or gone, and then another one can be ordered."""
    driver.start(policy="fixed", k=0.5)
    second(driver, k=0.5)
    order = m.Command(name="trace", value="4")
    for last in (m.Traced(), m.Goodbye()):
        told = [Send(trainer, m.TraceNext(steps=4)) for trainer in (TRAINER, OTHER)]
        answer, *commands = driver.handle(order)
        assert answer == Answer(m.CommandReply(ok=True, text="the next 4 steps are drawn into trace.json"))
        assert commands == [Draw(begins=True), *told]
        again = driver.answer(order)
        assert isinstance(again, m.CommandReply) and not again.ok and "drawn already" in again.text
        for drawn in (TRAINER, OPTIMIZER, OTHER):
            assert driver.handle(m.Traced(), drawn) == []
        assert Draw(begins=False) in driver.handle(last, SERVING)
    assert driver.handle(m.Traced(), OTHER) == [Draw(begins=False)], "an order of a coordinator that has died"


def test_a_run_that_is_drawn_from_its_start_on_ends_that_on_command() -> None:
    state = Tracing(is_on=True)
    with pytest.raises(ValueError, match="trace 0 ends it"):
        state.command("3", [TRAINER])
    assert state.command("0", [TRAINER])[1] == [Send(TRAINER, m.TraceNext(steps=0))]
    assert state.has_drawn(TRAINER) == [] and state.has_drawn(OPTIMIZER) == [Draw(begins=False)]
    with pytest.raises(ValueError, match="no timeline is drawn"):
        state.command("0", [TRAINER])
    for value, trainers in (("3", []), ("1001", [TRAINER]), ("-1", [TRAINER]), ("000000001001", [TRAINER])):
        with pytest.raises(ValueError, match="no trainer|give a number"):
            state.command(value, trainers)


def test_what_a_dead_coordinator_was_asked_to_draw_can_be_ended() -> None:
    state = Tracing(is_on=False)
    state.goes_on(TRAINER)
    with pytest.raises(ValueError, match="drawn already"):
        state.command("3", [TRAINER])
    assert state.command("0", [TRAINER])[1] == [Send(TRAINER, m.TraceNext(steps=0))]


def test_checkpoints_are_saved_where_all_loops_do_so(driver: Driver) -> None:
    def asked() -> m.CommandReply:
        answer, *told = driver.handle(m.Command(name="checkpoint", value=""))
        assert isinstance(answer, Answer) and isinstance(answer.message, m.CommandReply)
        sent = [Send(trainer, m.SaveCheckpoint()) for trainer in (TRAINER, OTHER)]
        assert told == (sent if answer.message.ok else [])
        return answer.message

    driver.start(policy="fixed", k=0.5)
    plan = second(driver, k=0.5)
    for sender in (OTHER, SERVING):
        driver.handle(ack(0), sender)
    driver.handle(applied(plan, moved=0), OTHER)
    assert "no step has ended yet" in asked().text
    for saves, of_other in ((True, False), (False, True), (True, True)):
        driver.handle(report(1, (0, 1), saves=saves))
        driver.handle(report(1, (0, 1), saves=of_other), OTHER)
        reply = asked()
        assert reply.ok is (saves and of_other) and ("own loop save" in reply.text) is not reply.ok


def test_a_status_has_all_ranks_of_a_job(driver: Driver) -> None:
    """Rank 5 is this machine's first. The first step warms up; the mean is over the last ones."""
    driver.start(rank=5, world=6)
    assert [(rank.rank, rank.record, rank.gather_s) for rank in driver.status().ranks] == [(5, "{}", None)]
    driver.join(SERVING, 20)
    driver.join(OTHER, 21)
    driver.handle(table(rank=3, world=6), OTHER)
    for step, gather_s in enumerate((9.0, 9.0, *[0.25] * GATHER_STEPS)):
        driver.handle(report(step, gather_s=gather_s))
        driver.handle(report(step, gather_s=None, step_s=1.5), OTHER)
    first, last = driver.status().ranks
    assert (first.rank, first.host, first.cores, first.gather_s) == (3, "here", "optimizer is up", None)
    assert (last.rank, last.gather_s) == (5, 0.25)
    assert json.loads(first.record)["rank"] == 3 and json.loads(first.record)["step_s"] == 1.5
    assert json.loads(last.record)["gather_s"] == 0.25
    driver.leave()
    assert [rank.rank for rank in driver.status().ranks] == [3]


def test_the_ranks_of_other_machines_are_heard_of(driver: Driver) -> None:
    """A status of theirs replaces the one before. Commands do not reach them. The next job has other machines."""
    theirs = m.RankStatus(rank=1, world=3, host="there", record="{}", cores="", gather_s=None)
    driver.start(rank=2, world=4)
    driver.handle(report(0))
    driver.handle(m.NodeStatus(ranks=(replace(theirs, rank=0), theirs)))
    driver.handle(m.NodeStatus(ranks=(theirs, replace(theirs, rank=2))))
    assert [(rank.rank, rank.host) for rank in driver.status().ranks] == [(1, "there"), (2, "here")]
    told = [command.message for command in driver.state.beat() if isinstance(command, Send)]
    [own] = [ping.status for ping in told if isinstance(ping, m.Ping) and ping.status is not None]
    assert own == driver.status().ranks[1], "the trainer gets its rank's"
    assert "k=0.5 from the next plan on, on this machine" in driver.answer(m.Command(name="k", value="0.5")).text
    driver.leave()
    driver.join(TRAINER, 12)
    driver.first_plan(rank=2, world=4)
    assert [rank.rank for rank in driver.status().ranks] == [2]


def test_ranks_of_one_machine_are_told_of_nobody(driver: Driver) -> None:
    driver.start(rank=1, world=2)
    assert driver.state.beat() == [Send(TRAINER, m.Ping()), Send(OPTIMIZER, m.Ping())]


def test_a_trainer_that_leaves_leaves_the_others_alone(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    second(driver, k=0.0)
    driver.handle(m.Goodbye())
    driver.handle(m.Goodbye(), SERVING)  # not the one whose trainer has left
    assert driver.sent(hello(31)) == [] and "trainer-0 waits" in driver.notes
    assert driver.sent(m.Goodbye(), OPTIMIZER) == [(TRAINER, WELCOME)]
    assert driver.status().layer_names, "of the trainer that goes on"
    driver.handle(ack(0), OTHER)
    assert driver.sent(ack(0), SERVING) == [(OTHER, m.Reassign(plan_id=0))]
    assert driver.first_plan().plan_id == 0


def test_a_trainer_that_is_gone_without_a_goodbye_leaves_its_place(driver: Driver) -> None:
    driver.start()
    driver.handle(hello(12))
    assert [c for c in driver.state.lose(TRAINER, "inbox-12") if isinstance(c, Send)] == [], "it only waited"
    commands = driver.state.lose(TRAINER, "inbox-11")
    assert [(c.to, c.message) for c in commands if isinstance(c, Send)] == [(OPTIMIZER, m.Goodbye())]
    assert driver.sent(hello(13)) == [], "the optimizer has not left it yet"
    assert driver.sent(m.Goodbye(), OPTIMIZER) == [(TRAINER, WELCOME)]
    commands = driver.state.lose(TRAINER, "inbox-13")
    assert not any(isinstance(c, Send) for c in commands), "its optimizer does not know it yet"
    assert driver.sent(hello(14)) == [(TRAINER, WELCOME)]


def test_visits_and_updates_are_known_as_if_alone(driver: Driver) -> None:
    """They slow each other down, which the simulation adds for each plan."""
    driver.start(policy="fixed", k=0.0, visit=0.5, device="cuda", gpu_bytes=1 << 40)
    places = driver.status().places
    visiting = sorted(places.visiting)
    others = [lid for lid in ALL if lid not in visiting]
    layers = tuple(replace(each, visit_s=1e-3 if each.lid in visiting else None) for each in times())
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 40):
        driver.handle(cpu_report(step, 1e-3, lids=others))
        driver.handle(report(step, places=places, layers=layers))
    profile = driver.profile
    crowding = profile.crowding(places)
    assert min(crowding.cpu, crowding.visits) > 1.05
    found = {layer.lid: layer for layer in profile.layers}
    assert found[visiting[0]].visit_s * crowding.visits == pytest.approx(1e-3, rel=0.02)
    assert found[others[0]].cpu_update_s * crowding.cpu == pytest.approx(1e-3, rel=0.02)


def test_a_calibration_of_the_cpu_alone_is_too_fast(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, device="cuda", gpu_bytes=1 << 40)
    driver.handle(report(WARM_UP_STEPS))
    assert driver.profile.layers[0].cpu_update_s == pytest.approx(BESIDE_TRAINING * 1e-9 * SEGMENT.numel)


def test_a_timeline_gets_what_trainer_and_optimizer_calibrated(driver: Driver) -> None:
    """Also under a coordinator that takes the place of another one, and as measured: planning counts on less."""
    asked: dict[str, Any] = {"policy": "fixed", "k": 0.0, "device": "cuda", "gpu_bytes": 1 << 40}
    plan = driver.start(**asked)
    rates = driver.state.fleet.seat(0).rates()
    moved = 2 + 2 * (2 + 2 + 8)  # bytes of gradient, and of weight, remainder and moments, read and written
    assert rates == {
        "rank": 0,
        "numels": [layer.numel for layer in TABLE.layers],
        "update_bytes": pytest.approx(moved),
        "cpu_update_s": OPTIMIZERS.cpu_update_s,
        "to_host_s": pytest.approx(TRAINERS.d2h_s / 2),
        "to_device_s": pytest.approx(TRAINERS.h2d_s / 2),
    }
    assert driver.state.fleet.seat(1).rates() == {}
    other, counts = Driver(), dict.fromkeys(("moved", "skipped"), 0)
    other.join(OPTIMIZER, 10)
    other.join(TRAINER, 11)
    other.handle(OPTIMIZERS, OPTIMIZER)
    facts = {"plan": plan, "places": plan.places, "holds": False, "draws": True, "step": 3}
    other.handle(m.Rejoin(table=table(**asked), calibration=TRAINERS, **facts, **counts))
    assert other.state.fleet.seat(0).rates() == rates


def test_memory_for_visits_and_waiting_gradients_is_planned_with(driver: Driver) -> None:
    """The ring stays once it was made, and is then part of what steps need; so are gradients that have waited."""
    state, waiting, ring, hold = 10 * SEGMENT.numel, 2 * 2 * SEGMENT.numel, 1000, 5000
    start = driver.start(
        policy="fixed", k=0.0, visit=1.0, device="cuda", gpu_bytes=1 << 40, ring_bytes=ring, hold_bytes=hold
    )
    assert set(start.places) == {VISIT}
    cpu = placed(())

    def room(step: int, places: Places, needed: int, waited: int = 0) -> int | None:
        where: dict[str, Any] = {"places": places, "waited_bytes": waited}
        driver.handle(report(step, **where, gpu_usable_bytes=100 * state, gpu_needed_bytes=needed))
        return driver.planning.room.limits.gpu_state_bytes

    def for_visits() -> int:
        profile = driver.planning._profile()
        assert profile is not None
        bound = Limits(gpu_state_bytes=10_000).beside_visits(replace(profile, visit=1.0)).gpu_state_bytes
        assert bound is not None
        return 10_000 - bound

    assert room(1, cpu, 20 * state) == 80 * state - waiting and for_visits() == ring + hold
    assert room(2, start.places, 20 * state + ring) == 80 * state - waiting - ring and for_visits() == hold
    assert [room(step, cpu, 20 * state + ring) for step in (3, 4, 5)] == [80 * state - waiting - ring] * 3
    for step, waited, more in ((6, 3000, 2000), (7, 6000, 0), (8, 1000, 0)):
        room(step, cpu, 20 * state + ring, waited)
        assert for_visits() == more == driver.planning.room.bytes_of(cpu.moved({1}, VISIT))[0]
    room(9, cpu, 20 * state + ring + 1, 1000)
    assert for_visits() == 4000, "another peak, with less of them in it"
    on_gpu = placed((0,))
    for step in (10, 11, 12):
        room(step, on_gpu, 20 * state + ring + 1, 600)
    assert for_visits() == 4000, "what a step has needed may be needed again, with as many of them"


def test_what_awaits_a_verdict_is_not_what_visits_hold(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, gpu_bytes=1 << 40, ring_bytes=7, hold_bytes=50, **CLIPPED)
    assert driver.planning.room.for_visits_bytes == 7


@pytest.mark.parametrize("is_late", [True, False])
def test_the_cpus_times_are_those_of_the_placements_of_their_step(driver: Driver, is_late: bool) -> None:
    """State visits only now. In the steps that are reported it did not, so nothing made updates longer."""
    driver.start(policy="fixed", k=0.0, visit=0.5, device="cuda", gpu_bytes=1 << 40)
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 3):
        driver.handle(report(step, measured=None))
        messages = [cpu_report(step, 1e-3, lids=ALL), report(step + 1, measured=step)]
        for message in reversed(messages) if is_late else messages:
            driver.handle(message)
    assert [layer.cpu_update_s for layer in driver.profile.layers] == pytest.approx([1e-3] * LAYERS)


def test_steps_of_a_busy_host_say_nothing_of_others(driver: Driver) -> None:
    """Nor do the CPU's times, before or after what the trainer has measured."""
    driver.start(policy="fixed", k=0.0)
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 16):
        driver.handle(cpu_report(step, 1e-3, lids=ALL))
        driver.handle(report(step, stall_s=0.0))
    before = driver.profile
    slow = tuple(replace(each, forward_s=1.2, backward_s=1.2) for each in times())
    for step in range(WARM_UP_STEPS + 16, WARM_UP_STEPS + 21):
        driver.handle(cpu_report(step, 9e-3, lids=(0, 1)))
        driver.handle(report(step, layers=slow, step_s=20.0, stall_s=0.0, starved=1.0))
        driver.handle(cpu_report(step, 9e-3, lids=(2, 3)))
    assert driver.profile == before


def test_steps_under_other_offloaded_weights_say_nothing_of_the_present_ones(driver: Driver) -> None:
    """A report is of an earlier step. It may be on a CPU, too."""
    driver.start(policy="fixed", k=0.0, offload_weights=1.0, blocks=tuple((lid,) for lid in ALL))
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 3):
        driver.handle(cpu_report(step, 1e-3, lids=ALL))
        driver.handle(report(step, places=placed(()).offload(set(ALL)), measured=step))
    counted = {split: found.miss.count for split, found in driver.planning._tried._steps.items()}
    assert list(counted.values()) == [3]
    driver.handle(report(step + 1, measured=step))
    assert {split: found.miss.count for split, found in driver.planning._tried._steps.items()} == counted


def test_what_is_known_of_short_visits_beside_many_copies_never_shrinks(driver: Driver) -> None:
    """They end long before the copies."""
    driver.start(policy="fixed", k=0.0, visit=0.25, device="cuda", gpu_bytes=1 << 40)
    places = driver.status().places
    [visiting] = places.visiting
    copies = {"d2h_s": 1e-2, "h2d_s": 1e-2}
    known = []
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 200):
        layers = tuple(replace(each, **copies) for each in times())
        if step > WARM_UP_STEPS:
            layers = tuple(replace(each, visit_s=1e-4 if each.lid == visiting else None) for each in layers)
        where = places if step > WARM_UP_STEPS else placed(())
        driver.handle(cpu_report(step, 1e-3, lids=[lid for lid in ALL if lid != visiting]))
        driver.handle(report(step, places=where, layers=layers))
        known.append(driver.profile.layers[visiting].visit_s)
    assert 1e-4 / 5 < known[-1] == pytest.approx(known[20], rel=1e-3)


def test_visits_need_room_besides_what_is_placed(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, device="cuda", gpu_bytes=1 << 40, ring_bytes=1000, hold_bytes=5000)
    assert driver.planning.room.bytes_of(placed(()))[0] == 0
    assert driver.planning.room.bytes_of(placed(()).moved({1}, VISIT))[0] == 6000


def test_how_far_steps_miss_the_simulation_is_remembered_by_splits(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, device="cuda", gpu_bytes=1 << 40)
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + 30):
        driver.handle(cpu_report(step, 1e-2, lids=ALL))
        driver.handle(report(step, step_s=0.5, stall_s=0.3))  # the CPU is late, but not by so much
    planning = driver.planning
    assert planning.predicted_step_s is not None
    now, explained_s = (0.0, 0.0, 0.0), planning.predicted_step_s - driver.profile.other_s
    [(split, known)] = planning._tried.known(now, planning._step).items()
    assert (split, known.gpu_lids, known.step_s) == (now, frozenset(), pytest.approx(0.5))
    assert known.miss == pytest.approx(0.5 / planning.predicted_step_s, rel=0.05)
    assert known.rest_s == pytest.approx(0.5 - explained_s, rel=0.05)
    driver.ask("threads", "2")
    assert not planning._tried.known(now, planning._step)
