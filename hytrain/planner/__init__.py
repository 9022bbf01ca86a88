"""Decides where each layer is updated: measurements go in, a decision comes out. No clock, no I/O.

trainer, optimizer                coordinator, at a step boundary
measured times ──▶ MeasurementBook ──profile()──▶ decide() ──▶ Decision ──▶ plan
                    (book.py)                      │  (policies.py, deadline.py)
sizes, limits ─▶ first_lids() ─▶ the first plan    │
                                       ladder.py ◀─┤  what fits, and the search in it
                                     simulate.py ◀─┘  the predicted step
now, then, room ─▶ first_part(): what moves first (moves.py)
"""
