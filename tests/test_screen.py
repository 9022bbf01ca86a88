"""The live view on a terminal, through Textual's pilot: what it shows, and what its keys command."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual")

from test_gantt_text import made, usual
from test_monitor import look, status
from test_report import record
from test_report import run as recorded
from textual.pilot import Pilot
from textual.widgets import Input, Label, RichLog, Sparkline
from textual.widgets._footer import FooterKey

from hytrain.errors import ConfigError
from hytrain.run import trace
from protocol import messages as m
from protocol.address import Address
from workers.watch.monitor import ORDERS, SETTINGS
from workers.watch.screen import DRAWN, ENDED, KEPT, KEPT_LINES, NO_TIMELINE, PEAK, Screen
from workers.watch.troubles import Snapshot, Stranger, Usage, find

ALL = (*SETTINGS, *ORDERS)
SCREENS = Path(__file__).with_name("screens")


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
        while not self.ends.wait(0.1):
            yield self._statuses[-1]

    def send(self, command: m.Command) -> m.CommandReply:
        self.commands.append(command)
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply or m.CommandReply(ok=True, text=f"{command.name}={command.value} from the next plan on")


async def until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    """Wait for it, but not for ever: the test then says what is instead."""
    ends_s = time.monotonic() + 60
    while not is_so() and time.monotonic() < ends_s:
        await pilot.pause(0.05)


def shown(run: Run, *keys: str, size: tuple[int, int] = (120, 40)) -> tuple[Screen, dict[str, Any]]:
    """The screen after these keys, and what it showed then."""
    screen, found = Screen(run.statuses(), look, run.send, ALL), dict[str, Any]()

    async def drive() -> None:
        async with screen.run_test(size=size) as pilot:
            await until(pilot, lambda: screen.shown is not None and screen.shown.status.record == run.newest)
            for key in keys:
                await pilot.press(key)
            await until(pilot, lambda: len(screen._notifications) >= ("enter" in keys))  # the reply
            await until(pilot, lambda: not screen.query_one("#plans", RichLog)._deferred_renders)
            found["plans"] = [line.text for line in screen.query_one("#plans", RichLog).lines]
            found["curves"] = {
                name: list(screen.query_one(f"#{name}", Sparkline).data or ()) for name in ("loss", "step_s", "stall_s")
            }
            found["labels"] = [str(label.content) for label in screen.query(Label)]
            found["told"] = [notification.message for notification in screen._notifications]
            found["asks"] = bool(screen.screen.query(Input))
            run.ends.set()
            await until(pilot, lambda: any(one.message == ENDED for one in screen._notifications))
            await until(pilot, screen.has_followed.is_set)
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


def test_thousands_of_steps_leave_as_much_as_a_few_hundred() -> None:
    """Each with a plan."""
    run = Run(*(at(step, reason="a plan") for step in range(1, 3_001)))
    _, found = shown(run)
    assert {name: len(values) for name, values in found["curves"].items()} == {
        "loss": KEPT,
        "step_s": KEPT + 1,
        "stall_s": KEPT + 1,
    }
    assert len(found["plans"]) == KEPT_LINES and found["plans"][-1].startswith("step 3000")


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


class Traced:
    """A run in this folder, whose second timeline comes once the first one is shown."""

    def __init__(self, folder: Path) -> None:
        lines = [record(step, lr=1e-3, **({"reason": "a plan"} if step in (1, 9) else {})) for step in range(1, 30)]
        self.folder, self.status = folder, replace(at(30, lr=1e-3, tokens_per_s=1e4), run_dir=str(folder))
        recorded(folder, lines)
        made(folder, 2, usual)

    def again(self) -> None:
        shutil.rmtree(self.folder / trace.FOLDER)
        made(self.folder, 1, lambda drawn: drawn.span("compute", "forward", 0, 0, 90))


def seen(screen: Screen) -> str:
    """What is on the terminal."""
    return "".join(f"{strip.text.rstrip()}\n" for strip in screen.screen._compositor.render_strips())


async def looks_as_in(name: str, pilot: Pilot[None], screen: Screen) -> str:
    """What is on the terminal, once all of it is there: Textual draws its parts one after the other."""
    (file := SCREENS / name).touch()
    expected = file.read_text()
    await until(pilot, lambda: seen(screen) == expected)
    told = seen(screen)
    if not expected:
        file.write_text(told)
    assert told == expected
    return told


@pytest.mark.parametrize(("width", "height", "keys"), [(80, 24, ""), (80, 24, "g"), (200, 60, ""), (200, 60, "gg")])
def test_the_terminal_looks_as_it_did(
    width: int, height: int, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in screens/. If it is to look otherwise, empty the file there, and the test fills it."""
    monkeypatch.chdir(tmp_path)
    run = Run(Traced(Path("demo")).status)
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test(size=(width, height)) as pilot:
            await until(pilot, lambda: screen.screen.has_class("-drawn"))
            await pilot.press(*keys)
            await looks_as_in(f"{width}x{height}{'-gantt' if keys == 'g' else ''}.txt", pilot, screen)
            run.ends.set()

    asyncio.run(drive())


