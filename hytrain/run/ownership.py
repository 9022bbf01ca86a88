"""The agreement on changes of the placement of layers: three pure state machines.

docs/architecture.md draws the messages between coordinator (`PlanLedger`), trainer and optimizer (`PlanBook`).

A plan for step s holds only if both sides have acknowledged it before the trainer begins backward s (I3). A plan that
comes too late, or whose memory is not ready, is postponed to a later step. Only the trainer gets `Reassign`. The
optimizer learns of the change from the trainer, on the channel that also brings the gradients, in order.

The trainer alone moves a layer whose state must leave the GPU at once: it visits from then on. A plan that was made
before takes no memory there: the coordinator withdraws it, or the trainer leaves out what it would bring to the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from protocol.messages import Plan, PlanAck, PlanApplied, Reassign
from protocol.placement import VISIT, Placement, Places

PARTIES: Final = ("trainer", "optimizer")


class OwnershipError(RuntimeError):
    """A plan or a handover that the agreement does not allow."""


@dataclass(slots=True)
class PlanBook:
    """One party's side of the agreement: the plan that it acknowledged last, and whether it holds.

    The optimizer may hear of the next plan before the trainer's messages about this one, which use another channel. So
    it keeps each acknowledged plan until the trainer reports that it was applied.
    """

    role: str
    layers: int
    plan: Plan | None = None
    holds: bool = False
    _acknowledged: dict[int, Plan] = field(default_factory=dict)

    def on_plan(self, plan: Plan) -> PlanAck:
        """Acknowledge a proposal, or refuse it with a reason. A newer proposal replaces one that does not hold."""
        reason = ""
        if len(plan.places) != self.layers:
            reason = f"{len(plan.places)} placements for {self.layers} layers"
        elif self.holds:
            reason = "the last plan is not applied yet"
        elif self.plan is not None and plan.plan_id <= self.plan.plan_id:
            reason = f"plan {self.plan.plan_id} came before"
        if not reason:
            self.plan = self._acknowledged[plan.plan_id] = plan
        return PlanAck(plan_id=plan.plan_id, accepted=not reason, reason=reason)

    def on_reassign(self, message: Reassign) -> None:
        """The agreement is complete. Raises `OwnershipError` unless it concerns the plan acknowledged last."""
        if self.plan is None or self.plan.plan_id != message.plan_id or self.holds:
            raise OwnershipError(f"{self.role}: Reassign({message.plan_id}) without its plan")
        self.holds = True

    def due(self, step: int) -> Plan | None:
        """The plan to apply before step `step` begins: one for this step or an earlier one, or None."""
        return self.plan if self.holds and self.plan is not None and self.plan.step <= step else None

    def settle(self) -> None:
        """The plan has been applied, and the next may come."""
        if not self.holds:
            raise OwnershipError(f"{self.role}: nothing to settle")
        assert self.plan is not None, "what holds is a plan"
        self.holds = False
        self.forget(self.plan.plan_id)

    def forget(self, plan_id: int) -> None:
        """This plan and those before it have been applied or have lapsed."""
        self._acknowledged = {known: plan for known, plan in self._acknowledged.items() if known > plan_id}

    def planned(self, plan_id: int, lid: int) -> Placement | None:
        """Where an acknowledged plan that is not applied yet places layer `lid`; None if there is no such plan."""
        plan = self._acknowledged.get(plan_id)
        return None if plan is None else plan.places[lid]

    def check(self) -> None:
        assert not self.holds or self.plan is not None, "what holds is a plan"


@dataclass(slots=True)
class PlanLedger:
    """The coordinator's side: at most one open proposal. `places` are those of the plan applied last."""

    places: Places
    next_id: int = 0
    _open: Plan | None = None
    _acks: set[str] = field(default_factory=set)
    _committed: bool = False

    @classmethod
    def after(cls, plan: Plan, places: Places, *, holds: bool) -> Self:
        """Go on for a coordinator that has died: `plan` is the last one that the trainer has acknowledged.

        The optimizer may know the next one already.
        """
        ledger = cls(places, next_id=plan.plan_id + 2)
        if holds:
            ledger._open, ledger._acks, ledger._committed = plan, set(PARTIES), True
        return ledger

    @property
    def busy(self) -> bool:
        return self._open is not None

    def propose(self, plan: Plan) -> Plan:
        """Open a proposal. Raises `OwnershipError` while another is open."""
        if self._open is not None or plan.plan_id != self.next_id:
            raise OwnershipError(f"plan {plan.plan_id} while {self._open} is under way")
        self._open, self._acks, self._committed = plan, set(), False
        self.next_id += 1
        return plan

    def on_ack(self, role: str, ack: PlanAck) -> Reassign | None:
        """Count a party's acknowledgement. Both give the `Reassign` for the trainer; a refusal ends the plan."""
        if self._open is None or ack.plan_id != self._open.plan_id or role not in PARTIES or self._committed:
            return None
        if not ack.accepted:
            self._open = None
            return None
        self._acks.add(role)
        if self._acks != set(PARTIES):
            return None
        self._committed = True
        return Reassign(plan_id=ack.plan_id)

    def on_evicted(self, lid: int) -> None:
        """The state of a layer has left the GPU. Raises `OwnershipError` if it was not there."""
        if not 0 <= lid < len(self.places) or self.places[lid].state != "gpu":
            raise OwnershipError(f"the state of layer {lid} cannot have left the GPU: it was not there")
        self.places = self.places.moved({lid}, VISIT)
        if not self._committed:
            self._open = None

    def on_applied(self, applied: PlanApplied) -> None:
        """The trainer has applied the committed plan. Raises `OwnershipError` for any other."""
        if self._open is None or not self._committed or applied.plan_id != self._open.plan_id:
            raise OwnershipError(f"PlanApplied({applied.plan_id}) of a plan that was not committed")
        if len(applied.places) != len(self.places):
            raise OwnershipError(f"{len(applied.places)} placements for {len(self.places)} layers")
        self.places = applied.places
        self._open = None

    def check(self) -> None:
        assert not self._committed or self._open is None or self._acks == set(PARTIES), "committed by both"
