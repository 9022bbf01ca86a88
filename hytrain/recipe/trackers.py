"""TensorBoard and Weights & Biases, for `run.log_to`: files in the run's folder, with the names of metrics.jsonl.

The loop opens them; the journal writes each step's numbers to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from hytrain.extras import needed
from hytrain.recipe.config import Recipe

Write = Callable[[int, Mapping[str, float]], None]  # a step, counted from 1, and its numbers


@contextmanager
def trackers(recipe: Recipe, run_dir: Path, start: int) -> Iterator[list[Write]]:
    """Opens what `run.log_to` names, for a run after `start` finished steps. Raises MissingPackage."""
    kinds = {"tensorboard": _tensorboard, "wandb": _wandb}
    with ExitStack() as stack:
        yield [stack.enter_context(kinds[name](recipe, run_dir, start)) for name in dict.fromkeys(recipe.run.log_to)]


@contextmanager
def _tensorboard(recipe: Recipe, run_dir: Path, start: int) -> Iterator[Write]:
    with needed("run.log_to: [tensorboard]", "tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

    # TensorBoard hides the steps that a resumed run repeats.
    with SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1) as writer:

        def write(step: int, numbers: Mapping[str, float]) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        yield write


@contextmanager
def _wandb(recipe: Recipe, run_dir: Path, start: int) -> Iterator[Write]:
    with needed("run.log_to: [wandb]", "wandb"):
        import wandb

    mode: Literal["offline"] | None = None if "WANDB_MODE" in os.environ else "offline"
    run = wandb.init(dir=run_dir, name=recipe.run.name, config=recipe.model_dump(mode="json"), mode=mode)
    try:
        with run:  # marks it as failed if an exception passes
            yield lambda step, numbers: run.log(dict(numbers), step=step)
    finally:
        wandb.teardown()  # ends the process that W&B has started
