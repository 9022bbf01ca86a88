"""What a run's folder tells, live or ended: `read` makes a `Story` of it, and `Story.add` goes on with live records.

    metrics.jsonl ─ every record once ─▶ lines for charts, plans, sums ┐
    environment.json, recipe.yaml ─────────────────────────────────────┼─▶ Story
    trace.json ─ timeline ─────────────────────────────────────────────┘

A line has at most `POINTS` points, each the mean of as many steps. `report` and `web` show stories.
"""

from __future__ import annotations

import json
import math
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hytrain.errors import ConfigError
from protocol.handles import Precision
from protocol.metrics import BY_NAME, records
from workers import run_folder
from workers.watch import timeline
from workers.watch.timeline import Timeline

POINTS: Final = 500
#: The last so many steps are those of "at the end".
LAST_STEPS: Final = 50
#: The first steps are slow, and belong to no median.
WARM_UP_STEPS: Final = 5


@dataclass(slots=True)
class Plan:
    """A plan that took effect in `step`: what it expected, and how long its steps were."""

    step: int
    k: float
    visiting: int
    offloaded: int
    reason: str
    at: float | None = None  # seconds since 1970
    expected_s: float | None = None
    steps_s: array[float] = field(default_factory=lambda: array("d"))

    def changes(self, before: Plan | None) -> str:
        """What the plan has changed, in words."""
        if before is None:
            own = (f"k {self.k:.3f}", _layers(self, "visiting"), _layers(self, "offloaded"))
            return f"the first plan: {', '.join(filter(None, own))}"
        found = [f"k {before.k:.3f} → {self.k:.3f}"] if f"{before.k:.3f}" != f"{self.k:.3f}" else []
        for name in ("visiting", "offloaded"):
            if (was := getattr(before, name)) != getattr(self, name):
                found.append(f"{_layers(self, name) or f'no layers {name}'}, {was} before")
        return "; ".join(found) or "other layers"


def _layers(plan: Plan, name: str) -> str:
    """How many layers are `visiting` or `offloaded`; nothing if none are."""
    count = getattr(plan, name)
    return f"{count} layer{'s' * (count != 1)} {name}" if count else ""


@dataclass(slots=True)
class Story:
    """What a run's folder tells. `lines` has, for each metric, steps and means.

    `axes` has, in parallel lists, steps, and the tokens and the seconds since the first record by then.

    `ranks`: if there are several on this machine, what the records of each tell.
    """

    run: run_folder.Run
    starts: list[dict[str, Any]] = field(default_factory=list)
    recipe: str | None = None
    ranks: list[Story] = field(default_factory=list)
    timelines: dict[int, Timeline] = field(default_factory=dict)  # by rank
    lines: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    axes: tuple[list[int], list[float], list[float]] = field(default_factory=lambda: ([], [], []))
    plans: list[Plan] = field(default_factory=list)
    steps: int = 0  # records
    last: dict[str, Any] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)  # the last value of each metric
    step_s: array[float] = field(default_factory=lambda: array("d"))
    stall_s: array[float] = field(default_factory=lambda: array("d"))
    gather_s: array[float] = field(default_factory=lambda: array("d"))
    missed: array[float] = field(default_factory=lambda: array("d"))  # measured steps relative to predicted ones
    tokens_per_s: array[float] = field(default_factory=lambda: array("d"))
    losses: list[float] = field(default_factory=list)
    joules: dict[str, list[float]] = field(default_factory=dict)  # of each counter, with the tokens meanwhile
    diverged_at: float | None = None

    @property
    def start(self) -> dict[str, Any]:
        """environment.json of the last start."""
        return self.starts[-1] if self.starts else {}

    def add(self, record: dict[str, Any]) -> None:
        """A live record, unless it is known. Lines and axes stay as they were read."""
        if isinstance(record.get("step"), int) and record.get("wall_time", 0.0) > self.newest.get("wall_time", -1.0):
            _add(self, record, _numbers(record))

    def state(self) -> str:
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at:.0f}"
        return "live" if self.run.live else "ended"

    def steps_of(self) -> str:
        """The last step's number, and of how many if that is known."""
        return f"{self.last['step']:,}" + (self.said("steps", " of {:,.0f}") or "")

    def said(self, name: str, text: str) -> str | None:
        """A metric's last value in a text; None if it has none."""
        return None if (value := self.newest.get(name)) is None else text.format(value)

    def per_token(self, counter: str) -> str | None:
        joules, tokens = self.joules.get(counter, (0.0, 0.0))
        return f"{joules / tokens:.4g}" if tokens else None

    def precision(self) -> str:
        precision = Precision(*(self.last.get(name, "float32") for name in Precision._fields))
        return "exact" if precision.is_exact else f"{precision}: not exact"

    def version(self, package: str) -> str | None:
        return (self.start.get("versions") or {}).get(package)


