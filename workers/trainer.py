"""The trainer process of a recipe: `python -m workers.trainer RECIPE.yaml --run-dir DIR`.

The launcher starts it, or a user's own program in its place. It builds what the recipe says, trains, and prints a
summary. For bad input it prints one sentence and exits with status 2, and if training diverges with status 1. A signal
ends it after a step, with a checkpoint, or at once if nothing is trained yet.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
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
from hytrain.recipe.ending import Ended, Ending
from hytrain.recipe.saved import way_on
from workers.process import worker_logging

if TYPE_CHECKING:
    from hytrain.recipe.parallel import Voices

EXIT_DIVERGED: Final = 1
EXIT_USAGE: Final = 2


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
    ending = Ending()
    ending.listen()
    try:
        recipe = config.load(arguments.recipe)
        with needed("a recipe", "hytrain[recipe]"):
            from hytrain.recipe.loop import train

        summary = train(recipe, arguments.run_dir, terminal=arguments.terminal, ending=ending)
    except Ended as ended:
        status, sentence = 128 + ended.number, f"{ended.how}; {way_on(arguments.run_dir)}"
    except (Diverged, NonFiniteGradients) as error:
        status, sentence = EXIT_DIVERGED, f"{error}; {way_on(arguments.run_dir)}"
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


if __name__ == "__main__":
    sys.exit(main())
