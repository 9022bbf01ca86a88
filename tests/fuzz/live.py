"""Sends frames to the inboxes of a run that trains, and compares its bits with those of an undisturbed run.

    python -m tests.fuzz.live --frames 1000000 --seed 1 [--steps N] [--folder DIR]

    strangers, with connections of their own ─┬─ half without the token: damaged frames, noise ──────▶ trainer
                                              └─ half with it: valid messages at the wrong time, ────▶ optimizer
                                                 in the name of any process, and damaged ones         coordinator

The frames are spread over the steps of the run. Exit status 1 if the run ends early, hangs, differs in a bit, or writes
more log than `LOG_BYTES`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import psutil
import zmq

from protocol.address import ROLES, Address
from protocol.codec import encode
from tests.fuzz.frames import Maker
from tests.soak.run import Broken, Run, differences, unless_gone, write_recipe

READERS: Final = ("trainer", "optimizer", "coordinator")
#: What all logs of the run may have grown by.
LOG_BYTES: Final = 8 << 20
FRAMES_PER_STEP: Final = 400
#: A run is over within seconds, in which a busy machine may not let the strangers run at all.
LEAST_STEPS: Final = 300
#: Frames of a stranger before another one comes.
PATIENCE: Final = 5000
#: So many frames that are due, but not sent, stop the trainer for a moment.
MOST_BEHIND: Final = 5000
#: In this share of the steps, the last ones, no frames become due. So those that were sent before are read, and those
#: that are still to be sent have a run to go to.
LAST_SHARE: Final = 0.2


class Stranger:
    """A connection to one inbox, with a name of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, maker: Maker) -> None:
        drawn = maker.drawn
        self._maker, self._seq, self._address = maker, 0, Address(drawn.choice(ROLES), 0)
        self.name = f"{drawn.choice([self._address, self._address, 'x'])}-{drawn.getrandbits(32):x}"
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.connect(f"ipc://{path}")

    def send(self) -> str:
        """Send one frame. Returns its sort. Raises `zmq.Again` if the inbox does not keep up."""
        maker, drawn = self._maker, self._maker.drawn
        self._seq += 1
        match drawn.randrange(8):
            case 0 | 1 | 2:
                sender = self._address if drawn.random() < 0.8 else maker.address()
                maker.inbox = self.name
                sort, frames = "valid", [encode(maker.message(), token=maker.token, sender=sender, seq=self._seq)]
            case 3:
                sort, frames = "damaged", [maker.frame()]
            case 4 | 5:
                sort = "wrong token"
                frames = [maker.valid().replace(maker.token.encode(), drawn.randbytes(16).hex().encode())]
            case 6:
                sort = "damaged, wrong token"
                frames = [maker.frame().replace(maker.token.encode(), b"x" * 32)]
            case _:
                sort = "noise"
                frames = [drawn.randbytes(drawn.randrange(300)) for _ in range(drawn.choice([1, 1, 2, 4]))]
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        return sort

    def close(self) -> None:
        self._socket.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.live", description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help=f"of the run; default: one for each {FRAMES_PER_STEP} frames")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hytrain-live-"))
    folder.mkdir(parents=True, exist_ok=True)
    steps = arguments.steps or max(LEAST_STEPS, arguments.frames // FRAMES_PER_STEP)
    recipe = write_recipe(folder, steps=steps, random_placements=True)
    undisturbed, run = Run(recipe, "undisturbed", ranks=1), Run(recipe, "fuzzed", ranks=1)
    try:
        undisturbed.start()
        undisturbed.reaches(steps - 1, "before its last step")
        undisturbed.ended()
        found = _fuzz(run, steps, arguments.frames, random.Random(arguments.seed))
        ends = [each.checkpoints / f"step-{steps}" for each in (undisturbed, run)]
        if ends[1].is_dir():
            found += differences(*ends)
    except Broken as broken:
        found = [str(broken)]
    finally:
        undisturbed.close()
        run.close()
    for line in found or [f"the bits after {steps} steps are those of the undisturbed run"]:
        print(f"WRONG: {line}" if found else line)
    if found:
        print(f"the runs are in {folder}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if found else 0


def _fuzz(run: Run, steps: int, frames: int, drawn: random.Random) -> list[str]:
    """Send the frames while the run trains. Returns what is wrong with it, apart from its bits."""
    began_s, sent = time.monotonic(), Counter[str]()
    run.start()
    first = run.reach(3)
    assert run.cluster is not None
    maker = Maker(drawn, token=run.cluster.token)
    folder = Path(run.cluster.socket_dir)
    # A trainer's inbox has a name of its own.
    paths = [path for path in folder.iterdir() if path.is_socket() and not path.name.startswith(("arena", "status"))]
    roles = [run.process(role) for role in READERS]
    before = [process.memory_info().rss for process in roles]
    to = dict.fromkeys(sorted(paths), 0)
    after = before
    with zmq.Context() as context:
        strangers = {path: Stranger(context, path, maker) for path in to}
        while sent.total() < frames:
            maker.step = step = run.step()
            due = min(frames, 1 + frames * (step - first) // max(1, int((1 - LAST_SHARE) * steps) - first))
            if sent.total() >= due:
                if run.launcher.poll() is not None:
                    break
                run.reaches(step + 1, f"after {sent.total():,} frames")
            if behind := due - sent.total() > MOST_BEHIND or due == frames:
                unless_gone(roles[0].suspend)  # the run would be at its end before all frames are sent
            full = set[Path]()  # a suspended trainer reads nothing: the others take more
            while sent.total() < due and run.launcher.poll() is None:
                path = drawn.choice([path for path in to if path not in full])
                try:
                    sent[strangers[path].send()] += 1
                except zmq.Again:
                    full.add(path)
                    if len(full) == len(to):
                        full.clear()
                        time.sleep(0.001)
                    continue
                to[path] += 1
                if to[path] % PATIENCE == 0:
                    strangers[path].close()
                    strangers[path] = Stranger(context, path, maker)
            if run.launcher.poll() is not None:
                break
            if behind:
                unless_gone(roles[0].resume)
            after = unless_gone(lambda: [process.memory_info().rss for process in roles]) or after
        for stranger in strangers.values():
            stranger.close()
    ended = run.ended()
    seconds = time.monotonic() - began_s
    print(f"{sent.total():,} frames in {seconds:.0f} s: {', '.join(f'{n:,} {sort}' for sort, n in sent.most_common())}")
    print(f"to {', '.join(f'{path.name}: {n:,}' for path, n in to.items())}")
    logs = {path.name: path.stat().st_size for path in sorted((run.folder / "logs").iterdir())}
    print(f"logs, kB: {', '.join(f'{name} {size / 1e3:.0f}' for name, size in logs.items())}")
    grown = [f"{role} {(b - a) / 1e6:+.1f}" for role, a, b in zip(READERS, before, after)]
    print(f"memory, MB: {', '.join(grown)}", flush=True)
    wrong = [] if ended.status == 0 else [f"the run ended: {ended}"]
    if sent.total() < frames:
        wrong.append(f"it took {sent.total():,} frames of {frames:,}")
    if sum(logs.values()) > LOG_BYTES:
        wrong.append(f"the logs have {sum(logs.values()) / 1e6:.1f} MB, above {LOG_BYTES / 1e6:.1f}")
    return wrong


if __name__ == "__main__":
    try:
        sys.exit(main())
    except psutil.NoSuchProcess as gone:
        sys.exit(f"WRONG: {gone}")