def read(folder: Path) -> Story:
    """Read a run's folder. Lines that a crash has cut off are left out."""
    starts: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        known = json.loads((folder / "environment.json").read_text())
        starts = [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []
    recipe = folder / "recipe.yaml"
    run, metrics = run_folder.look(folder), folder / "metrics.jsonl"
    story = _filled(Story(run, starts, recipe.read_text() if recipe.is_file() else None), metrics)
    if not story.steps:
        raise ConfigError(f"{folder} has no record of a step: there is nothing to report")
    others = [path for path in folder.glob("metrics-[0-9]*.jsonl") if not path.stem.endswith("replaced")]
    if others:
        story.ranks = [one for one in (story, *(_filled(Story(run), path) for path in others)) if one.step_s]
    story.timelines = timeline.of_run(folder)
    return story


def _filled(story: Story, metrics: Path) -> Story:
    """The story with what the records of a rank tell."""
    with metrics.open("rb") as file:
        count = sum(1 for _ in file)
    means = _Means(max(1, math.ceil(count / POINTS)))
    with metrics.open("rb") as file:
        for record in records(file):
            if isinstance(record.get("step"), int):
                numbers = _numbers(record)
                means.add(record["step"], numbers)
                _add(story, record, numbers)
    story.lines, story.axes = means.lines(), means.axes
    return story


class _Means:
    """The means of each metric over so many records. Where a loop has gone back, its later steps count."""

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._open: dict[str, tuple[float, int]] = {}
        self._lines: dict[str, tuple[list[int], list[float]]] = {}
        self._step = 0
        self._tokens, self._began_s, self._s = 0.0, math.nan, 0.0
        self.axes: tuple[list[int], list[float], list[float]] = ([], [], [])

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._step = step
        self._tokens += numbers.get("tokens", 0.0)
        if (at_s := numbers.get("wall_time")) is not None:
            self._began_s = at_s if math.isnan(self._began_s) else self._began_s
            self._s = at_s - self._began_s
        for name, value in numbers.items():
            total, count = self._open.get(name, (0.0, 0))
            self._open[name] = total + value, count + 1
        self._count += 1
        if self._count == self._size:
            self._close()

    def lines(self) -> dict[str, tuple[list[int], list[float]]]:
        self._close()
        return self._lines

    def _close(self) -> None:
        for name, (total, count) in self._open.items():
            _append(self._lines.setdefault(name, ([], [])), self._step, total / count)
        if self._open:
            _append(self.axes, self._step, self._tokens, self._s)
        self._open.clear()
        self._count = 0


def _append(line: tuple[list[Any], ...], step: int, *values: float) -> None:
    """To parallel lists, of which the first one is steps."""
    while line[0] and line[0][-1] >= step:
        for column in line:
            column.pop()
    for column, value in zip(line, (step, *values), strict=True):
        column.append(value)


def _add(story: Story, record: dict[str, Any], numbers: dict[str, float]) -> None:
    story.last = record
    story.steps += 1
    story.newest |= numbers
    if isinstance(reason := record.get("reason"), str):
        layers = record.get("visiting_layers", 0), record.get("offloaded_layers", 0)
        at = numbers.get("wall_time")
        story.plans.append(Plan(record["step"], numbers.get("k", 0.0), *layers, reason, at))
    if (loss := numbers.get("loss")) is not None:
        story.losses = [*story.losses[1 - LAST_STEPS :], loss]
    if story.diverged_at is None:
        story.diverged_at = numbers.get("diverged_at")
    if (rate := numbers.get("tokens_per_s")) is not None:
        story.tokens_per_s.append(rate)
    step_s, predicted_s = numbers.get("step_s"), numbers.get("predicted_step_s")
    if not step_s or story.steps <= WARM_UP_STEPS:
        return
    story.step_s.append(step_s)
    story.stall_s.append(numbers.get("stall_s", 0.0))
    if (gather_s := numbers.get("gather_s")) is not None:
        story.gather_s.append(gather_s)
    tokens = numbers.get("tokens") if "rank" not in record else None  # those of all ranks, on all GPUs
    for name in ("gpu_watts", "host_watts"):
        if (watts := numbers.get(name)) is not None and tokens:
            total = story.joules.setdefault(name, [0.0, 0.0])
            total[0] += watts * step_s
            total[1] += tokens
    if predicted_s:
        story.missed.append(step_s / predicted_s)
    if story.plans:
        plan = story.plans[-1]
        plan.steps_s.append(step_s)
        plan.expected_s = plan.expected_s or predicted_s


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The known metrics of a record that are finite numbers."""
    found = {name: record[name] for name in BY_NAME if isinstance(record.get(name), int | float)}
    return {name: value for name, value in found.items() if math.isfinite(value)}
