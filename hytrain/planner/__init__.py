"""Decides where each layer is updated: measurements go in, a decision comes out. No clock, no I/O.

trainer, optimizer                coordinator, at a step boundary
measured times ──▶ MeasurementBook ──profile()──▶ decide() ──▶ Decision ──▶ plan
                    (book.py)                      │  (policies.py, deadline.py)
sizes, limits ─▶ first_lids() ─▶ the first plan    │
                                       ladder.py ◀─┤  what fits, and the search in it
                                     simulate.py ◀─┘  the predicted step
now, then, room ─▶ first_part(): what moves first (moves.py)
"""

from __future__ import annotations

from hytrain.planner.book import Ewma, MeasurementBook, Rates
from hytrain.planner.contention import ENOUGH_STEPS, REMEMBERED_STEPS, Crowding
from hytrain.planner.ladder import SAME_SPEED, Infeasible, balance_k, prefix_for
from hytrain.planner.moves import first_part
from hytrain.planner.policies import Decision, Shares, decide, drawn_offloads, drawn_visits, first_lids, mixed
from hytrain.planner.profile import LayerFacts, LayerProfile, Limits, Order, Profile
from hytrain.planner.simulate import Event, Timeline, simulate

__all__ = [
    "ENOUGH_STEPS",
    "REMEMBERED_STEPS",
    "SAME_SPEED",
    "Crowding",
    "Decision",
    "Event",
    "Ewma",
    "Infeasible",
    "LayerFacts",
    "LayerProfile",
    "Limits",
    "MeasurementBook",
    "Order",
    "Profile",
    "Rates",
    "Shares",
    "Timeline",
    "balance_k",
    "decide",
    "drawn_offloads",
    "drawn_visits",
    "first_lids",
    "first_part",
    "mixed",
    "prefix_for",
    "simulate",
]
