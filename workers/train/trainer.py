"""The trainer process of a recipe: `python -m workers.train.trainer RECIPE.yaml --run-dir DIR`.

The launcher starts it, or a user's own program in its place. It builds what the recipe says, trains, and prints a
summary. For bad input it prints one sentence and exits with status 2, and if training diverges with status 3. A signal
ends it after a step, with a checkpoint, or at once if nothing is trained yet. Started again after a failure, it goes on
from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hytrain.config import Launch, joined_cluster, torchrun
from hytrain.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    Diverged,
    NonFiniteGradients,
    UnsupportedError,
)
from hytrain.extras import importing, needed
from hytrain.recipe import config
from hytrain.recipe.ending import Ended, Ending
from hytrain.run.saved import BEGUN, FINISHED, mark, way_on
from workers.exits import EXIT_DIVERGED, EXIT_SIGNAL, EXIT_USAGE, on_endings, printing
from workers.worker import worker_logging

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def main() -> int:
    """Train, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.train.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--terminal", action="store_true", help="show a progress bar")
    parser.add_argument("--again", action="store_true", help="go on from the newest checkpoint, if there is one")
    arguments = parser.parse_args()
    atexit.register(gc.freeze)  # nothing is looked through for garbage at the process's end: that would take a second
    worker_logging()
    launch = torchrun()
    store = None if launch is None or launch.world == 1 else _join(launch)
    ending = Ending()
    on_endings(ending.on_signal, signal.SIGUSR1)  # which is a batch system's warning that the time is up
    try:
        folder = joined_cluster() if launch is not None else None  # torchrun may have started this rank again
        again = arguments.again or (folder is not None and Path(folder, BEGUN).exists())
        recipe = config.load(arguments.recipe, ["train.resume=auto"] if again else [])
        if launch is None or launch.rank == 0:
            print("hytrain: importing torch and Transformers", file=sys.stderr, flush=True)
        with importing(), needed("a recipe", "recipe"):
            from hytrain.recipe.loop import train

        summary = train(recipe, arguments.run_dir, terminal=arguments.terminal, ending=ending)
    except Ended as ended:
        status, sentence = EXIT_SIGNAL + ended.number, f"{ended.how}; {way_on(arguments.run_dir)}"
    except Exception as error:
        if ending.at_once:  # it has interrupted an import, say
            status, sentence = EXIT_SIGNAL + ending.number, f"interrupted; {way_on(arguments.run_dir)}"
        elif isinstance(error, (Diverged, NonFiniteGradients)):
            status, sentence = EXIT_DIVERGED, f"{error}; {way_on(arguments.run_dir)}"
        elif isinstance(error, (ConfigError, UnsupportedError, CapacityError, BackendUnavailable)):
            status, sentence = EXIT_USAGE, str(error)
        else:
            raise
    else:
        mark(joined_cluster(), FINISHED)
        status, sentence = 0, summary.render()
    if store is not None:
        from torch.distributed import destroy_process_group

        from hytrain.recipe.parallel import is_first
    if store is None or is_first(store):
        with printing():
            print(f"hytrain: {sentence}" if status else sentence, file=sys.stderr if status else sys.stdout)
    if store is not None and not status:  # one that fails just ends, as others may not follow
        destroy_process_group()
    return status


def _join(launch: Launch) -> Store:
    """Join the other ranks of torchrun's job. Only rank 0 warns."""
    with importing():
        from hytrain.recipe import parallel

    if launch.rank:
        logging.getLogger().setLevel(logging.ERROR)
    return parallel.start(launch)


if __name__ == "__main__":
    sys.exit(main())
