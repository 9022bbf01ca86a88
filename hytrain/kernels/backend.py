"""The interface of the backends that update on host memory. `choice` selects one.

It takes addresses instead of tensors, because a process with the native backend does not import torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from hytrain.kernels.scalars import Scalars
from protocol.messages import STATE_DTYPES, Segment

# The (weights, gradients) that every backend supports.
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("float32", "bfloat16"))
# Those of Muon's passes: the first one writes a direction in place of weights, the last one reads it in bfloat16.
PASS_DTYPES: Final = {
    "muon": tuple(("float32", grads) for grads in ("bfloat16", "float16", "float32")),
    "muon_step": tuple((weights, "bfloat16") for weights in ("bfloat16", "float16", "float32")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Into:
    """Addresses of the planes that an update writes, if they are not those that it reads."""

    weights: int
    remainder: int
    moments: tuple[int, ...]


class Elements(NamedTuple):
    """Which elements an update is of, so that they are rounded in the same way wherever that happens.

    `key` stands for the parameter: 32 bits. `first` is the index of the first one in it, in storage order. With both,
    random bits are found.

    torch's AdamW computes in vectors. The elements from index `tail` on, which fill no vector, it computes one by one,
    and its compiler fuses another multiplication there. On processors where torch `fuses` none, all rules round more.
    """

    key: int = 0
    first: int = 0
    tail: int = 1 << 62
    fuses: bool = True

    @classmethod
    def of(cls, segment: Segment, start: int) -> Elements:
        """Those of a segment from its element `start` on. Pieces are whole vectors, except for a parameter's last."""
        end = segment.start + segment.numel
        return cls(segment.key, segment.start + start, end - end % segment.lanes, segment.fuses)

    def in_vectors(self, numel: int) -> int:
        """How many of the first `numel` elements come before the tail."""
        return min(max(self.tail - self.first, 0), numel)


FIRST: Final = Elements()


@lru_cache(maxsize=1 << 14)  # all tiles of a segment share them
def seeds(key: int, step: int) -> tuple[int, int]:
    """Two words of 32 bits, for the random bits with which a parameter's update number `step` is rounded."""
    digest = blake2b(struct.pack("<IQ", key, step), digest_size=8).digest()
    before, within = struct.unpack("<II", digest)
    return before, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What an update is of: the addresses of `numel` consecutive elements in the planes of one segment.

    `remainder` is int16 for bfloat16 weights, or 0 if they are their own masters. For float16 weights, which are only
    written, it is their float32 master; for float32 weights it is 0. `moments` are those of
    `MOMENTS[scalars.hyper.rule]`, of `state_dtype`.
    """

    weights: int
    grads: int
    remainder: int
    moments: tuple[int, ...]
    numel: int
    weights_dtype: str
    grads_dtype: str
    scalars: Scalars
    into: Into | None = None
    state_dtype: str = "float32"
    elements: Elements = FIRST


class Backend(Protocol):
    """Updates of planes in this process's memory. `threads` may be set between two calls.

    `float_mode` is that of the thread which calls, and so that of its updates. It is the sum of 1, if results that are
    denormal become 0, of 2, if such operands do, and of 4 times the rounding: to the nearest, down, up, to 0.
    """

    threads: int
    float_mode: int

    @property
    def name(self) -> str: ...

    def update(self, of: Operands) -> None:
        """Update consecutive elements of one segment: in place, or into other planes with the same bits.

        Raises ValueError for dtypes that are not in `DTYPES` and `STATE_DTYPES`.
        """


def check_dtypes(
    weights_dtype: str, grads_dtype: str, remainder: int, state_dtype: str = "float32", kernel: str = ""
) -> None:
    """Raise ValueError unless the planes fit together and this kernel takes them."""
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"moments are {', '.join(STATE_DTYPES)}, not {state_dtype}")
    if (weights_dtype, grads_dtype) not in PASS_DTYPES.get(kernel, DTYPES):
        raise ValueError(f"no update for {weights_dtype} weights with {grads_dtype} gradients")
    if weights_dtype != "bfloat16" and (remainder != 0) != (weights_dtype == "float16"):
        raise ValueError(f"a remainder belongs to 16-bit weights, and only to them: these are {weights_dtype}")
