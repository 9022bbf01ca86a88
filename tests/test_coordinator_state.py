"""What the coordinator decides, message by message: joining, plans, records, commands, one trainer after another."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from hytrain.planner.book import THREADS_EXPONENT
from hytrain.run.ownership import OwnershipError
from protocol import messages as m
from protocol.address import Address
from protocol.handles import layout
from protocol.handshake import HandshakeError
from workers import monitor_view as view
from workers.coordinator_state import CoordinatorState
from workers.effects import Answer, Command, Note, Publish, Send, Write
from workers.planning import CPU_PATIENCE_STEPS, WARM_UP_STEPS, Planning
from workers.records import LOG_PATIENCE_STEPS

LAYERS = 4
TRAINER, OPTIMIZER, MONITOR = Address("trainer", 0), Address("optimizer", 0), Address("monitor", 9)


def on_gpu(placements: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(lid for lid, name in enumerate(placements) if name == "gpu")


def placed(gpu_lids: tuple[int, ...], layers: int = LAYERS) -> tuple[str, ...]:
    return tuple("gpu" if lid in gpu_lids else "cpu" for lid in range(layers))


class Driver:
    """Feeds a coordinator's state and sorts what comes out; its `check()` runs after every event."""

    def __init__(self, *, replan_every: int = 1) -> None:
        self.state = CoordinatorState(run_name="run", run_dir="/runs/run", pid=1, replan_every=replan_every)
        self.commands: list[Command] = []

    def handle(self, message: m.Message, sender: Address | None = None) -> list[Command]:
        """Let `message` arrive: from a trainer, unless it is one that only optimizers or monitors send."""
        try:
            self.commands = self.state.handle(message, sender or usual_sender(message), 0.0)
        finally:
            self.state.check()
        return self.commands

    def sent(self, message: m.Message, sender: Address | None = None) -> list[tuple[Address, m.Message]]:
        """Handle `message`; what is sent to whom."""
        return [(c.to, c.message) for c in self.handle(message, sender) if isinstance(c, Send)]

    def answer(self, message: m.Message) -> m.Message:
        (answer,) = [command.message for command in self.handle(message) if isinstance(command, Answer)]
        return answer

    @property
    def planning(self) -> Planning:
        planning = self.state.fleet.seat(0).planning
        assert planning is not None
        return planning

    @property
    def notes(self) -> str:
        return "\n".join(command.text for command in self.commands if isinstance(command, Note))

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(command.line) for command in self.commands if isinstance(command, Write)]

    def status(self) -> m.Status:
        status = self.answer(m.StatusRequest())
        assert isinstance(status, m.Status)
        return status

    # ------------------------------------------------------------ a run

    def join(self, who: Address, pid: int = 10) -> None:
        assert self.sent(hello(pid), who) == [(who, WELCOME)]
        self.handle(m.Ready(detail=f"{who.role} is up"), who)

    def start(self, **changes: Any) -> m.Plan:
        """Optimizer and trainer join, and agree on the first plan."""
        self.join(OPTIMIZER, 10)
        self.join(TRAINER, 11)
        plan = self.first_plan(**changes)
        self.agree(plan)
        self.handle(applied(plan, moved=0))
        return plan

    def first_plan(self, **changes: Any) -> m.Plan:
        """A table goes to the optimizer; once both have calibrated, both get the plan."""
        asked = table(**changes)
        assert self.sent(asked) == [(OPTIMIZER, asked)]
        assert self.sent(TRAINERS) == []
        sent = self.sent(OPTIMIZERS, OPTIMIZER)
        plan = sent[0][1]
        assert isinstance(plan, m.Plan) and sent == [(TRAINER, plan), (OPTIMIZER, plan)]
        return plan

    def agree(self, plan: m.Plan) -> None:
        assert self.sent(ack(plan.plan_id), OPTIMIZER) == []
        assert self.sent(ack(plan.plan_id), TRAINER) == [(TRAINER, m.Reassign(plan_id=plan.plan_id))]

    def next_plan(self, first_step: int = 0, steps: int = 30) -> m.Plan | None:
        """Report steps until a plan is proposed, and see that both get it."""
        for step in range(first_step, first_step + steps):
            sent = self.sent(report(step, on_gpu(self.status().placements)))
            if sent:
                (trainer, plan), (optimizer, same) = sent
                assert (trainer, optimizer) == (TRAINER, OPTIMIZER) and plan is same
                assert isinstance(plan, m.Plan)
                return plan
        return None


def usual_sender(message: m.Message) -> Address:
    if isinstance(message, m.OptimizerReport | m.SessionEnded):
        return OPTIMIZER
    return MONITOR if isinstance(message, m.StatusRequest | m.Command) else TRAINER


def hello(pid: int) -> m.Hello:
    return m.Hello(pid=pid, inbox=f"inbox-{pid}")


WELCOME = m.Welcome(run_name="run", coordinator_pid=1)
TRAINERS = m.Calibration(d2h_s=1e-10, h2d_s=1e-10, gpu_update_s=1e-9)
OPTIMIZERS = m.Calibration(cpu_update_s=1e-9)


def table(**changes: Any) -> m.LayerTable:
    segment = m.Segment(name="w", numel=1 << 20, dtype="bfloat16", grads_dtype="bfloat16", group=0)
    layers = tuple(m.Layer(lid=lid, position=lid, name=f"block {lid}", segments=(segment,)) for lid in range(LAYERS))
    usual: dict[str, Any] = {
        "objective": "speed",
        "awaits_verdict": False,
        "speculate": False,
        "layers": layers,
        "inbox": "trainer-11",
        "device": "cpu",
        "policy": "random",
        "k": None,
        "backend": "auto",
        "gpu_bytes": None,
        "host_bytes": None,
        "continues": False,
    }
    return m.LayerTable(**(usual | changes))


