"""Processes save into shared folders and load from them, and are killed at any moment: nothing is mixed, nothing lost.

    python -m tests.soak.folders --seconds 7200 --seed 1 [--turns N] [--actors 4] [--folder DIR]

    Actor: an optimizer ─ fork ─▶ one save or one load ─▶ its word, or SIGKILL ─▶ Ledger: may a load find this save?

A save has one number in all of its arrays, counts and hyperparameters, so a mixture shows. What a call has reported as
saved is found by every load that begins later, or a newer one is. Loads and saves never fail.
The seed decides who does what in which folder, and who is killed; when, depends on the machine, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import hytrain
from hytrain.run.ranks import Ranks
from hytrain.state import folders
from hytrain.state.dicts import OptimizerState, gather, scatter

PLANES: Final = ("exp_avg", "exp_avg_sq")
FOLDERS: Final = 2
#: One in so many turns is killed.
KILLED: Final = 3
#: No turn takes as long.
HANGS_S: Final = 120.0
#: In float32, larger numbers are not exact.
MOST_SAVES: Final = 2**24


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)])


def fill(opt: hytrain.AdamW, number: int) -> None:
    for known in opt._session.parameters:
        known.restore(number)
        for plane in PLANES:
            scatter(known, plane, torch.full(known.own.shape, float(number)))
    opt.param_groups[0]["lr"] = float(number)


def numbers(opt: hytrain.AdamW) -> set[float]:
    """One, if the state is of one save."""
    arrays = [gather(known, plane) for known in opt._session.parameters for plane in PLANES]
    found = {float(value) for array in arrays for value in array.unique()}
    return found | {float(known.count) for known in opt._session.parameters} | {float(opt.param_groups[0]["lr"])}


def state(opt: hytrain.AdamW) -> OptimizerState:
    """Without the engine, which is the parent's in a fork."""
    return OptimizerState(opt.param_groups, opt._session.parameters, opt._session.resting)


def save(opt: hytrain.AdamW, folder: Path, number: int, in_parallel: bool) -> list[float]:
    folders.save(folder, state(opt), steps=number).finish(Ranks(), in_parallel=in_parallel)
    return [number]


def load(opt: hytrain.AdamW, folder: Path) -> list[float]:
    steps = folders.load(folder, state(opt), dict(opt._model.named_parameters()))
    return sorted(numbers(opt) | {float(steps)})


@dataclass
class Turn:
    """One call in a forked process. `said`: what it found, or its error; None if it was killed before."""

    kind: str
    folder: Path
    number: int  # of a save
    began_s: float
    ended_s: float = float("inf")
    said: list[float] | str | None = None


@dataclass
class Ledger:
    """All saves of one folder, and what is wrong with loads from it."""

    saves: dict[int, Turn] = field(default_factory=dict)

    def wrong(self, turn: Turn) -> str | None:
        """What is wrong with a turn that has ended and said something."""
        if turn.kind == "save":
            return turn.said if isinstance(turn.said, str) else None
        before = [save for save in self.saves.values() if save.said is not None and save.ended_s < turn.began_s]
        if isinstance(turn.said, str):
            is_empty = re.search("no checksums|there is no folder", turn.said) and not before
            return None if is_empty else turn.said
        assert turn.said is not None
        if len(turn.said) != 1:
            return f"a mixture of {turn.said}"
        found = self.saves.get(int(turn.said[0]))
        if found is None:
            return f"nobody has saved {turn.said}"
        if newer := next((save for save in before if save.began_s > found.ended_s), None):
            return f"{found.number} was found, but {newer.number} was reported as saved after it"
        return None

    def forget(self, before_s: float) -> None:
        """Drop saves that no load can find any more, because one that was reported came after them."""
        reported = [save for save in self.saves.values() if save.said is not None and save.ended_s < before_s]
        newest_s = max((save.began_s for save in reported), default=float("-inf"))
        self.saves = {number: save for number, save in self.saves.items() if save.ended_s >= newest_s}


