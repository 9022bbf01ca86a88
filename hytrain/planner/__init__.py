"""Where each layer is updated: measurements in, a decision out; no clock, no I/O.

trainer, optimizer                coordinator, at a step boundary
measured times ──▶ MeasurementBook ──profile()──▶ decide() ──▶ Decision ──▶ plan
                    (profile.py)                   │  (policies.py)
                                     formulas.py ◀─┤  a first guess
                                     simulate.py ◀─┘  the predicted step
"""

from __future__ import annotations

from hytrain.planner.formulas import balance_k, cotrain_k, deadline_k, prefix_for, twin_flow_k
from hytrain.planner.ladder import Infeasible
from hytrain.planner.policies import POLICIES, Decision, decide
from hytrain.planner.profile import (
    Ewma,
    LayerFacts,
    LayerProfile,
    Limits,
    MeasurementBook,
    Profile,
    Rates,
)
from hytrain.planner.simulate import Event, Timeline, simulate

__all__ = [
    "POLICIES",
    "Decision",
    "Event",
    "Ewma",
    "Infeasible",
    "LayerFacts",
    "LayerProfile",
    "Limits",
    "MeasurementBook",
    "Profile",
    "Rates",
    "Timeline",
    "balance_k",
    "cotrain_k",
    "deadline_k",
    "decide",
    "prefix_for",
    "simulate",
    "twin_flow_k",
]