def ack(plan_id: int, accepted: bool = True, reason: str = "") -> m.PlanAck:
    return m.PlanAck(plan_id=plan_id, accepted=accepted, reason=reason)


def applied(plan: m.Plan, gpu_lids: tuple[int, ...] | None = None, moved: int = 2) -> m.PlanApplied:
    return m.PlanApplied(
        plan_id=plan.plan_id,
        step=plan.step,
        placements=plan.placements if gpu_lids is None else placed(gpu_lids),
        moved=moved,
        handover_s=0.25,
    )


def report(step: int, gpu_lids: tuple[int, ...] = (), *, number: int | None = None, **changes: Any) -> m.TrainerReport:
    times = tuple(m.LayerTimes(lid=lid, forward_s=1e-3, backward_s=2e-3) for lid in range(LAYERS))
    usual: dict[str, Any] = {
        "step": step,
        "number": step + 1 if number is None else number,
        "at_s": 100.0 + step,
        "step_s": 0.5,
        "measured": step,
        "stall_s": 0.1,
        "middle_s": 0.0,
        "starved": 0.0,
        "k": len(gpu_lids) / LAYERS,
        "moving": False,
        "placements": placed(gpu_lids),
        "gpu_free_bytes": None,
        "layers": times,
    }
    return m.TrainerReport(**(usual | changes))


def cpu_report(step: int, update_s: float, lids: tuple[int, ...] = (2, 3), threads: int = 4) -> m.OptimizerReport:
    updates = tuple(m.CpuUpdate(lid=lid, update_s=update_s, queued_s=update_s) for lid in lids)
    return m.OptimizerReport(step=step, threads=threads, busy_s=update_s * len(lids), updates=updates)


@pytest.fixture
def driver() -> Driver:
    return Driver()


# ---------------------------------------------------------------- joining


def test_processes_join_and_become_ready(driver: Driver) -> None:
    driver.join(OPTIMIZER, 10)
    driver.handle(hello(11))
    seen = [(str(process.address), process.pid, process.detail) for process in driver.status().processes]
    assert seen == [
        ("coordinator-0", 1, "plans and records"),
        ("optimizer-0", 10, "optimizer is up"),
        ("trainer-0", 11, "starting"),
    ]


def test_a_second_process_of_a_role_is_refused(driver: Driver) -> None:
    driver.join(OPTIMIZER, 10)
    with pytest.raises(HandshakeError, match="joined as process 10, now 11"):
        driver.handle(hello(11), OPTIMIZER)
    with pytest.raises(HandshakeError, match="twice"):
        driver.handle(m.Ready(detail=""), OPTIMIZER)


@pytest.mark.parametrize(
    "message", [report(0), m.Log(step=1, numbers={}), ack(0), m.PositionsLearned(positions=(0,))], ids=type
)
def test_without_a_trainer_nothing_counts(driver: Driver, message: m.Message) -> None:
    assert driver.handle(message) == [Note(f"{type(message).__name__} without a trainer: dropped")]


@pytest.mark.parametrize(
    "message",
    [m.WeightsReady(step=0, lid=0, banks=(0,)), m.StepBegin(step=0, groups=(), awaits_verdict=True), WELCOME],
    ids=type,
)
def test_what_is_not_for_a_coordinator_is_refused(driver: Driver, message: m.Message) -> None:
    driver.start()
    with pytest.raises(ValueError, match=f"no use for {type(message).__name__}"):
        driver.handle(message)


def test_a_workers_failure_is_noted(driver: Driver) -> None:
    driver.handle(m.Failure(step=1, lid=2, error="OSError: no", traceback=""), OPTIMIZER)
    assert driver.notes == "optimizer-0 failed: OSError: no"


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(("k", "gpu_lids"), [(0.0, ()), (0.3, (0, 1)), (1.0, (0, 1, 2, 3))])
@pytest.mark.parametrize("order", [(TRAINER, OPTIMIZER), (OPTIMIZER, TRAINER)])
def test_the_first_plan_waits_for_both_calibrations(
    driver: Driver, k: float, gpu_lids: tuple[int, ...], order: tuple[Address, Address]
) -> None:
    measured = {TRAINER: TRAINERS, OPTIMIZER: OPTIMIZERS}
    asked = table(k=k, policy="fixed")
    assert driver.sent(asked) == [(OPTIMIZER, asked)]
    assert driver.sent(measured[order[0]], order[0]) == []
    (_, plan), _ = sent = driver.sent(measured[order[1]], order[1])
    assert sent == [(TRAINER, plan), (OPTIMIZER, plan)] and isinstance(plan, m.Plan)
    assert (plan.plan_id, plan.step, on_gpu(plan.placements), plan.k) == (0, 0, gpu_lids, len(gpu_lids) / LAYERS)


@pytest.mark.parametrize("objective", m.OBJECTIVES)
def test_k_auto_begins_with_what_the_host_cannot_hold(driver: Driver, objective: str) -> None:
    """And grows once a step was measured, if that makes steps shorter."""
    size = layout(table().layers[0]).nbytes
    room = {"host_bytes": 3 * size, "gpu_bytes": 1 << 40, "device": "cuda"}
    plan = driver.first_plan(policy="deadline", k=None, objective=objective, **room)
    assert on_gpu(plan.placements) == (0,)
    driver.agree(plan)
    driver.handle(applied(plan, moved=0))
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    grown = driver.sent(report(WARM_UP_STEPS, (0,), gpu_free_bytes=1 << 40))
    assert bool(grown) == (objective != "gpu-memory")
    assert all(isinstance(plan, m.Plan) and len(on_gpu(plan.placements)) > 1 for _, plan in grown)


