"""The language HyTrain's processes speak: messages, their encoding, tensor handles, handshake, channels.

Owns everything that crosses a process boundary, and nothing else: no torch, no decisions.
"""

from __future__ import annotations

#: Tells this package from a user's own module of the same name.
HYTRAIN = True
