"""Plans: proposed, acknowledged, committed, applied, on both sides; and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.run.ownership import OwnershipError, PlanBook, PlanLedger
from protocol.messages import Plan, PlanAck, PlanApplied, Reassign
from protocol.placement import CPU, GPU, VISIT, Places

ON_CPU = Places(("cpu",) * 3)


def on_gpu(*lids: int) -> Places:
    return Places.chosen(3, set(lids))


def plan(plan_id: int = 0, step: int = 5, gpu_lids: tuple[int, ...] = (0, 2)) -> Plan:
    usual: dict[str, Any] = {"k": 0.5, "policy": "fixed", "reason": "", "predicted_step_s": None}
    return Plan(plan_id=plan_id, step=step, places=on_gpu(*gpu_lids), **usual)


def ack(plan_id: int = 0, accepted: bool = True) -> PlanAck:
    return PlanAck(plan_id=plan_id, accepted=accepted, reason="" if accepted else "cannot")


def applied(plan_id: int = 0, gpu_lids: tuple[int, ...] = (0, 2)) -> PlanApplied:
    return PlanApplied(plan_id=plan_id, step=5, places=on_gpu(*gpu_lids), moved=1, handover_s=0.0)


@pytest.fixture
def book() -> PlanBook:
    return PlanBook("trainer", 3)


@pytest.fixture
def ledger() -> PlanLedger:
    return PlanLedger(ON_CPU)


def test_a_plan_holds_from_the_agreement_to_its_end(book: PlanBook) -> None:
    assert book.due(5) is None
    assert book.on_plan(plan()) == ack()
    assert book.due(5) is None and not book.holds
    book.on_reassign(Reassign(plan_id=0))
    book.check()
    assert book.holds and book.due(4) is None
    assert book.due(5) == book.due(6) == plan()  # at 6 it was postponed
    book.settle()
    book.check()
    assert book.due(6) is None and not book.holds and book.planned(0, 0) is None


def test_a_visiting_layer_is_not_the_gpus(book: PlanBook) -> None:
    book.on_plan(replace(plan(), places=Places.of([VISIT, CPU, GPU])))
    assert [book.planned(0, lid) for lid in range(3)] == [VISIT, CPU, GPU]


def test_the_next_plan_does_not_hide_the_one_whose_handovers_are_on_their_way(book: PlanBook) -> None:
    book.on_plan(plan(0, gpu_lids=(0,)))
    assert book.planned(0, 0) is not CPU and book.planned(0, 1) is not GPU and book.planned(1, 1) is not GPU
    book.on_plan(plan(1, gpu_lids=(1,)))
    assert book.planned(0, 0) is GPU and book.planned(0, 1) is CPU
    assert book.planned(1, 1) is GPU and book.planned(1, 0) is CPU
    book.forget(0)
    assert book.planned(0, 0) is not GPU and book.planned(1, 1) is GPU
    book.forget(1)
    assert book.planned(1, 1) is not GPU


def test_a_newer_proposal_replaces_one_that_does_not_hold(book: PlanBook) -> None:
    book.on_plan(plan(0))
    assert book.on_plan(plan(1, gpu_lids=())).accepted
    with pytest.raises(OwnershipError, match="nothing to settle"):
        book.settle()
    with pytest.raises(OwnershipError, match=r"trainer: Reassign\(0\) without its plan"):
        book.on_reassign(Reassign(plan_id=0))
    book.on_reassign(Reassign(plan_id=1))
    assert book.due(5) == plan(1, gpu_lids=())


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        (replace(plan(2), places=Places.of([*ON_CPU, GPU])), "4 placements for 3 layers"),
        (plan(2), "the last plan is not applied yet"),
        (plan(1), "plan 1 came before"),
        (plan(0), "plan 1 came before"),
    ],
)
def test_a_proposal_that_cannot_hold_is_refused(book: PlanBook, proposal: Plan, reason: str) -> None:
    book.on_plan(plan(1))
    if proposal.plan_id > 1:
        book.on_reassign(Reassign(plan_id=1))
    assert book.on_plan(proposal) == PlanAck(plan_id=proposal.plan_id, accepted=False, reason=reason)
    assert book.planned(2, 0) is not GPU and book.planned(1, 0) is GPU
    book.check()


@pytest.mark.parametrize("order", [("trainer", "optimizer"), ("optimizer", "trainer")])
def test_both_acknowledge_then_the_plan_is_committed(ledger: PlanLedger, order: tuple[str, str]) -> None:
    ledger.propose(plan())
    assert ledger.busy and ledger.next_id == 1
    assert ledger.on_ack(order[0], ack()) is None
    assert ledger.on_ack(order[0], ack()) is None
    assert ledger.on_ack(order[1], ack()) == Reassign(plan_id=0)
    assert ledger.on_ack(order[1], ack()) is None
    ledger.on_ack(order[1], ack(accepted=False))  # too late
    ledger.check()
    for wrong, reason in (
        (applied(1), r"PlanApplied\(1\)"),
        (replace(applied(), places=Places.of([GPU])), "1 placements"),
    ):
        with pytest.raises(OwnershipError, match=reason):
            ledger.on_applied(wrong)
    assert ledger.busy
    ledger.on_applied(applied())
    assert ledger.places == on_gpu(0, 2) and not ledger.busy
    ledger.check()


def test_a_layer_that_was_evicted_visits_and_no_open_proposal_is_for_it(ledger: PlanLedger) -> None:
    ledger.propose(plan())
    ledger.on_ack("trainer", ack()), ledger.on_ack("optimizer", ack())
    ledger.on_applied(applied())
    with pytest.raises(OwnershipError, match="layer 1 cannot have left the GPU"):
        ledger.on_evicted(1)
    with pytest.raises(OwnershipError, match="layer 3 cannot have left"):
        ledger.on_evicted(3)
    ledger.propose(plan(1))
    ledger.on_ack("trainer", ack(1))
    ledger.on_evicted(2)
    ledger.check()
    assert ledger.places == Places.of([GPU, CPU, VISIT]) and not ledger.busy
    assert ledger.on_ack("optimizer", ack(1)) is None
    ledger.propose(plan(2))
    ledger.on_ack("trainer", ack(2)), ledger.on_ack("optimizer", ack(2))
    ledger.on_evicted(0)  # both count on it: the trainer leaves the layer out
    assert ledger.busy and ledger.places == Places.of([VISIT, CPU, VISIT])
    ledger.on_applied(replace(applied(2), places=Places.of([VISIT, CPU, GPU])))
    assert ledger.places == Places.of([VISIT, CPU, GPU])


def test_a_refusal_ends_the_proposal(ledger: PlanLedger) -> None:
    with pytest.raises(OwnershipError, match="plan 1 while None is under way"):
        ledger.propose(plan(1))
    ledger.propose(plan(0))
    with pytest.raises(OwnershipError, match="plan 1 while Plan"):
        ledger.propose(plan(1))
    with pytest.raises(OwnershipError, match=r"PlanApplied\(0\).*was not committed"):
        ledger.on_applied(applied())
    ledger.on_ack("optimizer", ack())
    assert ledger.on_ack("trainer", ack(accepted=False)) is None
    assert not ledger.busy
    assert ledger.on_ack("trainer", ack()) is None
    ledger.propose(plan(1))
    assert ledger.on_ack("optimizer", ack(0)) is None  # of the plan before
    assert ledger.on_ack("monitor", ack(1)) is None
    assert ledger.on_ack("trainer", ack(1)) is None
    assert ledger.on_ack("optimizer", ack(1)) == Reassign(plan_id=1)
    ledger.check()


EVENTS = st.one_of(
    st.tuples(st.just("propose"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["trainer", "optimizer"]), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("applied"), st.integers(0, 3)),
)


@given(st.lists(EVENTS, max_size=30))
def test_any_events(events: list[tuple[Any, ...]]) -> None:
    """A plan is committed at most once, after both have accepted it, and only then applied."""
    ledger = PlanLedger(ON_CPU)
    accepted: dict[int, set[str]] = {}
    committed: list[int] = []
    for name, *arguments in events:
        try:
            if name == "propose":
                ledger.propose(plan(ledger.next_id))
            elif name == "applied":
                ledger.on_applied(applied(*arguments))
                assert committed and committed[-1] == arguments[0]
            else:
                accepted.setdefault(arguments[0], set()).update({name} if arguments[1] else ())
                reassign = ledger.on_ack(name, ack(*arguments))
                if reassign is not None:
                    assert accepted[reassign.plan_id] == {"trainer", "optimizer"}
                    committed.append(reassign.plan_id)
        except OwnershipError:
            pass
        ledger.check()
    assert committed == sorted(set(committed))