@pytest.mark.parametrize(("gpu_update_s", "moves"), [(1e-12, True), (1e-3, False)])
def test_calibration_stands_in_for_what_was_not_measured(driver: Driver, gpu_update_s: float, moves: bool) -> None:
    driver.join(OPTIMIZER, 10)
    driver.handle(table(policy="deadline"))
    driver.handle(m.Calibration(d2h_s=1e-10, h2d_s=1e-10, gpu_update_s=gpu_update_s))
    plan = driver.sent(OPTIMIZERS, OPTIMIZER)[0][1]
    assert isinstance(plan, m.Plan)
    driver.agree(plan)
    driver.handle(applied(plan, moved=0))
    driver.handle(cpu_report(WARM_UP_STEPS, 1.0, lids=(0, 1, 2, 3)))
    assert bool(driver.sent(report(WARM_UP_STEPS))) is moves


def test_a_trainer_that_no_plan_fits_is_told_so(driver: Driver) -> None:
    driver.join(OPTIMIZER, 10)
    driver.join(TRAINER, 11)
    driver.sent(table(host_bytes=1, gpu_bytes=1))
    driver.sent(TRAINERS)
    ((to, failure),) = driver.sent(OPTIMIZERS, OPTIMIZER)
    assert to == TRAINER and isinstance(failure, m.Failure) and "host memory" in failure.error
    driver.handle(m.Goodbye())
    driver.handle(m.SessionEnded())
    driver.join(TRAINER, 12)
    assert driver.first_plan().plan_id == 0


def test_a_plan_is_agreed_on_applied_and_told(driver: Driver) -> None:
    plan = driver.start(k=0.5, policy="fixed")
    assert driver.notes == "plan 0 holds from step 0 on: 0 layers, the loop waited 250.0 ms"
    status = driver.status()
    assert on_gpu(status.placements) == on_gpu(plan.placements) == (0, 1)
    assert status.layer_names == tuple(f"block {lid}" for lid in range(LAYERS))


def test_the_first_measured_step_is_planned_from_at_once() -> None:
    driver = Driver(replan_every=100)
    driver.start(policy="deadline", k=None)
    driver.handle(cpu_report(WARM_UP_STEPS, 10.0, lids=(1, 2, 3)))
    for step in range(WARM_UP_STEPS):
        assert driver.sent(report(step)) == [], "warming up"
    plan = driver.sent(report(WARM_UP_STEPS))[0][1]
    assert isinstance(plan, m.Plan) and plan.step == WARM_UP_STEPS + 2 and len(on_gpu(plan.placements)) > 1


def test_steps_in_which_layers_moved_are_not_planned_from() -> None:
    driver = Driver(replan_every=1)
    driver.start(policy="deadline", k=None)
    driver.handle(cpu_report(1, 10.0, lids=(1, 2, 3)))
    plan = driver.sent(report(1))[0][1]
    assert isinstance(plan, m.Plan)
    driver.agree(plan)
    driver.handle(applied(plan))
    before = driver.planning._book.profile()
    slow = tuple(m.LayerTimes(lid=lid, forward_s=1.2e-3, backward_s=2.4e-3) for lid in range(LAYERS))
    driver.handle(report(plan.step, on_gpu(plan.placements), layers=slow, step_s=9.0))
    driver.handle(cpu_report(plan.step, 99.0))
    assert driver.planning._book.profile() == before
    driver.handle(report(plan.step + 1, on_gpu(plan.placements), layers=slow, step_s=9.0))
    assert driver.planning._book.profile() != before


def test_steps_beside_work_on_memory_are_not_planned_from(driver: Driver) -> None:
    """The trainer says so with the step's report; what was measured in it comes then or later."""
    driver.start(policy="fixed", k=0.0)
    driver.handle(report(1, stall_s=0.0))
    book = driver.planning._book
    before = book.profile()
    driver.handle(report(2, measured=None, moving=True))
    driver.handle(report(3, measured=2, stall_s=0.0, step_s=0.6))
    driver.handle(cpu_report(2, 99.0))
    assert book.profile() == before
    driver.handle(report(4, measured=3, stall_s=0.0, step_s=0.6))
    assert book.profile() != before


@pytest.mark.parametrize("starved", [0.0, 1.0])
def test_work_that_waits_for_launches_is_slowed_down_by_updates(driver: Driver, starved: float) -> None:
    """Of LAYERS * 3 ms of work, half went on beside updates. What they cost is no layer's own."""
    driver.start(policy="fixed", k=0.0)
    work_s = LAYERS * 3e-3
    for step in range(1, 4):
        driver.handle(cpu_report(step, work_s / 4))
        driver.handle(report(step, stall_s=0.0, starved=starved))
    profile = driver.planning._book.profile()
    assert profile.drag == pytest.approx(0.4 * starved)
    assert profile.forward_s + profile.backward_s == pytest.approx(work_s * (1 - 0.2 * starved))


def test_times_belong_to_the_step_that_was_measured(driver: Driver) -> None:
    """A GPU runs behind: what a report brings is of an earlier step, and that step's own duration goes with it."""
    driver.start(policy="fixed", k=0.0)
    for step, measured in enumerate((None, 0, 1, 2)):
        driver.handle(report(step, measured=measured, stall_s=0.0, step_s=100.0 if step == 2 else 0.5))
    book = driver.planning._book
    assert book.profile().other_s == pytest.approx(0.5 - LAYERS * 3e-3)
    driver.handle(report(4, measured=3, stall_s=0.0))


