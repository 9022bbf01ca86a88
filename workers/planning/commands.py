"""What the user wants of plans: at the start, and by commands that a monitor sends."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from hytrain.readable import size
from protocol import messages as m

MAX_THREADS: Final = 9999


class Wishes:
    """`k`: None where it is to be chosen. `threads`: None until they are commanded.

    `limits`: bytes of memory, by name, once they are commanded; None is all that is free.
    """

    def __init__(self, table: m.LayerTable) -> None:
        self._table = table
        self.policy, self.k, self.objective = table.policy, table.k, table.objective
        self.threads: int | None = None
        self.limits: dict[str, int | None] = {}

    @property
    def kept(self) -> dict[str, Any]:
        """All of them, for `take`: by another coordinator, or for layers with which the same training goes on."""
        return {name: value for name, value in vars(self).items() if name != "_table"}

    def take(self, kept: Mapping[str, Any]) -> None:
        vars(self).update(kept)

    @property
    def are_found(self) -> bool:
        """Whether plans follow measurements: nothing else has to be found out."""
        return self.policy == "deadline" and self.k is None

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """The shares of visits and of offloaded weights; None if they are to be chosen."""
        if self.policy == "deadline" and self._table.visit is None:
            return None, self._table.offload_weights
        return self._table.visit or 0.0 if self.policy == "fixed" else 0.0, self._table.offload_weights

    def set(self, name: str, value: str) -> None:
        """Carry out one of `COMMANDS`. ValueError, which says what to do, if it cannot be; then nothing has changed."""
        if name not in COMMANDS:
            raise ValueError(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
        COMMANDS[name](self, value)

    def _set_k(self, value: str) -> None:
        if value == "auto":
            self.k, self.policy = None, "deadline" if self.policy == "fixed" else self.policy
            return
        try:
            k = float(value)
        except ValueError:
            k = math.nan
        if not 0.0 <= k <= 1.0:
            raise ValueError(f'k is {value!r}: give a number in [0, 1], or "auto"')
        self.k, self.policy = k, "fixed"

    def _set_policy(self, value: str) -> None:
        if value not in m.POLICIES:
            raise ValueError(f"policy {value!r} is unknown; known: {', '.join(m.POLICIES)}")
        if value == "fixed" and self.k is None:
            raise ValueError('policy "fixed" needs a k: set k instead, as in k=0.3')
        self.policy, self.k = value, self.k if value == "fixed" else None

    def _set_objective(self, value: str) -> None:
        if value not in m.OBJECTIVES:
            raise ValueError(f"objective {value!r} is unknown; known: {', '.join(m.OBJECTIVES)}")
        self.objective = value

    def _set_threads(self, value: str) -> None:
        if not value.isdecimal() or len(value) > len(str(MAX_THREADS)) or int(value) < 1:
            raise ValueError(f"threads is {value!r}: give a number from 1 to {MAX_THREADS}")
        self.threads = int(value)

    def _limit(self, value: str, *, name: str, or_none: bool = False) -> None:
        try:
            nbytes = None if or_none and value == "none" else int(value) if value.isdecimal() else size(value)
        except ValueError:
            nbytes = -1
        if nbytes is not None and not 0 <= nbytes <= sys.maxsize:
            other = ', or "none"' * or_none
            raise ValueError(f"{name} is {value!r}: give bytes, as in 24GiB{other}")
        self.limits = {**self.limits, name: nbytes}


#: The commands that a monitor may send.
COMMANDS: Final[dict[str, Callable[[Wishes, str], None]]] = {
    "k": Wishes._set_k,
    "policy": Wishes._set_policy,
    "objective": Wishes._set_objective,
    "threads": Wishes._set_threads,
    "gpu_memory_limit": partial(Wishes._limit, name="gpu_memory_limit", or_none=True),
    "host_memory_limit": partial(Wishes._limit, name="host_memory_limit"),
}
