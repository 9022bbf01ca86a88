"""Plans one trainer's run: measurements in, plans out; no clock, no I/O. A `TrainerSeat` calls it.

planning.py   measurements and agreements in, plans out   commands.py   what the user has asked for
measured.py   what was measured of steps                  mode.py       whether the CPU updates ahead of verdicts
room.py       what memory there is for placements         tried.py      how long steps were with other shares
facts.py      what is known of layers before any step     plane_bytes.py   what layers take, for those who watch
"""

from __future__ import annotations

from workers.planning.facts import facts, sizes_of
from workers.planning.measured import WARM_UP_STEPS
from workers.planning.planning import BESIDE_TRAINING, HORIZON_STEPS, Planning

__all__ = ["BESIDE_TRAINING", "HORIZON_STEPS", "WARM_UP_STEPS", "Planning", "facts", "sizes_of"]
