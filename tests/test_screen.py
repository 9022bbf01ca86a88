"""The live view on a terminal, through Textual's pilot: what it shows, and what its keys command."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual")

from test_monitor import look, status
from test_report import record
from test_report import run as recorded
from textual.pilot import Pilot
from textual.widgets import Input, Label, RichLog, Sparkline
from textual.widgets._footer import FooterKey

from hytrain.errors import ConfigError
from protocol import messages as m
from workers.monitor import ORDERS, SETTINGS
from workers.screen import KEPT, KEPT_LINES, PEAK, Screen

ALL = (*SETTINGS, *ORDERS)


def at(step: int, **more: Any) -> m.Status:
    return status(record=json.dumps(record(step, policy="deadline", **more)))


class Run:
    """A run that goes on until it is told to end, and the commands that it was given."""

    def __init__(self, *statuses: m.Status, reply: m.CommandReply | Exception | None = None) -> None:
        self.commands: list[m.Command] = []
        self.ends = threading.Event()
        self._statuses, self._reply = statuses, reply
        self.newest = statuses[-1].record

    def statuses(self) -> Iterator[m.Status]:
        yield from self._statuses
        while not self.ends.wait(0.02):
            yield self._statuses[-1]

    def send(self, command: m.Command) -> m.CommandReply:
        self.commands.append(command)
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply or m.CommandReply(ok=True, text=f"{command.name}={command.value} from the next plan on")


def shown(run: Run, *keys: str, size: tuple[int, int] = (120, 40)) -> tuple[Screen, dict[str, Any]]:
    """The screen after these keys, and what it showed then."""
    screen, found = Screen(run.statuses(), look, run.send, ALL), dict[str, Any]()

    async def until(pilot: Pilot[None], is_so: Any) -> None:
        for _ in range(500):
            if is_so():
                return
            await pilot.pause(0.02)

    async def drive() -> None:
        async with screen.run_test(size=size) as pilot:
            await until(pilot, lambda: screen.shown is not None and screen.shown.status.record == run.newest)
            for key in keys:
                await pilot.press(key)
            await until(pilot, lambda: len(run.commands) >= ("enter" in keys))
            await pilot.pause(0.1)
            found["plans"] = [line.text for line in screen.query_one("#plans", RichLog).lines]
            found["curves"] = {
                name: list(screen.query_one(f"#{name}", Sparkline).data or ()) for name in ("loss", "step_s", "stall_s")
            }
            found["labels"] = [str(label.content) for label in screen.query(Label)]
            found["told"] = [notification.message for notification in screen._notifications]
            found["asks"] = bool(screen.screen.query(Input))
            run.ends.set()
            await until(pilot, screen.has_followed.is_set)
            await pilot.pause(0.1)
            found["end"] = [notification.message for notification in screen._notifications]

    asyncio.run(drive())
    assert screen.has_followed.is_set()
    return screen, found


def test_curves_plans_and_the_table_follow_the_run() -> None:
    """A slow step does not hide the others."""
    statuses = [at(step, **({"reason": f"[plan] {step}"} if step in (3, 7) else {})) for step in range(1, KEPT + 9)]
    statuses[99] = at(100, step_s=90.0)
    screen, found = shown(Run(*statuses))
    assert found["plans"] == ["step 3  k 0.250  [plan] 3", "step 7  k 0.250  [plan] 7"], "brackets are text"
    assert len(found["curves"]["loss"]) == KEPT and found["curves"]["loss"][-1] == pytest.approx(
        4.0 - (KEPT + 8) / 1000
    )
    assert set(found["curves"]["step_s"]) == {0.0, 0.5, PEAK * 0.5} and "step time 500.0 ms" in found["labels"]
    assert screen.shown is not None and json.loads(screen.shown.status.record)["step"] == KEPT + 8
    assert found["end"][-1] == "the run has ended: q leaves"


def test_a_run_that_has_been_going_on_is_shown_from_its_records(tmp_path: Path) -> None:
    """All plans, also those before the curves begin; a record once, though it comes in the first statuses, too."""
    reasons = {1: "began", 60: "moved", KEPT + 90: "settled"}
    lines = [record(step, **({"reason": reasons[step]} if step in reasons else {})) for step in range(1, KEPT + 101)]
    folder = recorded(tmp_path / "one", lines)
    run = Run(*(replace(at(KEPT + step), run_dir=str(folder)) for step in (98, 100, 101)))
    _, found = shown(run)
    assert [line.partition("  ")[0] for line in found["plans"]] == [f"step {step}" for step in reasons]
    assert found["curves"]["loss"] == [4.0 - step / 1000 for step in range(102, KEPT + 102)]


def test_ten_thousand_steps_leave_as_much_as_a_few_hundred() -> None:
    """Each with a plan."""
    run = Run(*(at(step, reason="a plan") for step in range(1, 10_001)))
    _, found = shown(run)
    assert {name: len(values) for name, values in found["curves"].items()} == {
        "loss": KEPT,
        "step_s": KEPT + 1,
        "stall_s": KEPT + 1,
    }
    assert len(found["plans"]) == KEPT_LINES and found["plans"][-1].startswith("step 10000")


def test_a_key_asks_and_gives_the_command() -> None:
    run = Run(at(1))
    _, found = shown(run, "k", "0", ".", "5", "enter")
    assert run.commands == [m.Command(name="k", value="0.5")] and not found["asks"]
    assert found["told"] == ["k=0.5 from the next plan on"]
    for keys, command in (
        (("o", *"speed"), m.Command(name="objective", value="speed")),
        (("r", "8"), m.Command(name="trace", value="8")),
        (("c",), m.Command(name="checkpoint", value="")),
    ):
        run = Run(at(1))
        _, found = shown(run, *keys, "enter")
        assert run.commands == [command] and not found["asks"]


def test_all_keys_and_a_question_have_room_at_80_columns() -> None:
    run = Run(at(1))
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            keys = screen.query(FooterKey)
            assert {key.description for key in keys} >= {"k", "policy", "trace", "checkpoint", "quit"}
            assert all(key.region.right <= 80 and key.region.width > len(key.description) for key in keys)
            await pilot.press("c")
            asked, how = screen.screen.query(Label)
            assert asked.region.width * asked.region.height >= len(str(asked.content)) and asked.region.height == 2
            assert asked.region.bottom == how.region.y
            run.ends.set()

    asyncio.run(drive())


@pytest.mark.parametrize("keys", [("t", "4", "escape"), ("p", "enter"), ("r", "enter"), ("c", "escape")])
def test_nothing_is_commanded_by_escape_or_without_a_value(keys: tuple[str, ...]) -> None:
    run = Run(at(1))
    screen, found = Screen(run.statuses(), look, run.send, ALL), None

    async def drive() -> None:
        async with screen.run_test() as pilot:
            for key in keys:
                await pilot.press(key)
            await pilot.pause(0.1)
            run.ends.set()

    asyncio.run(drive())
    assert run.commands == [] and found is None


@pytest.mark.parametrize(
    "reply", [m.CommandReply(ok=False, text="k is '9': give [a] number"), ConfigError("k is '9': give [a] number")]
)
def test_a_refusal_is_told(reply: m.CommandReply | Exception) -> None:
    _, found = shown(Run(at(1), reply=reply), "k", "9", "enter")
    assert found["told"] == ["k is '9': give [a] number"]


def test_few_stalls_are_seen_and_losses_may_be_negative() -> None:
    statuses = [at(step, stall_s=2.0 if step == 5 else 0.0, loss=-float(step)) for step in range(1, 20)]
    _, found = shown(Run(*statuses))
    assert max(found["curves"]["stall_s"]) == 2.0 and found["curves"]["loss"] == [-float(step) for step in range(1, 20)]


def test_a_run_that_ends_before_it_says_a_word() -> None:
    screen = Screen([], look, Run(at(1)).send, ALL)

    async def drive() -> list[str]:
        async with screen.run_test() as pilot:
            while not screen.has_followed.is_set() or not screen._notifications:
                await pilot.pause(0.02)
            return [notification.message for notification in screen._notifications]

    assert asyncio.run(drive()) == ["the run has ended: q leaves"]


def test_leaving_stops_the_thread_that_follows() -> None:
    run = Run(at(1))
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test() as pilot:
            await pilot.press("q")

    asyncio.run(drive())
    assert screen.has_followed.wait(10)
