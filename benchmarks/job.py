"""What is measured: a job is one system in one process, and the segments that this process works through.

    suite ── Job as JSON ──▶ benchmarks.step ── a row for each Segment ──▶ suite

Building a model takes longer than twenty steps of it. So one process measures several batch sizes, several k or
several policies one after the other: before a segment it sends the segment's commands to the coordinator, as
`hytrain-monitor` does, and lets the steps settle.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

#: hidden, intermediate, layers, heads, vocabulary
SHAPES: Final = {
    "demo": (176, 480, 5, 4, 256),
    "tiny": (256, 688, 4, 4, 2048),
    "1b": (2048, 5632, 22, 16, 32000),
    "3b": (3200, 8640, 26, 32, 32000),
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of one kind: `settle` that are only noted, then `measure` that count.

    `patience` more steps are given to settling while layers still move. `label` tells this segment from others of the
    same system and batch. `profile` looks at the GPU's kernels during the measured steps; `digest` sums up the weights
    after them.
    """

    batch: int
    label: str = ""
    settle: int = 4
    measure: int = 8
    patience: int = 0
    commands: tuple[tuple[str, str], ...] = ()
    profile: bool = False
    digest: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One system, e.g. "deepspeed-zero2" or "hytrain:auto", and its segments. `start_s` and `step_s` are guesses."""

    system: str
    segments: tuple[Segment, ...]
    shape: str = "3b"
    sequence: int = 1024
    device: str = "cuda"
    dtype: str = "bfloat16"
    clip: float = 0.0
    threads: int | None = None
    deterministic: bool = False
    start_s: float = 15.0
    step_s: float = 0.6

    @property
    def expected_s(self) -> float:
        """How long it is thought to take, the process's start included; a step costs as its batch."""
        costs = [self.step_s * max(s.batch / 8, 0.25) * (s.settle + s.measure) for s in self.segments]
        return self.start_s + sum(costs)

    def key(self, segment: Segment) -> tuple[object, ...]:
        """What says that two rows are repeats of each other, if one machine and one commit made them."""
        return (self.system, self.shape, segment.batch, self.sequence, self.dtype, self.clip, segment.label)

    def only(self, batches: Collection[int]) -> Self:
        """The job without segments of other batch sizes."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.batch in batches))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        segments = []
        for given in fields.pop("segments"):
            commands = tuple((name, value) for name, value in given.pop("commands"))
            segments.append(Segment(**given, commands=commands))
        return cls(segments=tuple(segments), **fields)
