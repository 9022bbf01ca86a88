"""A timeline in characters: what is drawn where, that it needs no colours, and which waits are told."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console
from test_bill import Drawn

from hytrain.run import trace
from workers.watch import timeline
from workers.watch.gantt import ROWS
from workers.watch.gantt_text import Drawing
from workers.watch.timeline import KINDS

#: The trainer's row begins there, with one rank.
MARGIN = len("gradients out") + 2


def lines(folder: Path, columns: int) -> list[str]:
    """The drawing of a folder's timeline, with so many columns for its steps."""
    out = io.StringIO()
    Console(file=out, width=MARGIN + columns, color_system=None).print(Drawing(timeline.of_run(folder)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def made(folder: Path, steps: int, *draws: Callable[[Drawn], None]) -> Path:
    """A folder with the timeline of as many ranks as draw something."""
    for rank, draw in enumerate(draws):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getpid", lambda rank=rank: 100 + rank)
            drawn = Drawn(folder, rank)
        drawn.steps(steps)
        draw(drawn)
        drawn.close()
    trace.merge(folder)
    return folder


def row(shown: list[str], label: str) -> str:
    [found] = [line.removeprefix(label) for line in shown if line.startswith(f"{label} ")]
    return found.lstrip()


def usual(drawn: Drawn) -> None:
    for step in range(2):
        drawn.span("compute", "between steps", step, 0, 10)
        drawn.span("compute", "stall", step, 10, 20, lid=3)
        drawn.span("compute", "forward", step, 20, 50, lid=3)
        drawn.span("compute", "backward", step, 50, 90, lid=3)
        drawn.span("D2H", "D2H", step, 60, 70, lid=3)
        drawn.span("D2H", "D2H", step, 72.5, 75, lid=4)
        drawn.span("CPU update", "CPU update", step, 70, 110, lid=3)


def test_a_row_for_each_part_and_a_character_for_each_kind(tmp_path: Path) -> None:
    """The bar of a column in which a copy takes a part of the time is lower. The second step's update ends later."""
    shown = lines(made(tmp_path, 2, usual), 40)
    head = next(n for n, line in enumerate(shown) if "step 42" in line)
    assert shown[head:] == [
        "               │step 41            │step 42",
        "trainer        ..xx▒▒▒▒▒▒████████  ..xx▒▒▒▒▒▒████████",
        "gradients out              ██▅                 ██▅",
        "CPU update                   ████████            ██████",
        "▒ forward   █ backward   x waits for weights or memory",
        ". the loop between steps   ▁▄█ share of the time that a",
        "part is busy",
    ]


def test_what_is_shorter_than_a_column_gets_as_many_as_it_takes_time(tmp_path: Path) -> None:
    def draw(drawn: Drawn) -> None:
        for at_ms in range(0, 100, 2):  # each column has 5 ms
            drawn.span("compute", "forward", 0, at_ms, at_ms + 1.5)
            drawn.span("compute", "stall", 0, at_ms + 1.5, at_ms + 2)

    found = row(lines(made(tmp_path, 1, draw), 20), "trainer")
    assert (found.count("▒"), found.count("x")) == (15, 5) and "xx" not in found


def test_a_short_copy_is_seen(tmp_path: Path) -> None:
    found = row(lines(made(tmp_path, 1, lambda drawn: drawn.span("H2D", "H2D", 0, 50, 50.1)), 20), "weights back")
    assert found == "▁"


def test_wider_terminals_show_more_steps(tmp_path: Path) -> None:
    folder = made(tmp_path, 9, lambda drawn: drawn.span("compute", "forward", 0, 10, 20))
    assert [lines(folder, columns)[-3].count("│") for columns in (40, 100, 150, 400)] == [2, 2, 3, 8]


def test_ranks_have_rows_of_their_own_and_a_cause_is_told_of_the_rank_where_it_costs_most(tmp_path: Path) -> None:
    def slower(drawn: Drawn) -> None:
        usual(drawn)
        drawn.span("compute", "step()", 0, 90, 100)
        drawn.span("compute", "between steps", 1, 90, 100)

    shown = lines(made(tmp_path, 2, usual, slower), 150)
    waits = [line.split(": ")[:2] for line in shown if line.startswith("waits")]
    assert waits == [
        ["waits     rank 1", "15.0 ms 15.0%  the loop between steps"],
        ["waits     rank 0", "10.0 ms 10.0%  updates on the CPU (mostly layer-3)"],
        ["waits     rank 1", "5.0 ms 5.0%  step()"],
    ]
    assert "rank 0: computing 70.0%" in shown[0]
    assert [line.partition("  ")[0] for line in shown if line.startswith("rank")] == [
        f"rank {rank}: {label}" for rank in (0, 1) for label in ("trainer", "gradients out", "CPU update")
    ]


def test_kinds_of_a_row_are_told_apart_without_colours() -> None:
    """The others are alone in their rows."""
    marks = [kind.mark for kind in KINDS.values() if kind.row == ROWS[0]]
    others = [kind for kind in KINDS.values() if kind.row in ROWS[1:]]
    assert all(marks) and len(set(marks)) == len(marks)
    assert len({kind.row for kind in others}) == len(others) and not any(kind.mark for kind in others)