def test_layers_that_move_at_random_are_dirty_too(driver: Driver) -> None:
    driver.start(policy="random")
    plan = driver.next_plan()
    assert plan is not None
    driver.agree(plan)
    driver.handle(applied(plan))
    book = driver.planning._book
    before = book.profile()
    driver.handle(report(plan.step, on_gpu(plan.placements), step_s=0.6))
    assert book.profile() == before


def test_a_step_in_which_threads_changed_is_not_a_whole_one(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0)
    driver.handle(report(1, stall_s=0.0))
    driver.sent(m.Command(name="threads", value="2"))
    book = driver.planning._book
    before_s = book.profile().other_s
    driver.handle(report(2, stall_s=0.0, step_s=0.6))
    assert book.profile().other_s == before_s
    driver.handle(report(3, stall_s=0.0, step_s=0.6))
    assert book.profile().other_s > before_s


def test_a_plan_that_was_cut_short_is_predicted_as_it_is(driver: Driver) -> None:
    driver.start(policy="deadline", k=None)
    driver.handle(cpu_report(1, 10.0, lids=(0, 1, 2, 3)))
    plan = driver.sent(report(1))[0][1]
    assert isinstance(plan, m.Plan) and len(on_gpu(plan.placements)) == LAYERS and plan.predicted_step_s is not None
    planning = driver.planning
    assert planning.predicted_step_s is not None
    all_on_cpu_s = planning.predicted_step_s
    driver.agree(plan)
    driver.handle(applied(plan, gpu_lids=(0, 1)))
    assert plan.predicted_step_s < planning.predicted_step_s < all_on_cpu_s


def test_old_steps_are_forgotten() -> None:
    driver = Driver()
    driver.start(policy="random")
    for step in range(60):
        driver.handle(m.Command(name="threads", value=str(1 + step % 2)))
        for _, message in driver.sent(report(step, on_gpu(driver.status().placements))):
            if isinstance(message, m.Plan):
                plan = message
        if driver.planning._ledger.busy:
            driver.agree(plan)
            driver.handle(applied(plan))


def test_the_prediction_is_that_of_the_layers_that_are_owned(driver: Driver) -> None:
    driver.start(policy="deadline", k=None)
    driver.handle(cpu_report(1, 10.0, lids=(1, 2, 3)))
    plan = driver.sent(report(1))[0][1]
    assert isinstance(plan, m.Plan) and plan.predicted_step_s is not None
    planning = driver.planning
    assert planning.predicted_step_s is not None
    assert planning.predicted_step_s > 10 > plan.predicted_step_s
    driver.agree(plan)
    driver.handle(applied(plan))
    assert planning.predicted_step_s == plan.predicted_step_s


def test_the_owners_are_those_that_the_trainer_names(driver: Driver) -> None:
    """A GPU without room for all of a plan leaves layers where they are."""
    driver.start()
    plan = driver.next_plan()
    assert plan is not None
    driver.agree(plan)
    driver.handle(applied(plan, gpu_lids=(3,)))
    assert on_gpu(driver.status().placements) == (3,)


