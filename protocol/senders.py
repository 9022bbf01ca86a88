"""Who may send which message, and over which connection. A receiver drops everything else.

    a monitor ── Command ──▶ coordinator        allowed
    a monitor ── GradReady ─▶ optimizer         dropped: only a trainer sends it

A connection has the name of its sender's address, perhaps with a suffix that makes it unique: `trainer-0-1f2e3d4c`.
"""

from __future__ import annotations

from typing import Final

from protocol import messages as m
from protocol.address import Address

#: The messages of each role. Those that several roles send are in each of their lines.
BY_ROLE: Final[dict[str, tuple[type[m.Message], ...]]] = {
    "trainer": (
        *(m.Hello, m.Ready, m.Calibration, m.PlanAck, m.Pong, m.Failure, m.Goodbye),
        *(m.LayerTable, m.PositionsLearned, m.StepBegin, m.GradReady, m.Verdict, m.TrainerReport, m.Log),
        *(m.PlanApplied, m.AllocatePlanes, m.ReleasePlanes, m.TakeOver, m.Counted, m.GiveUp),
        *(m.Rejoin, m.TraceSteps, m.Traced, m.NodeStatus),
    ),
    "optimizer": (
        *(m.Hello, m.Ready, m.Calibration, m.PlanAck, m.Pong, m.Failure, m.Goodbye),
        *(m.PlanesReady, m.PlanesRefused, m.WeightsReady, m.OptimizerReport, m.Traced),
    ),
    "coordinator": (
        *(m.Welcome, m.LayerTable, m.Plan, m.Reassign, m.SetThreads, m.SetMode, m.TraceNext, m.SaveCheckpoint),
        *(m.Introduce, m.Ping, m.Status, m.CommandReply),
        m.Goodbye,  # in the place of a trainer that is gone
    ),
    "monitor": (m.StatusRequest, m.Command),
}


def is_named_after(address: Address, connection: str) -> bool:
    """Whether a connection's name is that of a process with this address."""
    return connection == str(address) or connection.startswith(f"{address}-")


def may_send(role: str, message: m.Message) -> bool:
    return type(message) in BY_ROLE.get(role, ())
