"""Plans one trainer's run: measurements in, plans out; no clock, no I/O. A `TrainerSeat` calls it.

planning.py   measurements and agreements in, plans out   commands.py   what the user has asked for
measured.py   what was measured of steps                  mode.py       whether the CPU updates ahead of verdicts
room.py       what layers take, and what there is         tried.py      how long steps were with other shares
"""
