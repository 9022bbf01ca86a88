"""Memory, streams and links of a run in one thread: what the parties of `interleaving_model` share.

A tile of memory holds the number of the step that wrote it, so that whoever reads a tile can tell if it is the right
one; `require` raises `Violation` if it is not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from memory_network import MemoryNetwork

from protocol import messages as m
from protocol.address import Address

TILE = 128
NEVER = -1
#: What memory holds before anything was copied into it.
BLANK = -2
#: What an update leaves that was made ahead of another verdict.
WRONG = -3


class Violation(AssertionError):
    """An invariant does not hold."""


def require(condition: bool, invariant: str) -> None:
    if not condition:
        raise Violation(invariant)


# ---------------------------------------------------------------- memory and streams


@dataclass
class Arena:
    """A layer's planes in host memory, a step number for each tile; weights and master in two banks. `unread` is the
    gradient that the optimizer has not finished with, `written` the update that is writing the weights. `master` is
    None while it is the GPU's, and `closed` says that the trainer has given the arena up."""

    grads: list[int]
    weights: list[list[int]]
    master: list[list[int]] | None
    unread: int | None = None
    written: int | None = None
    closed: bool = False


class Memory:
    """One layer's memory. `produced` is the step of the last gradient of each tile: what the next forward must see."""

    def __init__(self, spec: m.Layer) -> None:
        self.tiles = [
            (index, start) for index, segment in enumerate(spec.segments) for start in range(0, segment.numel, TILE)
        ]
        self.weights = [NEVER] * len(self.tiles)
        self.master: list[int] | None = [NEVER] * len(self.tiles)
        self.produced = [NEVER] * len(self.tiles)
        self.before: dict[int, tuple[int, ...]] = {}

    def changed(self, counts: tuple[int, ...]) -> list[int]:
        """The tiles of the segments that have a gradient."""
        return [tile for tile, (segment, _) in enumerate(self.tiles) if counts[segment]]

    def arena(self) -> Arena:
        return Arena(self.blank(), self.blank_banks(), None)

    def blank_banks(self) -> list[list[int]]:
        return [self.blank(), self.blank()]

    def bank(self, banks: tuple[int, ...], tile: int) -> int:
        """The bank that holds a tile, of those that hold its layer's segments."""
        return banks[self.tiles[tile][0]]

    def blank(self) -> list[int]:
        return [BLANK] * len(self.tiles)


class Mark:
    """A point in a stream: a CUDA event."""

    def __init__(self) -> None:
        self.passed = False

    def set(self) -> None:
        self.passed = True


class Stream:
    """Operations in order; one that waits for another stream's mark holds up those behind it."""

    def __init__(self) -> None:
        self._operations: deque[tuple[Mark | None, Callable[[], None] | None]] = deque()

    def run(self, operation: Callable[[], None]) -> None:
        self._operations.append((None, operation))

    def wait(self, mark: Mark) -> None:
        self._operations.append((mark, None))

    def mark(self) -> Mark:
        mark = Mark()
        self.run(mark.set)
        return mark

    def ready(self) -> bool:
        if not self._operations:
            return False
        mark, _ = self._operations[0]
        return mark is None or mark.passed

    def act(self) -> None:
        _, operation = self._operations.popleft()
        if operation is not None:
            operation()


# ---------------------------------------------------------------- the run


@dataclass
class Job:
    to: str
    message: m.Message
    after: Mark | None = None
    before_sending: Callable[[], object] = lambda: None


@dataclass
class World:
    """What everybody shares, and the record of who did what."""

    table: m.LayerTable
    rng: random.Random
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    memories: list[Memory] = field(default_factory=list)
    descriptors: deque[tuple[int, Arena]] = field(default_factory=deque)
    accepted: dict[int, set[str]] = field(default_factory=dict)
    verdicts: dict[int, m.Verdict] = field(default_factory=dict)
    undone: int = 0
    backward: int = NEVER
    handing: set[int] = field(default_factory=set)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    moved: int = 0
    postponed: int = 0

    def __post_init__(self) -> None:
        self.memories = [Memory(layer) for layer in self.table.layers]

    def send(self, sender: str, to: str, message: m.Message) -> None:
        self.tell(f"{sender} → {to}: {message}")
        self.network.send(Address(sender, 0), f"{to} from {sender}", message)

    def take(self, at: str, sender: str) -> m.Message:
        incoming = self.network.try_receive(f"{at} from {sender}")
        assert incoming is not None
        self.tell(f"{at} takes {type(incoming.message).__name__} from {sender}")
        return incoming.message

    def waits(self, at: str, sender: str) -> bool:
        return bool(self.network.pending([f"{at} from {sender}"]))

    def tell(self, what: str) -> None:
        self.story.append(what)


def random_table(rng: random.Random, layers: int) -> m.LayerTable:
    def segment(index: int) -> m.Segment:
        return m.Segment(
            name=f"s{index}", numel=TILE * rng.randint(1, 2), dtype="bfloat16", grads_dtype="bfloat16", group=0
        )

    return m.LayerTable(
        layers=tuple(
            m.Layer(
                lid=lid, position=lid, name=f"layer {lid}", segments=tuple(segment(i) for i in range(rng.randint(1, 2)))
            )
            for lid in range(layers)
        ),
        inbox="trainer-0",
        device="cpu",
        policy="random",
        objective="speed",
        awaits_verdict=True,
        speculate=None,
        k=None,
        backend="auto",
        gpu_bytes=None,
        host_bytes=None,
        continues=False,
    )
