"""Frames to fuzz with, drawn from a seeded generator: valid messages with plausible fields, and damaged ones.

    Maker.message ─▶ any message of the protocol, in range, with fields such as those of a run with `layers` layers
    Maker.frame   ─▶ a message as bytes, or bytes that were one: bits flipped, cut, spliced, fields exchanged

A fuzzer that only knows the types spends its time on messages that every receiver rejects at their first field. So
numbers are drawn near those of a running job: its layers, its ranks, its current step.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections.abc import Callable
from typing import Any, Final

import msgpack

from protocol import codec
from protocol import messages as m
from protocol.address import ROLES, Address
from protocol.placement import PLACEMENTS, Places

KINDS: Final[tuple[type[m.Message], ...]] = tuple(codec.MESSAGES.values())
EDGES: Final = (0, 1, 2, 3, 7, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1)
#: Values of every type that msgpack knows, and of none that a field has.
ODD: Final = (None, True, False, -1, 0, 1, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), -0.0, "", "x" * 300)
ODD_BYTES: Final = (b"", b"\xff", msgpack.ExtType(1, b"x"), msgpack.Timestamp(1, 2), {"a": 1}, {1: 2}, [], [[]], [0])


class Maker:
    """Draws from `drawn`. A caller may set `step`, the run's current step, and `inbox`, its own name."""

    def __init__(self, drawn: random.Random, *, token: str, layers: int = 5, ranks: int = 1) -> None:
        self.drawn, self.token, self.layers, self.ranks = drawn, token, layers, ranks
        self.step, self.inbox = 0, "trainer-0-1f"
        self._kept: list[bytes] = []

    # ------------------------------------------------------------ messages

    def address(self) -> Address:
        rank = self.drawn.randrange(self.ranks + 1) if self.drawn.random() < 0.95 else self.drawn.choice(EDGES)
        return Address(self.drawn.choice(ROLES), rank)

    def message(self, kind: type[m.Message] | None = None) -> m.Message:
        """A message of this kind, or of any, that its class accepts."""
        kind = kind or self.drawn.choice(KINDS)
        while True:
            try:
                return typing.cast(m.Message, self._instance(kind))
            except ValueError:
                continue  # out of range: drawn again

    def _instance(self, kind: type) -> Any:
        hints = typing.get_type_hints(kind, vars(m))
        values = {field.name: self._field(field.name, hints[field.name]) for field in dataclasses.fields(kind)}
        if kind is m.LayerTable and self.drawn.random() < 0.9:
            values |= {"awaits_verdict": True, "threads": None, "rank": 0, "world": self.drawn.choice([1, 1, 2])}
        if kind is m.Rejoin:
            layers = len(values["table"].layers)
            now, then = (Places(tuple(self.drawn.choices([*PLACEMENTS], k=layers))) for _ in range(2))
            values |= {"places": now, "plan": dataclasses.replace(values["plan"], places=then)}
        return kind(**values)

    def _field(self, name: str, hint: Any) -> Any:
        drawn = self.drawn
        known: dict[str, Callable[[], Any]] = {
            "step": self._near_step,
            "number": self._near_step,
            "lid": lambda: drawn.randrange(self.layers + 1),
            "plan_id": lambda: drawn.randrange(8),
            "inbox": lambda: drawn.choice(["trainer-0", "optimizer-0", "x-1f", self.inbox, self.inbox]),
            "host": lambda: drawn.choice(["127.0.0.1", "::1", "10.1.2.3"]),
            "objective": lambda: drawn.choice(m.OBJECTIVES),
            "policy": lambda: drawn.choice(m.POLICIES),
            "backend": lambda: drawn.choice(["auto", "native", "torch", "other"]),
            "names": lambda: tuple(drawn.choices([*PLACEMENTS], k=self._length())),
            "banks": lambda: tuple(drawn.choices([0, 1], k=drawn.randrange(4))),
            "counts": lambda: tuple(drawn.choices([0, 1, self.step, self.step + 1], k=drawn.randint(1, 3))),
            "positions": lambda: tuple(drawn.sample(range(n := self._length()), n)),
            "layers": lambda: self._layers() if hint == tuple[m.Layer, ...] else self._times(),
            "name": lambda: drawn.choice(["k", "threads", "policy", "objective", "other", ""]),
            "value": lambda: drawn.choice(["0.5", "auto", "1", "2", "random", "deadline", "speed", "-1", "nan", ""]),
            "threads": lambda: drawn.choice([None, 1, 2, drawn.choice(EDGES)]),
            "coordinator_pid": lambda: 2**22 + 1,
            "pid": lambda: drawn.choice([2**22 + 1, drawn.choice(EDGES)]),  # above the largest PID: nobody's
        }
        if name in known and not (name == "threads" and hint is int):
            return known[name]()
        return self._value(hint)

    def _near_step(self) -> int:
        """A step that a run can reach: beyond 2**62, what is counted from it would not fit a message."""
        near = max(0, self.step + self.drawn.randint(-3, 3))
        return near if self.drawn.random() < 0.9 else self.drawn.choice(EDGES) % 2**62

    def _length(self) -> int:
        return self.layers if self.drawn.random() < 0.8 else self.drawn.randrange(self.layers + 3)

    def _times(self) -> tuple[m.LayerTimes, ...]:
        return tuple(self._instance(m.LayerTimes) for _ in range(self._length()))

    def _layers(self) -> tuple[m.Layer, ...]:
        positions = self.drawn.sample(range(count := max(1, self._length())), count)
        segments = [tuple(self._segment() for _ in range(self.drawn.randint(1, 3))) for _ in positions]
        return tuple(
            m.Layer(lid=lid, position=position, name=f"layer {lid}", segments=segments[lid])
            for lid, position in enumerate(positions)
        )

    def _segment(self) -> m.Segment:
        dtype = self.drawn.choice([*m.GRADS_DTYPES])
        gradients = self.drawn.choice(m.GRADS_DTYPES[dtype])
        numel = self.drawn.choice([1, 64, 4096, 2**32])
        state = {"state_dtype": self.drawn.choice(m.STATE_DTYPES), "key": self.drawn.randrange(1 << 32)}
        if dtype == "bfloat16":
            state["master_dtype"] = self.drawn.choice(m.MASTER_DTYPES)
        group = self.drawn.randrange(2)
        return m.Segment(name="weight", numel=numel, dtype=dtype, grads_dtype=gradients, group=group, **state)

    def _value(self, hint: Any) -> Any:
        drawn, origin, arguments = self.drawn, typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            return tuple(self._value(arguments[0]) for _ in range(drawn.randrange(4)))
        if origin in (types.UnionType, typing.Union):
            return None if drawn.random() < 0.3 else self._value(arguments[0])
        if origin is dict:
            return {
                drawn.choice(["loss", "lr", "step", ""]): self._value(arguments[1]) for _ in range(drawn.randrange(3))
            }
        if hint is Address:
            return self.address()
        if dataclasses.is_dataclass(hint):
            return self._instance(typing.cast(type, hint))
        if hint is int:
            return drawn.randrange(10) if drawn.random() < 0.7 else drawn.choice(EDGES)
        if hint is float:
            return drawn.random() if drawn.random() < 0.8 else drawn.choice([0.0, 1.0, -1.0, 1e-9, 1e300, float("nan")])
        return drawn.random() < 0.5 if hint is bool else drawn.choice(["", "word", "ä\ud800"[:1], "x" * 200])

    # ------------------------------------------------------------ frames

    def valid(self, kind: type[m.Message] | None = None) -> bytes:
        """A message as this run's processes send it."""
        seq = self.drawn.choice(EDGES)
        return codec.encode(self.message(kind), token=self.token, sender=self.address(), seq=seq)

    def frame(self) -> bytes:
        """A message of this run, or what one becomes by damage."""
        if len(self._kept) < 256 or self.drawn.random() < 0.05:
            self._kept.append(self.valid())
            if len(self._kept) > 1024:
                del self._kept[self.drawn.randrange(len(self._kept))]
        frame = self.drawn.choice(self._kept)
        for _ in range(self.drawn.choice([0, 1, 1, 1, 2, 4])):
            frame = self.drawn.choice(DAMAGES)(self, frame)
        return frame

    def _flip(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        if changed:
            changed[self.drawn.randrange(len(changed))] ^= 1 << self.drawn.randrange(8)
        return bytes(changed)

    def _cut(self, frame: bytes) -> bytes:
        start, stop = sorted(self.drawn.randrange(len(frame) + 1) for _ in range(2))
        return frame[:start] + frame[stop:]

    def _insert(self, frame: bytes) -> bytes:
        at = self.drawn.randrange(len(frame) + 1)
        return frame[:at] + self.drawn.randbytes(self.drawn.randrange(9)) + frame[at:]

    def _splice(self, frame: bytes) -> bytes:
        other = self.drawn.choice(self._kept)
        return frame[: self.drawn.randrange(len(frame) + 1)] + other[self.drawn.randrange(len(other) + 1) :]

    def _exchange(self, frame: bytes) -> bytes:
        """Well-formed msgpack with another value in the place of one, at any depth."""
        try:
            parts = msgpack.unpackb(frame)
        except (ValueError, msgpack.exceptions.UnpackException):
            return self._flip(frame)
        if not isinstance(parts, list) or not parts:
            return self._flip(frame)
        inside = parts
        while (below := [part for part in inside if isinstance(part, list) and part]) and self.drawn.random() < 0.7:
            inside = self.drawn.choice(below)
        at = self.drawn.randrange(len(inside))
        match self.drawn.randrange(4):
            case 0:
                del inside[at]
            case 1:
                inside.insert(at, self.drawn.choice(inside))
            case _:
                inside[at] = self.drawn.choice([*ODD, *ODD_BYTES, self.drawn.choice(KINDS).__name__])
        try:
            return typing.cast(bytes, msgpack.packb(parts))
        except (ValueError, OverflowError):
            return self._flip(frame)

    def _deepen(self, frame: bytes) -> bytes:
        return bytes([0x91]) * self.drawn.choice([1, 100, 600, 5000]) + frame


DAMAGES: Final = (Maker._flip, Maker._cut, Maker._insert, Maker._splice, *[Maker._exchange] * 4, Maker._deepen)