class Actor:
    """An optimizer whose state forked processes save and load, one at a time."""

    def __init__(self, opt: hytrain.AdamW) -> None:
        self._opt = opt
        self.turn: Turn | None = None
        self.killed_at_s = float("inf")
        self._process = self.pipe = -1

    def begin(self, turn: Turn, killed_after_s: float, in_parallel: bool) -> None:
        if turn.kind == "save":
            fill(self._opt, turn.number)
        turn.began_s = time.monotonic()
        self.turn, self.killed_at_s = turn, turn.began_s + killed_after_s
        opt, folder = self._opt, turn.folder
        call: Callable[[], list[float]] = lambda: (  # noqa: E731
            save(opt, folder, turn.number, in_parallel) if turn.kind == "save" else load(opt, folder)
        )
        self.pipe, far = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks of a process with threads
            self._process = os.fork()
        if self._process:
            os.close(far)
            return
        try:
            said: Any = call()
        except BaseException:
            said = traceback.format_exc()
        os.write(far, json.dumps(said).encode())
        os._exit(0)

    def kill(self) -> None:
        self.killed_at_s = float("inf")
        os.kill(self._process, signal.SIGKILL)

    def end(self) -> Turn:
        """The turn of a process that has said something or was killed."""
        assert self.turn is not None
        said = b""
        while piece := os.read(self.pipe, 1 << 16):
            said += piece
        os.close(self.pipe)
        os.waitpid(self._process, 0)
        turn, self.turn, self.killed_at_s = self.turn, None, float("inf")
        turn.ended_s = time.monotonic()
        turn.said = json.loads(said) if said else None
        return turn


@dataclass
class Soak:
    """Lets actors take turns. `wrong` is what was found, `counts` what happened."""

    folder: Path
    actors: list[Actor]
    drawn: random.Random
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, turns: float, seconds: float) -> None:
        ledgers = {self.folder / f"shared-{number}": Ledger() for number in range(FOLDERS)}
        usual_s = {"save": 0.05, "load": 0.05}
        begun, ends_s = 0, time.monotonic() + seconds
        waiting = selectors.DefaultSelector()
        while True:
            goes_on = begun < min(turns, MOST_SAVES) and time.monotonic() < ends_s and len(self.wrong) < 20
            for actor in self.actors:
                if actor.turn is None and goes_on:
                    begun += 1
                    kind, folder = self.drawn.choice(["save", "load"]), self.drawn.choice([*ledgers])
                    turn = Turn(kind, folder, begun, 0.0)
                    if kind == "save":
                        ledgers[folder].saves[begun] = turn
                    is_killed = self.drawn.randrange(KILLED) == 0
                    after_s = self.drawn.uniform(0.0, 1.5 * usual_s[kind]) if is_killed else HANGS_S
                    actor.begin(turn, after_s, self.drawn.choice([True, False]))
                    waiting.register(actor.pipe, selectors.EVENT_READ, actor)
            busy = [actor for actor in self.actors if actor.turn is not None]
            if not busy:
                return
            next_s = min(actor.killed_at_s for actor in busy)
            for key, _ in waiting.select(max(0.0, min(next_s - time.monotonic(), HANGS_S))):
                waiting.unregister(key.fd)
                turn = key.data.end()
                self._note(turn, ledgers[turn.folder])
                if turn.said is not None:
                    usual_s[turn.kind] += 0.1 * (turn.ended_s - turn.began_s - usual_s[turn.kind])
                running = [actor.turn.began_s for actor in self.actors if actor.turn is not None]
                ledgers[turn.folder].forget(min(running, default=turn.ended_s))
            for actor in busy:
                if actor.turn is not None and actor.killed_at_s <= time.monotonic():
                    if actor.killed_at_s - actor.turn.began_s >= HANGS_S:
                        self.wrong.append(f"a {actor.turn.kind} takes more than {HANGS_S:.0f} s")
                    actor.kill()

    def _note(self, turn: Turn, ledger: Ledger) -> None:
        end = "killed" if turn.said is None else "refused" if isinstance(turn.said, str) else "done"
        self.counts[f"{turn.kind}, {end}"] += 1
        if turn.said is not None and (why := ledger.wrong(turn)):
            self.wrong.append(f"turn {turn.number}, {turn.kind} in {turn.folder.name}: {why}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.folders", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--turns", type=float, default=float("inf"))
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the folders here")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hytrain-folders-"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with ExitStack() as opened:
        opts = [opened.enter_context(hytrain.AdamW(model(), lr=0.0, k=0.0)) for _ in range(arguments.actors)]
        soak = Soak(folder, [Actor(opt) for opt in opts], random.Random(arguments.seed))
        soak.run(arguments.turns, arguments.seconds)
    print(", ".join(f"{count} × {what}" for what, count in sorted(soak.counts.items())), f"(seed {arguments.seed})")
    for line in soak.wrong:
        print(f"WRONG: {line}")
    if arguments.folder is None and not soak.wrong:
        shutil.rmtree(folder)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