def test_while_a_plan_is_under_way_there_is_no_other(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    assert plan is not None
    assert driver.next_plan(plan.step) is None
    driver.handle(ack(plan.plan_id), OPTIMIZER)
    assert driver.next_plan(plan.step + 30) is None


def test_a_refused_plan_makes_room_for_the_next(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    assert plan is not None
    driver.handle(ack(plan.plan_id, accepted=False, reason="the last plan is not applied yet"), TRAINER)
    assert driver.notes == "trainer-0 refuses plan 1: the last plan is not applied yet"
    assert driver.sent(ack(plan.plan_id), OPTIMIZER) == []
    assert driver.next_plan(plan.step) is not None


def test_what_was_not_committed_cannot_have_been_applied(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    assert plan is not None
    with pytest.raises(OwnershipError, match="was not committed"):
        driver.handle(applied(plan))


def test_plans_come_every_so_many_steps_and_only_where_they_change_something() -> None:
    driver = Driver(replan_every=10)
    driver.start(policy="fixed", k=0.5)
    assert driver.next_plan() is None
    assert driver.answer(m.Command(name="k", value="1.0")) == m.CommandReply(
        ok=True, text="k=1.0 from the next plan on"
    )
    plan = driver.next_plan(30)
    assert plan is not None and on_gpu(plan.placements) == (0, 1, 2, 3) and plan.policy == "fixed"


def test_what_fits_no_longer_is_noted(driver: Driver) -> None:
    size = layout(table().layers[0]).nbytes
    driver.start(policy="fixed", k=0.5, host_bytes=2 * size, gpu_bytes=1 << 40)
    driver.handle(report(1, (0, 1), gpu_free_bytes=0))
    assert driver.notes == ""
    driver.handle(report(2, (), gpu_free_bytes=0))
    assert "no plan fits" in driver.notes


def test_positions_that_were_learned_decide_what_the_gpu_owns(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.25)
    driver.handle(m.PositionsLearned(positions=(3, 2, 1, 0)))
    plan = driver.next_plan()
    assert plan is not None and on_gpu(plan.placements) == (3,)
    with pytest.raises(ValueError, match="every layer"):
        driver.handle(m.PositionsLearned(positions=(0, 1)))


# ---------------------------------------------------------------- ahead of the verdict, or behind it


def long_step(step: int, gpu_lids: tuple[int, ...] = ()) -> m.TrainerReport:
    """Backward takes as long as the CPU's updates, so it could hide them."""
    times = tuple(m.LayerTimes(lid=lid, forward_s=0.1, backward_s=1.0) for lid in range(LAYERS))
    return report(step, gpu_lids, step_s=4.4, stall_s=0.0, layers=times)


def modes(driver: Driver, first_step: int, steps: int, *, clipped: bool) -> list[bool]:
    """The modes that the optimizer is told in so many steps that are clipped, or not."""
    told = []
    for step in range(first_step, first_step + steps):
        driver.handle(cpu_report(step, 0.9, lids=(0, 1, 2, 3)))
        driver.handle(m.Verdict(step=step, scale=0.5 if clipped else 1.0, skipped=False))
        told += [message.speculate for _, message in driver.sent(long_step(step)) if isinstance(message, m.SetMode)]
    return told


def test_the_mode_follows_the_share_of_clipped_steps(driver: Driver) -> None:
    """And does not flap where half of them are."""
    driver.start(policy="fixed", k=0.0, awaits_verdict=True, speculate=None)
    assert modes(driver, 0, 20, clipped=False) == []
    assert modes(driver, 20, 90, clipped=True) == [False]
    driver.handle(m.Log(step=110, numbers={}))
    assert driver.records[-1]["mode"] == "defer"
    assert modes(driver, 110, 40, clipped=False) == [True]
    driver.handle(m.Log(step=150, numbers={}))
    assert driver.records[-1]["mode"] == "speculate"
    alternating = [modes(driver, step, 1, clipped=step % 2 == 0) for step in range(150, 200)]
    assert not any(alternating)


def test_a_mode_that_needs_other_layers_waits_for_them(driver: Driver) -> None:
    """To wait for verdicts while all layers are the CPU's would take longer than to be ahead in vain now and then."""
    driver.start(policy="deadline", awaits_verdict=True, speculate=None)
    owned: tuple[int, ...] = on_gpu(driver.status().placements)
    for step in range(40):
        driver.handle(cpu_report(step, 0.9, lids=tuple({0, 1, 2, 3} - set(owned))))
        driver.handle(m.Verdict(step=step, scale=0.5 if step >= 10 else 1.0, skipped=False))
        sent = [message for _, message in driver.sent(long_step(step, owned))]
        if not sent:
            continue
        (plan, _) = sent
        assert isinstance(plan, m.Plan), "no SetMode yet"
        driver.agree(plan)
        after = driver.sent(applied(plan))
        owned = on_gpu(plan.placements)
        if after:
            break
    assert step >= 10 and after == [(OPTIMIZER, m.SetMode(speculate=False))] and len(owned) > 1
    assert "mode defer" in driver.notes
    assert driver.sent(long_step(step + 1, owned)) == [], "said once"


@pytest.mark.parametrize("accepted", [True, False])
def test_a_plan_that_the_gpu_has_no_room_for_ends_no_mode(driver: Driver, accepted: bool) -> None:
    """Nor does one that was refused, once clipping is over and another plan holds."""
    driver.start(policy="deadline", awaits_verdict=True, speculate=None)
    owned: tuple[int, ...] = on_gpu(driver.status().placements)
    for step in range(40):
        driver.handle(cpu_report(step, 0.9, lids=tuple({0, 1, 2, 3} - set(owned))))
        driver.handle(m.Verdict(step=step, scale=0.5 if step >= 10 else 1.0, skipped=False))
        if plans := [message for _, message in driver.sent(long_step(step, owned))]:
            break
    plan = plans[0]
    assert isinstance(plan, m.Plan) and on_gpu(plan.placements) != owned
    if accepted:
        driver.agree(plan)
        assert driver.sent(applied(plan, owned, moved=0)) == []
        return
    driver.handle(ack(plan.plan_id), OPTIMIZER)
    driver.handle(ack(plan.plan_id, accepted=False, reason="no"), TRAINER)
    for later in range(step + 1, step + 200):
        driver.handle(m.Verdict(step=later, scale=1.0, skipped=False))
    driver.answer(m.Command(name="k", value="0.5"))
    other = driver.sent(long_step(later, owned))[0][1]
    assert isinstance(other, m.Plan) and len(on_gpu(other.placements)) == 2
    driver.agree(other)
    assert driver.sent(applied(other)) == []


def test_a_mode_that_is_better_with_these_layers_too_does_not_wait(driver: Driver) -> None:
    driver.start(policy="deadline", awaits_verdict=True, speculate=None)
    for step in range(100):
        driver.handle(m.Verdict(step=step, scale=0.5, skipped=False))
    driver.handle(cpu_report(99, 0.9, lids=(0, 1, 2, 3)))
    sent = next(sent for step in range(99, 110) if (sent := [told for _, told in driver.sent(long_step(step))]))
    assert sent[0] == m.SetMode(speculate=False) and isinstance(sent[1], m.Plan)


def test_a_step_that_is_skipped_counts_as_a_clipped_one(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.0, awaits_verdict=True, speculate=None)
    for step in range(100):
        driver.handle(m.Verdict(step=step, scale=1.0, skipped=True))
    assert modes(driver, 100, 3, clipped=True) == [False]


@pytest.mark.parametrize(
    ("changes", "mode"), [({"speculate": True}, "speculate"), ({"speculate": False}, "defer"), ({}, None)]
)
def test_a_mode_that_was_asked_for_is_kept(driver: Driver, changes: dict[str, Any], mode: str | None) -> None:
    driver.start(policy="random", awaits_verdict=bool(changes), **{"speculate": False} | changes)
    if changes:
        driver.handle(m.Verdict(step=0, scale=0.5, skipped=False))
    for step in range(30):
        sent = driver.sent(report(step, on_gpu(driver.status().placements)))
        assert not any(isinstance(message, m.SetMode) for _, message in sent)
    driver.handle(m.Log(step=30, numbers={}))
    assert driver.records[-1]["mode"] == mode


def test_at_random_the_mode_changes_as_the_layers_do(driver: Driver) -> None:
    driver.start(policy="random", awaits_verdict=True, speculate=None)
    told = []
    for step in range(40):
        owned = on_gpu(driver.status().placements)
        driver.handle(cpu_report(step, 0.9, lids=tuple({0, 1, 2, 3} - set(owned))))
        messages = [message for _, message in driver.sent(long_step(step, owned))]
        told += [message.speculate for message in messages if isinstance(message, m.SetMode)]
        for plan in [message for message in messages if isinstance(message, m.Plan)][:1]:  # one for each of two
            driver.agree(plan)
            driver.handle(applied(plan))
    assert len(told) > 5 and told == [index % 2 == 1 for index in range(len(told))], "each is another one"


@pytest.mark.parametrize(("speculate", "bytes_each"), [(None, 26), (False, 14)])
def test_a_second_bank_is_host_memory_that_does_not_move(
    driver: Driver, speculate: bool | None, bytes_each: int
) -> None:
    driver.start(policy="fixed", k=0.0, awaits_verdict=True, speculate=speculate)
    facts = driver.planning._facts[0]
    assert (facts.host_bytes, facts.spare_bytes) == (bytes_each << 20, (bytes_each - 14) << 20)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("stop", "now", "unknown command 'stop'; known: k, policy, objective, threads"),
        ("k", "1.5", "k is '1.5'"),
        ("k", "-0.1", "k is '-0.1'"),
        ("k", "nan", "k is 'nan'"),
        ("k", "most", "k is 'most'"),
        ("k", "", "k is ''"),
        ("policy", "best", "policy 'best' is unknown; known: fixed, cotrain"),
        ("policy", "fixed", 'policy "fixed" needs a k'),
        ("objective", "fun", "objective 'fun' is unknown; known: speed"),
        ("threads", "0", "threads is '0': a number from 1 to 9999"),
        ("threads", "9" * 400, "a number from 1 to 9999"),
        ("threads", "-2", "threads is '-2'"),
        ("threads", "1.5", "threads is '1.5'"),
    ],
)
def test_only_known_commands_with_values_that_can_be(driver: Driver, name: str, value: str, reason: str) -> None:
    driver.start(policy="deadline")
    before = driver.status()
    reply = driver.answer(m.Command(name=name, value=value))
    assert isinstance(reply, m.CommandReply) and not reply.ok and reason in reply.text
    assert driver.status() == before


def test_a_command_needs_a_trainer(driver: Driver) -> None:
    assert driver.answer(m.Command(name="k", value="1")) == m.CommandReply(ok=False, text="no trainer is here")


def test_k_can_be_left_to_the_planner_again(driver: Driver) -> None:
    driver.start(policy="fixed", k=1.0)
    assert driver.answer(m.Command(name="k", value="auto")) == m.CommandReply(
        ok=True, text="k=auto from the next plan on"
    )
    driver.next_plan(0, 4)
    assert driver.status().policy == "deadline"


@pytest.mark.parametrize(("objective", "gpu_lids"), [("gpu-memory", ()), ("host-memory", (0, 1, 2, 3))])
def test_policy_and_objective_are_commands(driver: Driver, objective: str, gpu_lids: tuple[int, ...]) -> None:
    driver.start(policy="fixed", k=0.5, gpu_bytes=1 << 40)
    for name, value in (("policy", "balance"), ("objective", objective), ("policy", "deadline")):
        assert driver.answer(m.Command(name=name, value=value)) == m.CommandReply(
            ok=True, text=f"{name}={value} from the next plan on"
        )
    plan = driver.next_plan(1)
    assert plan is not None and plan.policy == "deadline" and on_gpu(plan.placements) == gpu_lids
    driver.handle(m.Log(step=2, numbers={}))
    assert driver.records[-1]["objective"] == objective and driver.records[-1]["policy"] == "deadline"


def test_a_command_does_not_wait_for_the_next_look() -> None:
    driver = Driver(replan_every=100)
    driver.start(policy="fixed", k=0.5)
    assert driver.next_plan(0, 5) is None
    driver.handle(m.Command(name="k", value="1.0"))
    plan = driver.next_plan(5, 1)
    assert plan is not None and plan.step == 7 and len(on_gpu(plan.placements)) == LAYERS


def test_fewer_threads_reach_the_optimizer_and_the_planner(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(cpu_report(1, 1.0))
    driver.handle(report(1, (0, 1)))
    book = driver.planning._book
    assert book.profile().cpu_update_s == pytest.approx(4.0)
    sent = driver.sent(m.Command(name="threads", value="2"))
    assert sent == [(OPTIMIZER, m.SetThreads(threads=2))]
    expected_s = 4.0 * 2**THREADS_EXPONENT
    assert book.profile().cpu_update_s == pytest.approx(expected_s)
    driver.handle(cpu_report(2, 1.0, threads=4))  # done before the command arrived
    assert book.profile().cpu_update_s == pytest.approx(expected_s)
    driver.handle(cpu_report(2, 3.0, threads=2))
    assert book.profile().cpu_update_s == pytest.approx(12.0)
    driver.handle(report(2, (0, 1)))
    driver.handle(m.Log(step=3, numbers={}))
    assert driver.records[-1]["threads"] == 2


@pytest.mark.parametrize("told", [True, False])
def test_after_a_change_of_threads_a_plan_waits_for_the_cpus_times(told: bool) -> None:
    driver = Driver(replan_every=1)
    driver.start(policy="fixed", k=0.0)
    driver.handle(cpu_report(1, 1e-4, lids=(0, 1, 2, 3)))
    driver.handle(report(1))
    driver.sent(m.Command(name="policy", value="deadline"))
    driver.sent(m.Command(name="threads", value="1"))
    slow = cpu_report(2, 10.0, lids=(0, 1, 2, 3), threads=1)
    assert driver.sent(report(2)) == []
    if told:
        driver.handle(slow)
        plan = driver.sent(report(3))[0][1]
        assert isinstance(plan, m.Plan) and len(on_gpu(plan.placements)) > 0
    else:
        waited = [driver.sent(report(step)) for step in range(3, 3 + CPU_PATIENCE_STEPS)]
        assert waited == [[]] * CPU_PATIENCE_STEPS
        assert not driver.planning._awaits_cpu_times()


def test_an_optimizer_with_fewer_cores_than_threads_asked_for_is_believed_in_the_end(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(cpu_report(1, 1.0))
    driver.handle(report(1, (0, 1)))
    driver.sent(m.Command(name="threads", value="64"))
    driver.handle(cpu_report(2, 1.0))
    driver.handle(cpu_report(3, 1.0))
    book = driver.planning._book
    assert book.profile().cpu_update_s == pytest.approx(4.0)


@pytest.mark.parametrize("continues", [True, False])
def test_commands_hold_while_the_same_training_goes_on(driver: Driver, continues: bool) -> None:
    driver.start(policy="balance", k=None, objective="speed")
    for name, value in (("objective", "gpu-memory"), ("k", "1.0"), ("threads", "2")):
        driver.sent(m.Command(name=name, value=value))
    driver.handle(m.Goodbye())
    driver.handle(m.SessionEnded())
    driver.join(TRAINER, 11)
    asked = table(policy="balance", k=None, objective="speed", continues=continues)
    assert driver.sent(asked) == [(OPTIMIZER, replace(asked, threads=2 if continues else None))]
    driver.sent(TRAINERS)
    plan = driver.sent(OPTIMIZERS, OPTIMIZER)[0][1]
    assert isinstance(plan, m.Plan) and (plan.policy == "fixed" and plan.k == 1.0) is continues
    planning = driver.planning
    assert planning.objective == ("gpu-memory" if continues else "speed")


def test_clipping_is_remembered_while_the_same_training_goes_on(driver: Driver) -> None:
    driver.start(awaits_verdict=True, speculate=None)
    for step in range(20):
        driver.handle(m.Verdict(step=step, scale=0.5, skipped=False))
    driver.handle(m.Goodbye())
    driver.handle(m.SessionEnded())
    for continues, share in ((True, pytest.approx(1.0, abs=0.2)), (False, 0.0)):
        driver.handle(table(awaits_verdict=True, speculate=None, continues=continues))
        assert driver.planning._clipped.value == share


# ---------------------------------------------------------------- records


def test_a_record_waits_for_the_loops_own_numbers(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(
        m.OptimizerReport(step=3, threads=2, busy_s=0.25, updates=(m.CpuUpdate(lid=2, update_s=0.1, queued_s=0.2),))
    )
    driver.handle(report(4, (0, 1)))
    assert driver.records == []
    driver.handle(m.Log(step=5, numbers={"loss": 1.5}))
    (record,) = driver.records
    assert record["step"] == 5 and record["loss"] == 1.5 and record["k"] == 0.5
    assert record["cpu_busy_s"] == 0.25 and record["gpu_layers"] == 2 and record["moved"] == 0
    (published,) = [command.status for command in driver.commands if isinstance(command, Publish)]
    assert json.loads(published.record) == record
    assert driver.status() == published


def test_a_record_gets_the_stall_of_its_own_step(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    for step, measured in enumerate((None, 0, 1, 2)):
        driver.handle(report(step, number=step + 11, measured=measured, stall_s=0.0 if measured is None else measured))
    driver.handle(m.Log(step=13, numbers={}))
    assert [record["stall_s"] for record in driver.records] == [0, 1, 2]


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


def test_numbers_that_come_too_late_get_a_line_of_their_own(driver: Driver) -> None:
    driver.start()
    driver.handle(m.Log(step=9, numbers={"validation": 2.0}))
    assert driver.records == [{"step": 9, "validation": 2.0}]


def test_numbers_that_json_does_not_have_are_null(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    driver.handle(report(0))
    driver.handle(m.Log(step=1, numbers={"loss": 2.5, "grad_norm": math.inf}))
    (record,) = driver.records
    assert (record["loss"], record["grad_norm"]) == (2.5, None)
    shown = view.line(driver.status())
    assert "loss 2.5000" in shown and "norm" not in shown
    driver.handle(m.Log(step=1, numbers={"loss": math.nan}))
    assert driver.records == [{"step": 1, "loss": None}]


def test_the_last_records_are_written_at_the_trainers_goodbye(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    for step in range(3):
        driver.handle(report(step, number=step + 11))
    driver.handle(m.Goodbye())
    assert [record["step"] for record in driver.records] == [11, 12, 13]


# ---------------------------------------------------------------- one trainer after another


@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_next_trainer_waits_until_both_have_ended_the_session(driver: Driver, trainer_first: bool) -> None:
    driver.start()
    farewells: list[m.Message] = [m.Goodbye(), m.SessionEnded()]
    first, last = farewells if trainer_first else farewells[::-1]
    next_one = hello(12)
    assert driver.sent(first) == []
    assert driver.sent(next_one) == []
    assert "waits until the last one has left" in driver.notes
    assert driver.sent(last) == [(TRAINER, WELCOME)]
    assert driver.status().layer_names == ()
    driver.handle(m.Ready(detail=""))
    assert driver.first_plan().plan_id == 0, "a new session counts its plans anew"


def test_a_plan_that_the_last_trainer_left_behind_is_not_for_the_next(driver: Driver) -> None:
    driver.start()
    plan = driver.next_plan()
    assert plan is not None
    driver.handle(ack(plan.plan_id), TRAINER)
    driver.handle(m.Goodbye())
    assert driver.sent(ack(plan.plan_id), OPTIMIZER) == [], "a Reassign, for nobody"
    driver.handle(m.SessionEnded())
    assert driver.sent(hello(12)) == [(TRAINER, WELCOME)]
    assert driver.state.inbox(TRAINER) == "inbox-12"


def test_a_trainer_that_left_before_it_began_leaves_no_trace(driver: Driver) -> None:
    driver.join(TRAINER, 11)
    driver.handle(m.Goodbye())
    driver.join(TRAINER, 12)


def test_other_processes_come_and_go(driver: Driver) -> None:
    driver.start()
    driver.handle(m.Goodbye(), OPTIMIZER)
    assert driver.notes == "optimizer-0 says goodbye"
    driver.join(OPTIMIZER, 20)
    assert driver.status().layer_names, "the trainer's session goes on"


# ---------------------------------------------------------------- several trainers


def test_trainers_are_planned_each_by_itself(driver: Driver) -> None:
    """Two with an optimizer each: what one does, is commanded to and leaves behind is not the other's."""
    driver.start(policy="fixed", k=0.5)
    trainer, optimizer = Address("trainer", 1), Address("optimizer", 1)
    driver.join(optimizer, 20)
    driver.join(trainer, 21)
    asked = table(policy="fixed", k=1.0, layers=table().layers[:2])
    assert driver.sent(asked, trainer) == [(optimizer, asked)]
    assert driver.sent(TRAINERS, trainer) == [] == driver.sent(OPTIMIZERS, OPTIMIZER), "another's optimizer"
    (to, plan), same = driver.sent(OPTIMIZERS, optimizer)
    assert to == trainer and same == (optimizer, plan) and isinstance(plan, m.Plan) and plan.plan_id == 0
    assert driver.sent(ack(0), OPTIMIZER) == [] == driver.sent(ack(0), trainer)
    assert driver.sent(ack(0), optimizer) == [(trainer, m.Reassign(plan_id=0))]
    driver.handle(applied(plan, moved=0), trainer)
    other = driver.state.fleet.seat(1).planning
    assert other is not None and other.placements == ("gpu", "gpu") and driver.planning.placements == placed((0, 1))
    times = tuple(m.LayerTimes(lid=lid, forward_s=1e-3, backward_s=2e-3) for lid in range(2))
    driver.handle(report(0, (0, 1)))
    driver.handle(report(4, placements=("gpu", "gpu"), layers=times), trainer)
    driver.handle(m.Log(step=5, numbers={"loss": 2.0}), trainer)
    assert [(c.rank, json.loads(c.line)["step"]) for c in driver.commands if isinstance(c, Write)] == [(1, 5)]
    assert not any(isinstance(c, Publish) for c in driver.commands), "a status shows the first trainer"
    driver.handle(m.Log(step=1, numbers={"loss": 1.0}))
    assert [(c.rank, json.loads(c.line)["loss"]) for c in driver.commands if isinstance(c, Write)] == [(0, 1.0)]
    assert [str(p.address) for p in driver.status().processes] == [
        "coordinator-0",
        "optimizer-0",
        "trainer-0",
        "optimizer-1",
        "trainer-1",
    ]
    both = driver.sent(m.Command(name="threads", value="2"))
    assert both == [(OPTIMIZER, m.SetThreads(threads=2)), (optimizer, m.SetThreads(threads=2))]


def test_a_trainer_that_leaves_leaves_the_others_alone(driver: Driver) -> None:
    driver.start(policy="fixed", k=0.5)
    trainer, optimizer = Address("trainer", 1), Address("optimizer", 1)
    driver.join(optimizer, 20)
    driver.join(trainer, 21)
    driver.handle(table(policy="fixed", k=0.0), trainer)
    driver.handle(TRAINERS, trainer)
    plan = driver.sent(OPTIMIZERS, optimizer)[0][1]
    driver.handle(m.Goodbye())
    driver.handle(m.SessionEnded(), optimizer)  # not the one whose trainer has left
    assert driver.sent(hello(31)) == [] and "trainer-0 waits" in driver.notes
    assert driver.sent(m.SessionEnded()) == [(TRAINER, WELCOME)]
    assert driver.status().layer_names, "of the trainer that goes on"
    assert isinstance(plan, m.Plan)
    driver.handle(ack(0), trainer)
    assert driver.sent(ack(0), optimizer) == [(trainer, m.Reassign(plan_id=0))]
    assert driver.first_plan().plan_id == 0


def test_who_has_no_seat_is_not_listened_to(driver: Driver) -> None:
    driver.start()
    assert driver.handle(report(0), MONITOR) == [Note("TrainerReport of monitor-9: dropped")]