def test_what_is_wrong_leaves_the_processes_on_a_small_terminal() -> None:
    """As long as the run lives: what is wrong with one that has ended is only what it has recorded."""
    told = at(3, reason="the CPU's updates would end 12 ms late at k=0.20; at k=0.25 nothing waits for them")
    planes = dict.fromkeys(("grads", "weights", "exp_avg", "exp_avg_sq"), 2**30)
    run = Run(
        replace(told, reason="the CPU keeps up with all layers, so the GPU owns none (k=0.00)", host_planes=planes)
    )
    strangers = [Stranger(3100 + number, f"program-{number}", 0.9) for number in range(3)]
    usage = Usage(cores=(0, 1), rss_bytes=1 << 30, cpu_s=1.0, cpu_share=0.5)
    roles = (("trainer", "cuda:0"), ("optimizer", "on cores 0-1"), ("coordinator", "plans"), ("launcher", "supervises"))
    processes = [m.Process(address=Address(role, 0), pid=70 + n, detail=text) for n, (role, text) in enumerate(roles)]
    used = [(process, usage) for process in processes]

    def looked(shown: m.Status) -> Snapshot:
        return Snapshot(shown, tuple(used), find(shown, used, strangers), loads=(0.9, 0.4))

    screen = Screen(run.statuses(), looked, run.send, ALL)

    async def drive() -> tuple[str, str]:
        async with screen.run_test(size=(80, 24)) as pilot:
            lively = await looks_as_in("80x24-trouble.txt", pilot, screen)
            run.ends.set()
            await until(pilot, lambda: "which has ended" in seen(screen))
            return lively, seen(screen)

    lively, ended = asyncio.run(drive())
    assert "program-2" in lively
    assert all(f"{role}-0" in lively for role, _ in roles)
    assert "program-2" not in ended


def test_a_timeline_that_is_drawn_meanwhile_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "one")
    run = Run(traced.status)
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> str:
        async with screen.run_test(size=(120, 50)) as pilot:
            await until(pilot, lambda: "2 steps from step 41 on" in seen(screen))
            traced.again()
            await until(pilot, lambda: "2 steps from step 41 on" not in seen(screen))
            run.ends.set()
            return seen(screen)

    assert "step 41, 100.0 ms each; computing 90.0%" in asyncio.run(drive())


def test_a_small_terminal_tells_of_a_timeline_that_is_drawn_meanwhile(tmp_path: Path) -> None:
    """Not of one that was there before."""
    traced = Traced(tmp_path / "one")
    run = Run(traced.status)
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> list[str]:
        async with screen.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: screen.screen.has_class("-drawn"))
            told = [len(screen._notifications)]
            traced.again()
            await until(pilot, lambda: len(screen._notifications) > 0)
            run.ends.set()
            return [*map(str, told), *(notification.message for notification in screen._notifications)]

    assert asyncio.run(drive()) == ["0", DRAWN]


def test_a_key_shows_the_timeline_alone_and_how_to_draw_one() -> None:
    run = Run(at(1))
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test(size=(120, 60)) as pilot:
            for is_alone in (False, True, False):
                await until(pilot, lambda is_alone=is_alone: (NO_TIMELINE in seen(screen)) == is_alone)
                words = "step time", "learning rate", NO_TIMELINE
                assert [word in seen(screen) for word in words] == [not is_alone, not is_alone, is_alone]
                await pilot.press("g")
            run.ends.set()

    asyncio.run(drive())


def test_all_keys_and_a_question_have_room_at_80_columns() -> None:
    run = Run(at(1))
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test(size=(80, 24)) as pilot:
            wanted = {"k", "policy", "trace", "checkpoint", "gantt", "quit"}
            await until(pilot, lambda: {key.description for key in screen.query(FooterKey) if key.region} >= wanted)
            keys = screen.query(FooterKey)
            assert {key.description for key in keys} >= wanted
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
                await pilot.pause(0.05)
            return [notification.message for notification in screen._notifications]

    assert asyncio.run(drive()) == ["the run has ended: q leaves"]


def test_leaving_stops_the_thread_that_follows() -> None:
    run = Run(at(1))
    screen = Screen(run.statuses(), look, run.send, ALL)

    async def drive() -> None:
        async with screen.run_test() as pilot:
            await pilot.press("q")

    asyncio.run(drive())
    assert screen.has_followed.wait(60)
