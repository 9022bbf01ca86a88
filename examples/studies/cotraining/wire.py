"""What trainer and CPU trainer tell each other over a socket of their own, as JSON.

trainer ── LendMemory, WeightsAt, TakeBack, Compute ──▶ CPU trainer
trainer ◀── Ready, Computed, Failed ─────────────────── CPU trainer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

#: More than the kernel takes in one datagram.
MAX_DATAGRAM_BYTES: Final = 1 << 20
#: The memories that the CPU trainer is started with: the last one has buffers and frozen parameters. Those that are
#: lent have further numbers.
GRADIENTS, INPUTS, OTHERS = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LendMemory:
    """With a descriptor (SCM_RIGHTS): map so many bytes of it, and call it `memory`."""

    memory: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAt:
    """The weights of `parameters` begin at `offsets`, in bytes, of this memory."""

    memory: int
    parameters: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """No parameter's weights are in this memory any more. Unmap it."""

    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run forward and backward of one part of a batch: a micro-batch, or one of each rank.

    `micro_batches` has for each the byte of the memory for inputs at which it begins, its bytes of JSON, and its seed
    of torch. The mean of their gradients goes to slot `slot`. `numerics` are torch's settings, as JSON. `job` numbers
    the orders.
    """

    job: int
    slot: int
    micro_batches: Sequence[tuple[int, int, int]]
    numerics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The CPU trainer has built the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The losses of the part's micro-batches, which parameters have a gradient in its slot, and how long it took."""

    job: int
    losses: Sequence[float]
    has_gradient: Sequence[bool]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The CPU trainer cannot go on."""

    error: str


Message = LendMemory | WeightsAt | TakeBack | Compute | Ready | Computed | Failed
_KINDS: Final = {kind.__name__: kind for kind in (LendMemory, WeightsAt, TakeBack, Compute, Ready, Computed, Failed)}


def written(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def read(frame: bytes) -> Message:
    """What `written` has made. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    name, fields = json.loads(frame)
    return _KINDS[name](**fields)
