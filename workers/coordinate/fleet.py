"""The trainers of a run: one seat per rank, which one trainer after another takes. `CoordinatorState` calls it.

    trainer r, optimizer r ── messages ──▶ seat r: planning, records ──▶ commands
    the Goodbye of both, in either order ──▶ the seat is free for the next trainer

The optimizer of rank r serves the trainer of rank r. Seats are independent of each other.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, Final

from protocol import messages as m
from protocol.address import Address
from protocol.handles import layout
from workers.coordinate.records import SHOWN_BYTES, Records, shown
from workers.effects import Command, Keep, Note, Send
from workers.planning.last import LastPlan
from workers.planning.measured import WARM_UP_STEPS
from workers.planning.planning import Planning

#: The last plan of such a table, if one is known.
Recall = Callable[[m.LayerTable], LastPlan | None]

#: A rank's mean time in all-gathers is that of so many steps.
GATHER_STEPS: Final = 16
#: A report that has waited so long for the coordinator is late.
LATE_S: Final = 1.0


class TrainerSeat:
    """One rank: the planning and the records of its trainer, and the Hello of the trainer that waits."""

    def __init__(self, rank: int, *, replan_every: int, recall: Recall) -> None:
        self.trainer = Address("trainer", rank)
        self.planning: Planning | None = None
        self.records = Records(rank)
        self.waiting: m.Hello | None = None
        self.wishes: Mapping[str, Any] | None = None  # what it is to do by commands that were given to it
        self.saves: bool | None = None  # whether its loop saves checkpoints on command; None before its first step
        self.gauges: Mapping[str, float] = {}  # of its GPU and host, as last read
        self._replan_every, self._recall = replan_every, recall
        self._before: Planning | None = None  # of the previous trainer
        self._calibration: m.Calibration | None = None
        self._calibrated = m.Calibration()  # all that trainer and optimizer have measured
        self._farewells: set[str] = set()
        self._gathers_s: deque[float] = deque(maxlen=GATHER_STEPS)

    def handle(self, message: m.Message, sender: Address, now_s: float) -> list[Command]:
        """Handle a message of this rank's trainer or optimizer. `now_s` is monotonic."""
        if isinstance(message, m.LayerTable):
            kept = [] if message.continues else self._keep(None)
            planning = self._plan(message, None if message.continues else self._recall(message))
            self._gathers_s.clear()
            self.saves = None
            if message.continues and self._before is not None:
                planning.mode.continue_from(self._before.mode)
            return [*kept, *planning.begin()]
        if isinstance(message, m.Calibration):
            self._calibrate(message)
        if isinstance(message, m.Rejoin):
            return self._rejoin(message) if self.planning is None else []  # it may come twice
        if self.planning is None and isinstance(message, m.Calibration):
            self._calibration = message  # of an optimizer that is back before its trainer
            return []
        if self.planning is None:
            return [Note(f"{type(message).__name__} without a trainer: dropped")]
        commands = self._on_run(self.planning, message, sender, now_s)
        if "trainer" in self._farewells:  # the next trainer must not get this one's plan
            commands = [known for known in commands if not (isinstance(known, Send) and known.to == self.trainer)]
        return commands

    def _plan(self, table: m.LayerTable, last: LastPlan | None = None) -> Planning:
        """The planning of a trainer that takes the seat, or begins anew with other layers."""
        self._farewells.clear()
        self.planning = Planning(table, self.trainer.rank, replan_every=self._replan_every, last=last)
        if self.wishes is not None:
            self.planning.wishes.take(self.wishes)
        return self.planning

    def _rejoin(self, message: m.Rejoin) -> list[Command]:
        """The trainer that the last coordinator knew."""
        planning = self._plan(message.table)
        told = planning.rejoin(message)
        self._calibrate(message.calibration)
        if self._calibration is not None:
            planning.on_calibration(Address("optimizer", self.trainer.rank), self._calibration)
        return [Note(f"{self.trainer} is back after {message.step} steps"), *told]

    def _calibrate(self, calibration: m.Calibration) -> None:
        measured = {role: rate_s for role, rate_s in asdict(calibration).items() if rate_s is not None}
        self._calibrated = replace(self._calibrated, **measured)

    def rates(self) -> dict[str, Any]:
        """What a step's bill needs besides times, for a timeline. A seat without a trainer has none.

        `numels`: the parameters of each layer, by LID. `update_bytes`: what the CPU's update of one parameter reads and
        writes in host memory. In seconds, as measured before the first step, or None: `cpu_update_s` per parameter,
        `to_host_s` and `to_device_s` per byte.
        """
        if self.planning is None:
            return {}
        layers, planes = self.planning.table.layers, Counter[str]()
        for plane, arrays in chain.from_iterable(layout(layer).handles.items() for layer in layers):
            planes[plane] += sum(array.nbytes for array in arrays if array is not None)
        numel, known = sum(layer.numel for layer in layers), self._calibrated
        return {
            "rank": self.trainer.rank,
            "numels": [layer.numel for layer in layers],
            "update_bytes": (2 * planes.total() - planes["grads"]) / numel,
            "cpu_update_s": known.cpu_update_s,
            "to_host_s": None if known.d2h_s is None else known.d2h_s * numel / planes["grads"],
            "to_device_s": None if known.h2d_s is None else known.h2d_s * numel / planes["weights"],
        }

    def command(self, name: str, value: str) -> tuple[m.CommandReply, list[Command]]:
        """Give the trainer's planning a command."""
        assert self.planning is not None, "the seat is taken"
        reply, commands = self.planning.command(name, value)
        return reply, [*commands, *self._keep(self.planning.wishes.kept)] if reply.ok else commands

    def _keep(self, wishes: Mapping[str, Any] | None) -> list[Command]:
        changed, self.wishes = wishes != self.wishes, wishes
        return [Keep(self.trainer.rank, wishes)] if changed else []

    def _on_run(self, planning: Planning, message: m.Message, sender: Address, now_s: float) -> list[Command]:
        match message:
            case m.Calibration():
                return planning.on_calibration(sender, message)
            case m.PositionsLearned(positions=positions):
                planning.on_positions(positions)
            case m.PlanAck():
                return planning.on_ack(sender, message)
            case m.PlanApplied():
                return planning.on_applied(message)
            case m.Command(name=name, value=value):
                reply, commands = self.command(name, value)
                return [Note(f"{sender} asks: {reply.text}"), *commands]
            case m.Evicted():
                return planning.on_evicted(message)
            case m.OptimizerReport():
                planning.measured.on_optimizer(message)
            case m.Verdict():
                planning.mode.on_verdict(message)
            case m.TrainerReport():
                self.saves = message.saves
                record = {**planning.record(message), **self.gauges}
                if message.measured is not None:
                    self._measured(message, message.measured)
                is_late = now_s - message.at_s > LATE_S
                return [*self.records.add(record), *planning.on_trainer(message, is_late=is_late)]
            case m.Log():
                return [*self.records.log(message)]
            case _:
                return [Note(f"{type(message).__name__} from {sender} is not for the coordinator: dropped")]
        return []

    def _measured(self, report: m.TrainerReport, step: int) -> None:
        times = {"stall_s": report.stall_s}
        if report.gather_s is not None:
            times["gather_s"] = report.gather_s
            if step >= WARM_UP_STEPS:
                self._gathers_s.append(report.gather_s)
        self.records.measured(report.number - report.step + step, **times)

    def status(self, host: str, cores: str) -> m.RankStatus | None:
        """This rank among the others of its job; None if it is the only one. `cores` are its optimizer's."""
        if self.planning is None or self.planning.table.world == 1:
            return None
        table = self.planning.table
        gather_s = sum(self._gathers_s) / len(self._gathers_s) if self._gathers_s else None
        return m.RankStatus(
            rank=table.rank,
            world=table.world,
            host=host,
            record=shown(self.records.newest, SHOWN_BYTES // self.planning.table.world),
            cores=cores,
            gather_s=gather_s,
        )

    @property
    def recorded_s(self) -> float | None:
        """The `at_s` of the newest report that is recorded; None if there is none."""
        at_s = json.loads(self.records.newest).get("at_s")
        return None if at_s is None else float(at_s)

    @property
    def stays(self) -> bool:
        """Whether neither the trainer nor its optimizer has ended the session."""
        return not self._farewells

    def ends(self, role: str) -> bool:
        """The trainer or its optimizer has ended the session. Returns whether both have; then the seat is free."""
        if self.planning is None:
            return False
        self._farewells.add(role)
        if self._farewells != {"trainer", "optimizer"}:
            return False
        self._farewells.clear()
        self._before, self.planning = self.planning, None
        self._calibrated = m.Calibration()
        return True


class Fleet:
    """The seats by rank. A seat is created by the first message of its rank."""

    def __init__(self, *, replan_every: int, recall: Recall) -> None:
        self._replan_every, self._recall = replan_every, recall
        self._seats: dict[int, TrainerSeat] = {}

    def seat(self, rank: int) -> TrainerSeat:
        if rank not in self._seats:
            self._seats[rank] = TrainerSeat(rank, replan_every=self._replan_every, recall=self._recall)
        return self._seats[rank]

    @property
    def seats(self) -> list[TrainerSeat]:
        """All seats, by rank."""
        return [seat for _, seat in sorted(self._seats.items())]

    @property
    def taken(self) -> list[TrainerSeat]:
        """The seats that have a trainer with layers, by rank."""
        return [seat for seat in self.seats if seat.planning is not None]

    @property
    def shown(self) -> TrainerSeat:
        """The seat that a status shows: the first one with a trainer."""
        return next(iter(self.taken), self.seat(0))

    def check(self) -> None:
        for seat in self.taken:
            assert seat.planning is not None
            seat.planning.check()
