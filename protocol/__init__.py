"""Everything that crosses a process boundary: messages, their encoding, tensor handles, channels.

It imports no torch and makes no decisions.
"""

from __future__ import annotations

#: Distinguishes this package from a user's own module of the same name.
HYTRAIN = True
