"""The terminal's live view of a run: the table, curves, a timeline, the plans, and keys that give commands.

    the run's folder: records so far ─┐
    statuses ─────────────── a thread ┼▶ Screen.show ─▶ table, curves, plans
    the run's folder: trace.json ─────┴▶ Screen.draw ─▶ timeline; g: alone, also where it has no room beside the rest
    k p o t r c ─▶ Ask: a value ─▶ Send, on a thread, over a connection of its own ─▶ the coordinator's reply

The monitor imports it only where there is a terminal. It needs Textual.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Label, RichLog, Sparkline, Static

from hytrain.errors import ClusterTimeout, ConfigError
from hytrain.readable import seconds
from hytrain.run import trace
from protocol import messages as m
from workers import run_folder
from workers.watch import status_table, timeline
from workers.watch.gantt_text import Drawing
from workers.watch.observer import followed
from workers.watch.troubles import Snapshot

#: So many steps are in a curve.
KEPT: Final = 240
#: So many lines of plans are kept.
KEPT_LINES: Final = 500
#: Drawing takes CPU from the run.
REDRAW_S: Final = 0.25
STAYS_S: Final = 3600.0
#: A curve cuts off what is above so many medians: a slow first step would leave nothing else to see.
PEAK: Final = 3.0
NO_TIMELINE: Final = "no timeline has been drawn yet: r draws one of the next steps"
DRAWN: Final = "the timeline is drawn: g shows it"
ENDED: Final = "the run has ended: q leaves"
#: Metrics, their names, and how a number is written that is no time.
CURVES: Final = (("loss", "loss", "{:.4f}"), ("step_s", "step time", None), ("stall_s", "stall", None))
#: Those that only a tall terminal has room for.
MORE_CURVES: Final = (
    ("lr", "learning rate", "{:.3g}"),
    ("k", "k", "{:.3f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
)
ALL_CURVES: Final = (*CURVES, *MORE_CURVES)

Send = Callable[[m.Command], m.CommandReply]


class Ask(ModalScreen[str | None]):
    """Asks for a setting's value, if it has one. Enter gives the command, Escape does not."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "leave it as it is"),
        Binding("enter", "dismiss('')", "give the command"),  # where there is no input, which has its own
    ]

    def __init__(self, setting: str, value: str, effect: str) -> None:
        super().__init__()
        self._setting, self._value, self._effect = setting, value, effect

    def compose(self) -> ComposeResult:
        with Vertical(id="ask"):
            yield Label(f"{self._setting}: {self._effect}", markup=False)
            if self._value:
                yield Input(placeholder=self._value)
            yield Label("Enter: give the command. Escape: leave it as it is.")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class Screen(App[None]):
    """Reads `statuses` on a thread, until they end or it is left. `settings`: name, value and effect of each."""

    TITLE = "hytrain-monitor"
    CSS = """
    #above { height: auto; max-height: 65%; }
    #facts { height: auto; padding: 0 1; }
    .curves { height: 5; padding: 0 1; }
    .curves Vertical { width: 1fr; margin-right: 2; }
    Sparkline { height: 3; }
    #more { display: none; }
    .-tall #more { display: block; }
    .-tall .curves { height: 7; }
    .-tall Sparkline { height: 5; }
    #plans { height: 1fr; min-height: 4; padding: 0 1; border-top: solid $panel; }
    #timeline { height: auto; max-height: 30%; padding: 0 1; border-top: solid $panel; display: none; }
    #drawing { height: auto; }
    .-high.-drawn #above, .-tall.-drawn #above { max-height: 45%; }
    .-high.-drawn #timeline, .-tall.-drawn #timeline { display: block; }
    .-tall #timeline { max-height: 40%; }
    .-low.-troubled #curves { display: none; }
    .-low.-troubled #above { max-height: 92%; }
    .-low.-troubled #plans { min-height: 2; }
    .-alone #above, .-alone #curves, .-alone #more, .-alone #plans { display: none; }
    .-alone #timeline { display: block; height: 1fr; max-height: 100%; }
    #ask { width: 70; height: auto; padding: 1 2; background: $panel; }
    #ask Label { width: 100%; }
    Ask { align: center middle; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "ask('k')", "k"),
        Binding("p", "ask('policy')", "policy"),
        Binding("o", "ask('objective')", "objective"),
        Binding("t", "ask('threads')", "threads"),
        Binding("r", "ask('trace')", "trace"),
        Binding("c", "ask('checkpoint')", "checkpoint"),
        Binding("g", "alone", "gantt"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (42, "-high"), (54, "-tall")]

    def __init__(
        self,
        statuses: Iterable[m.Status],
        look: Callable[[m.Status], Snapshot],
        send: Send,
        settings: Iterable[tuple[str, str, str]],
    ) -> None:
        super().__init__()
        self._statuses, self._look, self._send = statuses, look, send
        self._settings = {name: (value, effect) for name, value, effect in settings}
        self._values: dict[str, list[float]] = {name: [] for name, *_ in ALL_CURVES}
        self.shown: Snapshot | None = None
        self.has_followed = threading.Event()  # the thread is done with `statuses`

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="above"):
            yield Static(id="facts")
        for row, curves in (("curves", CURVES), ("more", MORE_CURVES)):
            with Horizontal(id=row, classes="curves"):
                for name, label, _ in curves:
                    with Vertical():
                        yield Label(label, id=f"name-{name}")
                        yield Sparkline([], id=name)
        with VerticalScroll(id="timeline"):
            yield Static(NO_TIMELINE, id="drawing", markup=False)
        yield RichLog(id="plans", max_lines=KEPT_LINES, wrap=True, markup=False, min_width=0)
        yield Footer(show_command_palette=False)  # it would cover keys at 80 columns

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._follow()

    @work(thread=True, group="feed")
    def _follow(self) -> None:
        last, drawn_s, new = None, -math.inf, list[dict[str, Any]]()
        shown = set[float | None]()  # when the records were made that came before
        drawn, has_looked = None, False
        try:
            for status, record in followed(self._statuses):
                if not self.is_running:
                    return
                if last is None:
                    new = _so_far(status)
                    shown = {one.get("wall_time") for one in new}
                if record is not None and (one := json.loads(record)).get("wall_time") not in shown:
                    new.append(one)
                last = status
                if time.monotonic() - drawn_s >= REDRAW_S:
                    self.call_from_thread(self.show, self._look(status), new)
                    drawn_s, new = time.monotonic(), []
                    if (found := trace.identity(Path(status.run_dir))) != drawn:
                        drawn = found
                        self.call_from_thread(self.draw, timeline.of_run(Path(status.run_dir)), is_new=has_looked)
                    has_looked = True
            if last is not None:
                self.call_from_thread(self.show, self._look(last), new, ended=True)
            else:
                self.call_from_thread(self.notify, ENDED, timeout=STAYS_S)
        except (ConfigError, ClusterTimeout) as error:
            self.call_from_thread(self.notify, str(error), severity="error", timeout=STAYS_S)
        except RuntimeError:
            if self.is_running:  # or else the screen was left meanwhile
                raise
        finally:
            self.has_followed.set()

    def show(self, snapshot: Snapshot, records: Iterable[dict[str, Any]], *, ended: bool = False) -> None:
        """Draw a status, and the records that are new."""
        below = self.screen_stack[0] if self.screen_stack else None  # a question may lie above
        if below is None or not below.query("#facts"):
            return  # it is being left
        self.shown = snapshot
        below.set_class(bool(status_table.standing(snapshot, ended=ended)), "-troubled")
        below.query_one("#facts", Static).update(status_table.table(snapshot, ended=ended))
        for record in records:
            for name, *_ in ALL_CURVES:
                if (value := record.get(name)) is not None:
                    self._values[name] = [*self._values[name][1 - KEPT :], value]
            if isinstance(reason := record.get("reason"), str):
                words = f"step {record['step']}  k {record['k']:.3f}  {reason}"
                below.query_one("#plans", RichLog).write(words, expand=True)
        for name, label, text in ALL_CURVES:
            if values := self._values[name]:
                middle = median(values)
                top = PEAK * middle if middle > 0 else math.inf
                shown = [min(value, top) for value in values]
                below.query_one(f"#{name}", Sparkline).data = shown if name == "loss" else [0.0, *shown]
                now = seconds(values[-1]) if text is None else text.format(values[-1])
                below.query_one(f"#name-{name}", Label).update(f"{label} {now}")
        if ended:
            self.notify(ENDED, timeout=STAYS_S)

    def draw(self, timelines: dict[int, timeline.Timeline], *, is_new: bool = False) -> None:
        """Draw the newest timeline, if one can be drawn. If one that `is_new` has no room, tell of it."""
        below = self.screen_stack[0] if self.screen_stack else None
        if below is None or not below.query("#drawing"):
            return  # it is being left
        below.set_class(bool(timelines), "-drawn")
        below.query_one("#drawing", Static).update(Drawing(timelines) if timelines else NO_TIMELINE)
        if is_new and timelines and below.has_class("-low") and not below.has_class("-alone"):
            self.notify(DRAWN)

    def action_alone(self) -> None:
        """A key: the timeline alone, or with the rest."""
        self.screen.toggle_class("-alone")

    def action_ask(self, name: str) -> None:
        """A key: ask for the setting's value, and give the command."""

        def give(value: str | None) -> None:
            if value is not None:
                self._give(m.Command(name=name, value=value))

        self.push_screen(Ask(name, *self._settings[name]), give)

    @work(thread=True, group="commands")
    def _give(self, command: m.Command) -> None:
        try:
            reply = self._send(command)
        except (ConfigError, ClusterTimeout) as error:
            reply = m.CommandReply(ok=False, text=str(error))
        self.call_from_thread(self.notify, reply.text, severity="information" if reply.ok else "error", markup=False)


def _so_far(status: m.Status) -> list[dict[str, Any]]:
    """What the curves and the plans show of a run that has been going on. A coordinator's history may lack plans."""
    rank = json.loads(status.record).get("rank", 0)
    metrics = run_folder.metrics_file(Path(status.run_dir), rank)
    return run_folder.recent_records(metrics, steps=KEPT, plans=KEPT_LINES)
