"""Fuzzes, in one process, all that reads what other processes send.

    python -m tests.fuzz --frames 1000000 --seed 1 [--target NAME]     seeded; runs anywhere
    python -m tests.fuzz --target NAME --case 17 --seed 1              one case again, with its traceback
    python -m tests.fuzz --target NAME --atheris -- -runs=1000000 [CORPUS]     guided by coverage, with atheris

Without `--target`, all targets run, each with the same number of inputs. Exit status 1 if anything is found.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

#: No single case takes as long.
HANGS_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", help="codec, handshake, arena, coordinator or strangers")
    parser.add_argument("--case", type=int, help="only this case")
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; what follows -- is libFuzzer's")
    own, rest = sys.argv[1:], list[str]()
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    if arguments.atheris:
        return _guided(arguments.target or "codec", arguments.seed, rest)
    from tests.fuzz.targets import TARGETS

    names = [arguments.target] if arguments.target else [*TARGETS]
    signal.signal(signal.SIGALRM, _hangs)
    return max(_seeded(name, arguments) for name in names)


def _hangs(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"one case takes more than {HANGS_S} s")


def _seeded(name: str, arguments: argparse.Namespace) -> int:
    from tests.fuzz.targets import TARGETS

    done, cases, began_s = 0, 0, time.monotonic()
    case, found = arguments.case or 0, dict[str, list[int]]()
    while done < arguments.frames:
        signal.alarm(HANGS_S)
        try:
            done += TARGETS[name](random.Random(f"{arguments.seed}-{name}-{case}"))
        except Exception as error:
            if arguments.case is not None:
                traceback.print_exc()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            found.setdefault(f"{type(error).__name__} in {frame.filename}:{frame.lineno}", []).append(case)
            done += 1
        finally:
            signal.alarm(0)
        cases, case = cases + 1, case + 1
        if arguments.case is not None:
            break
    seconds = time.monotonic() - began_s
    print(f"{name:12} {done:>10,} inputs in {cases:,} cases, {seconds:.0f} s: {len(found)} findings", flush=True)
    for what, where in found.items():
        print(f"  {what}\n    in {len(where)} cases; again: --target {name} --case {where[0]} --seed {arguments.seed}")
    return 1 if found else 0


def _guided(name: str, seed: int, rest: list[str]) -> int:
    """libFuzzer changes bytes and keeps those that reach new code. It ends the process by itself."""
    import atheris

    with atheris.instrument_imports(include=["protocol", "workers", "hytrain.memory.arena", "hytrain.run.ownership"]):
        from tests.fuzz.targets import TARGETS, TOKEN, Drawn, Exhausted
    from tests.fuzz.frames import KINDS, Maker

    def one(data: bytes) -> None:
        try:
            TARGETS[name](Drawn(data))
        except Exhausted:
            pass

    if all(word.startswith("-") for word in rest):  # no corpus is named: begin with some valid input
        folder = Path(tempfile.mkdtemp(prefix="hytrain-fuzz-"))
        drawn = random.Random(seed)
        maker = Maker(drawn, token=TOKEN)
        for number, kind in enumerate(KINDS * 4):
            content = maker.valid(kind) if name == "codec" else drawn.randbytes(4000)
            (folder / str(number)).write_bytes(content)
        rest = [*rest, str(folder)]
    atheris.Setup([sys.argv[0], f"-seed={seed}", *rest], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
