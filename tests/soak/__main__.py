"""Trains a small recipe to its end while faults are injected, and compares its bits with those of an undisturbed run.

    python -m tests.soak --faults 200 --seed 1 [--ranks 2] [--random-placements] [--kinds NAME,…] [--folder DIR]

    undisturbed run ─▶ last checkpoint ┐
    disturbed run   ─▶ last checkpoint ┴─ equal in every byte
      at a drawn step a fault of a drawn kind ─▶ it goes on │ it ends, nothing is left, it is resumed

The seed decides kinds, steps and everything that a fault draws. Kinds come in rounds, each of which has all of them.
Exit status 1 if a bit differs, if something is left behind, or if a run hangs or ends by what must not end it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

from tests.soak.faults import KINDS, RESTARTING, Kind
from tests.soak.run import CHECKPOINT_EVERY, Run, differences, write_recipe

#: Steps from one fault to the next.
GAP: Final = (3, 16)
#: So many steps a run may take during a fault that does not end it, on a fast machine.
AHEAD: Final = 15
#: In the short form, this stands for the kinds that need a restart.
SHORT: Final = "kill-trainer"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=0, help="torchrun starts failed ranks again")
    parser.add_argument("--random-placements", action="store_true", help="layers move at random all the time")
    parser.add_argument("--kinds", help=f"only these, separated by commas; all: {', '.join(KINDS)}")
    parser.add_argument("--short", action="store_true", help="only kinds that need no restart, and one that does")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell or nohup may have started this with one of them ignored
        signal.signal(number, signal.default_int_handler)
    names = arguments.kinds.split(",") if arguments.kinds else [*KINDS]
    if arguments.short:
        names = [name for name in names if KINDS[name].cheap or name == SHORT]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hytrain-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, [KINDS[name] for name in names], arguments)
    try:
        status = soak.run()
    finally:
        soak.close()
    if status == 0 and arguments.folder is None:
        shutil.rmtree(folder)
    elif status:
        print(f"the runs are in {folder}")
    return status


class Soak:
    """The schedule, both runs, and what was found."""

    def __init__(self, folder: Path, kinds: list[Kind], arguments: argparse.Namespace) -> None:
        self._folder, self._seed = folder, arguments.seed
        drawn = random.Random(arguments.seed)
        rounds = -(-arguments.faults // len(kinds))
        order = [kind for _ in range(rounds) for kind in drawn.sample(kinds, len(kinds))][: arguments.faults]
        self._schedule, step = list[tuple[int, Kind]](), 2 * CHECKPOINT_EVERY
        for kind in order:
            self._schedule.append((step, kind))
            step += drawn.randint(*GAP) + (CHECKPOINT_EVERY if kind.name in RESTARTING else 0)
        self._steps = step + 8 * CHECKPOINT_EVERY + AHEAD * len(order)
        recipe = write_recipe(folder, steps=self._steps, random_placements=arguments.random_placements)
        ranks = arguments.ranks
        self._undisturbed = Run(recipe, "undisturbed", ranks=ranks)
        self._disturbed = Run(recipe, "disturbed", ranks=ranks, max_restarts=arguments.max_restarts)
        self._wrong = list[str]()
        self._table: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])  # faults, ends, seconds

    def close(self) -> None:
        self._undisturbed.close()
        self._disturbed.close()

    def run(self) -> int:
        began_s, run = time.monotonic(), self._disturbed
        print(f"{len(self._schedule)} faults in {self._steps} steps, seed {self._seed}", flush=True)
        self._finish(self._undisturbed)
        print(f"undisturbed: {time.monotonic() - began_s:.0f} s", flush=True)
        run.start()
        for number, (step, kind) in enumerate(self._schedule, 1):
            if not self._strike(number, step, kind):
                break
        else:
            self._finish(run, running=True)
            folders = [each.checkpoints / f"step-{self._steps}" for each in (self._undisturbed, run)]
            self._wrong += [f"at the end: {line}" for line in differences(*folders)]
            if not self._wrong:
                print(f"the bits after {self._steps} steps are those of the undisturbed run")
        self._report(time.monotonic() - began_s)
        return 1 if self._wrong else 0

    def _finish(self, run: Run, *, running: bool = False) -> None:
        """Let a run go to its end."""
        if not running:
            run.start()
        run.reaches(self._steps - 1, "before its last step")
        ended = run.ended()
        if ended.status:
            self._wrong.append(f"{run.folder.name} ended with {ended}")

    def _strike(self, number: int, step: int, kind: Kind) -> bool:
        """Inject a fault, and start the run again if that has ended it. Returns whether there is any use in more."""
        run, drawn = self._disturbed, random.Random(f"{self._seed}-{number}")
        at, began_s, starts, said, after = 0, time.monotonic(), run.starts, "", ""
        try:
            at = run.reach(step)
            if shared := run.shared_files():
                self._wrong.append(f"fault {number}: shared memory with names: {shared}")
            began_s = time.monotonic()
            said = kind.act(run, drawn)
            if run.starts == starts:
                # A dead process is noticed within a moment, in which some more steps may be recorded.
                beyond = max(at, run.step()) + (1 if kind.ends is False else 40)
                ended = run.ended() if kind.ends else run.goes_on_or_ends(beyond)
                after = "went on" if ended is None else f"ended with {ended}"
                if ended is not None:
                    if kind.ends is False:
                        self._wrong.append(f"fault {number}, {kind.name}: {after}")
                    run.start()
            else:
                after = "resumed"
        except Exception as error:
            self._wrong.append(f"fault {number}, {kind.name}, at step {at}: {type(error).__name__}: {error}")
            after = self._wrong[-1]
            if run.launcher.poll() is None or run.left():
                for process in run.processes():
                    process.kill()
                run.launcher.wait()
                for path in run.temporary.iterdir():
                    shutil.rmtree(path, ignore_errors=True)
            run.start()
        seconds = time.monotonic() - began_s
        row = self._table[kind.name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + run.starts - starts, row[2] + seconds
        print(f"{number:4} {kind.name:20} step {at:5}  {said}; {after}  {seconds:.1f} s", flush=True)
        return len(self._wrong) < 20

    def _report(self, seconds: float) -> None:
        print(f"\n{'kind':22} {'faults':>6} {'starts':>6} {'seconds':>8}")
        for name, (faults, starts, spent_s) in sorted(self._table.items()):
            print(f"{name:22} {faults:6.0f} {starts:6.0f} {spent_s:8.1f}")
        total = [sum(row[i] for row in self._table.values()) for i in (0, 1)]
        print(f"{'all, ' + str(len(self._table)) + ' kinds':22} {total[0]:6.0f} {total[1]:6.0f} {seconds:8.1f}")
        for line in self._wrong:
            print(f"WRONG: {line}")


if __name__ == "__main__":
    sys.exit(main())
