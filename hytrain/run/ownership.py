"""How the placement of layers changes: three pure state machines around one agreement.

    coordinator (PlanLedger)        trainer (PlanBook)             optimizer (PlanBook)
      propose ── Plan ─────────────────▶ acknowledge ◀── Plan ──────── acknowledge
      both acknowledged ◀── PlanAck ────────┴───────────── PlanAck ────────┘
      commit ── Reassign ──────────────▶ holds from its step on
                                         boundary of that step ── TakeOver / GiveUp ──▶ checked against the plan
      settled ◀── PlanApplied ───────────┴──────────────────────────── PlanApplied ──▶ settled

A plan for step s holds only if both sides acknowledged it before the trainer begins backward s (I3). One that
comes too late, or whose memory is not there yet, is postponed: it holds from a later step on. Only the trainer is
told to go ahead: the optimizer learns it from the trainer, on the channel that also brings its gradients, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from protocol.messages import Plan, PlanAck, PlanApplied, Reassign

PARTIES: Final = ("trainer", "optimizer")


class OwnershipError(RuntimeError):
    """A plan, or a handover, that the agreement does not allow."""


@dataclass(slots=True)
class PlanBook:
    """One party's side of the agreement: the plan it acknowledged last, and whether it holds.

    The optimizer hears of the next plan while the trainer's messages about this one are still on their way, by
    another channel. So it keeps every plan that it acknowledged until the trainer says that it was applied.
    """

    role: str
    layers: int
    plan: Plan | None = None
    holds: bool = False
    _acknowledged: dict[int, Plan] = field(default_factory=dict)

    def on_plan(self, plan: Plan) -> PlanAck:
        """Acknowledge a proposal, or refuse it with a reason. A newer proposal replaces one that does not hold."""
        reason = ""
        if len(plan.placements) != self.layers:
            reason = f"{len(plan.placements)} placements for {self.layers} layers"
        elif self.holds:
            reason = "the last plan is not applied yet"
        elif self.plan is not None and plan.plan_id <= self.plan.plan_id:
            reason = f"plan {self.plan.plan_id} came before"
        if not reason:
            self.plan = self._acknowledged[plan.plan_id] = plan
        return PlanAck(plan_id=plan.plan_id, accepted=not reason, reason=reason)

    def on_reassign(self, message: Reassign) -> None:
        """The agreement is complete. Raises `OwnershipError` unless it is about the plan acknowledged last."""
        if self.plan is None or self.plan.plan_id != message.plan_id or self.holds:
            raise OwnershipError(f"{self.role}: Reassign({message.plan_id}) without its plan")
        self.holds = True

    def due(self, step: int) -> Plan | None:
        """The plan to apply before step `step` begins, if there is one for this step or an earlier one."""
        return self.plan if self.holds and self.plan is not None and self.plan.step <= step else None

    def settle(self) -> None:
        """The plan has been applied: room for the next."""
        if not self.holds:
            raise OwnershipError(f"{self.role}: nothing to settle")
        assert self.plan is not None, "what holds is a plan"
        self.holds = False
        self.forget(self.plan.plan_id)

    def forget(self, plan_id: int) -> None:
        """The plan has been applied or has lapsed, and with it those before it."""
        self._acknowledged = {known: plan for known, plan in self._acknowledged.items() if known > plan_id}

    def allows(self, plan_id: int, lid: int, updates: str) -> bool:
        """Whether an acknowledged plan that is not applied yet gives layer `lid` to an updater, "cpu" or "gpu"."""
        plan = self._acknowledged.get(plan_id)
        return plan is not None and plan.placement(lid).updates == updates

    def check(self) -> None:
        assert not self.holds or self.plan is not None, "what holds is a plan"


@dataclass(slots=True)
class PlanLedger:
    """The coordinator's side: at most one proposal under way. `placements` are those of the plan applied last."""

    placements: tuple[str, ...]
    _next_id: int = 0
    _open: Plan | None = None
    _acks: set[str] = field(default_factory=set)
    _committed: bool = False

    @property
    def busy(self) -> bool:
        return self._open is not None

    @property
    def next_id(self) -> int:
        return self._next_id

    def propose(self, plan: Plan) -> Plan:
        """Open a proposal. Raises `OwnershipError` while another is under way."""
        if self._open is not None or plan.plan_id != self._next_id:
            raise OwnershipError(f"plan {plan.plan_id} while {self._open} is under way")
        self._open, self._acks, self._committed = plan, set(), False
        self._next_id += 1
        return plan

    def on_ack(self, role: str, ack: PlanAck) -> Reassign | None:
        """Count a party's acknowledgement; the last gives the commitment for the trainer. A refusal ends the plan."""
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

    def on_applied(self, applied: PlanApplied) -> None:
        """The trainer has applied the committed plan. Raises `OwnershipError` for any other."""
        if self._open is None or not self._committed or applied.plan_id != self._open.plan_id:
            raise OwnershipError(f"PlanApplied({applied.plan_id}) of a plan that was not committed")
        if len(applied.placements) != len(self.placements):
            raise OwnershipError(f"{len(applied.placements)} placements for {len(self.placements)} layers")
        self.placements = applied.placements
        self._open = None

    def check(self) -> None:
        assert not self._committed or self._open is None or self._acks == set(PARTIES), "committed by both"
