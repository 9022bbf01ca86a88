"""The trainer process of a recipe: `python -m workers.trainer RECIPE.yaml --run-dir DIR`.

The launcher starts it, or a user's own program in its place. It builds what the recipe says, trains, and prints a
summary. For bad input it prints one sentence and exits with status 2, and if training diverges with status 1.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from hytrain.config import Launch, torchrun
from hytrain.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    Diverged,
    NonFiniteGradients,
    UnsupportedError,
)
from hytrain.extras import needed
from hytrain.recipe import config
from workers.process import worker_logging

if TYPE_CHECKING:
    from hytrain.recipe.parallel import Voices

EXIT_DIVERGED: Final = 1
EXIT_USAGE: Final = 2
#: Sent by batch systems, some of them as a warning that the time is up, and by a terminal that closes.
ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Ended(KeyboardInterrupt):
    """A signal told the trainer to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main() -> int:
    """Train, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--terminal", action="store_true", help="show a progress bar")
    arguments = parser.parse_args()
    worker_logging()
    launch = torchrun()
    voices = None if launch is None or launch.world == 1 else _join(launch)
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup
            signal.signal(number, _interrupt)
    try:
        recipe = config.load(arguments.recipe)
        with needed("a recipe", "hytrain[recipe]"):
            from hytrain.recipe.loop import train

        summary = train(recipe, arguments.run_dir, terminal=arguments.terminal)
    except KeyboardInterrupt as interrupt:
        by = interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT
        status, sentence = 128 + by, f"interrupted; {_way_on(arguments.run_dir)}"
    except (Diverged, NonFiniteGradients) as error:
        status, sentence = EXIT_DIVERGED, f"{error}; {_way_on(arguments.run_dir)}"
    except (ConfigError, UnsupportedError, CapacityError, BackendUnavailable) as error:
        status, sentence = EXIT_USAGE, str(error)
    else:
        status, sentence = 0, summary.render()
    if voices is None or voices.first():
        print(f"hytrain: {sentence}" if status else sentence, file=sys.stderr if status else sys.stdout)
    if voices is not None and not status:
        voices.leave()
    return status


def _join(launch: Launch) -> Voices:
    """Join the other ranks of torchrun's job. Only rank 0 warns."""
    from hytrain.recipe import parallel

    if launch.rank:
        logging.getLogger().setLevel(logging.ERROR)
    return parallel.start(launch)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Act as on Ctrl-C, once: a signal to all processes of a run arrives twice, the second time from the launcher."""
    for other in ENDINGS:
        signal.signal(other, signal.SIG_IGN)
    raise Ended(number)


def _way_on(run_dir: Path) -> str:
    from hytrain.recipe.checkpoint import latest

    checkpoint = latest(run_dir)
    if checkpoint is None:
        return "there is no checkpoint to resume from: train.checkpoint_every=N saves one every N steps"
    return f"--set train.resume=latest resumes from {checkpoint}"


if __name__ == "__main__":
    sys.exit(main())
