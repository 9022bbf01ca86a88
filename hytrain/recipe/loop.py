"""The training loop of a recipe. The trainer process calls `train` and prints the summary that it returns.

    assemble ─▶ optimizer ─▶ (resume) ─▶ steps ─▶ last validation, checkpoint, curve, sample ─▶ Summary

It is an ordinary PyTorch loop. A signal ends it after a step, with a checkpoint (`ending`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from hytrain.config import joined_cluster
from hytrain.errors import ConfigError, Diverged, SavingError
from hytrain.optimizer import Optimizer
from hytrain.recipe import checkpoint, report
from hytrain.recipe.batches import Batch
from hytrain.recipe.config import Recipe
from hytrain.recipe.ending import Ended, Ending
from hytrain.recipe.journal import History, Journal
from hytrain.recipe.optimizer import Factory, factors, hytrain_optimizer, scheduler
from hytrain.recipe.parallel import Job
from hytrain.recipe.progress import Progress, first_plan, say
from hytrain.recipe.report import Summary
from hytrain.recipe.task import Task, assemble
from hytrain.recipe.validation import Validation, evaluate
from hytrain.run.ranks import Ranks
from hytrain.run.saved import BEGUN, mark
from hytrain.state.saver import Saver
from hytrain.trackers import Trackers, check_trackers


def backward_in_turn(task: Task, opt: Optimizer, parts: Iterable[tuple[Batch, float]]) -> torch.Tensor:
    """Forward and backward of a step's parts. Returns the sum of their mean losses over their divisors, shape ()."""
    total = torch.zeros((), device=task.device)
    for part, divisor in parts:
        with task.autocast():
            loss = task.model(**part.inputs(task.device)).loss / divisor
        opt.scale(loss).backward()
        total += loss.detach()
    return total


#: What trains a step's parts: `backward_in_turn`, or what shares them with others.
Backward = Callable[[Task, Optimizer, Iterable[tuple[Batch, float]]], torch.Tensor]


def train(
    recipe: Recipe,
    run_dir: Path,
    optimizer_factory: Factory | None = None,
    terminal: bool | None = None,
    ending: Ending | None = None,
    backward: Backward = backward_in_turn,
) -> Summary:
    """Trains the recipe in the existing folder `run_dir`, draws the curve, writes the sample, returns the summary.

    `terminal` chooses between a progress bar and plain lines; by default, stderr decides.
    Raises ConfigError, before anything is started, if the recipe asks for something impossible, Diverged if the
    training diverges with `train.on_divergence: stop`, and Ended if `ending` has heard of a signal.
    """
    ending = ending or Ending()
    first = Job(Ranks.of_job())
    tell = say if first.speaks else lambda line: None
    resumed = first.decided(lambda: checkpoint.find(run_dir, recipe))
    task = assemble(recipe, resumed, tell, deferred=optimizer_factory is None)
    factors(task.recipe.train)  # refuses options that do not fit
    job = task.job
    job.decided(lambda: check_trackers(recipe.run.log_to, "run.log_to"))
    tell("placing the optimizer's state; at first use, a kernel is compiled")
    opt = (optimizer_factory or hytrain_optimizer)(task.model, recipe)
    tell(first_plan(opt.statistics()))
    start = checkpoint.restore(resumed, opt, task.job) if resumed else 0
    end = recipe.train.stop_at or task.recipe.train.length
    if start >= end:
        raise ConfigError(f"The checkpoint {resumed} is at step {start} and the run ends at {end}; add train.steps.")
    tell(f"training from step {start + 1} to {end}" + (f", resumed from {resumed}" if resumed else ""))
    job.decided(lambda: checkpoint.begin(run_dir, resumed))
    mark(joined_cluster(), BEGUN)
    bar = sys.stderr.isatty() if terminal is None else terminal
    names, told = recipe.run.log_to if job.speaks else (), recipe.model_dump(mode="json")
    with (
        Progress(start, end, bar, job.speaks) as progress,
        Trackers(names, run_dir, recipe.run.name, told) as trackers,
    ):
        journal = Journal(task, opt, progress, History.read(run_dir / "metrics.jsonl", start), trackers)
        with ending.after_a_step(), closing(Saver()) as saver, _little_to_look_through():
            steps = range(start, end)
            validation, saved = run_steps(task, opt, journal, progress, run_dir, steps, ending, saver, backward)
            processes = opt.processes()
    cost, curve = task.cost, run_dir / "loss.png"
    if job.speaks:
        report.draw_curve(journal.history, curve, f"{recipe.run.name}: {cost.parameters / 1e6:.2f} M parameters")
    step, loss, k = journal.history.training[-1]
    return Summary(
        step=step,
        parameters=cost.parameters,
        training_loss=loss,
        validation=validation,
        seconds=journal.seconds,
        tokens_per_s=journal.tokens_per_s,
        tflops=cost.tflops(journal.tokens_per_s),
        mfu=cost.mfu(journal.tokens_per_s, task.peak_tflops),
        k=k,
        checkpoint=saved,
        curve=curve,
        processes=tuple(processes),
        sample=report.continue_text(task, recipe.sample) if recipe.sample and saved is not None else None,
    )


@contextmanager
def _little_to_look_through() -> Iterator[None]:
    """When Python looks for cycles, it leaves out what there is now: else a step in some dozens takes 0.2 s longer."""
    is_ours = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def run_steps(
    task: Task,
    opt: Optimizer,
    journal: Journal,
    progress: Progress,
    run_dir: Path,
    steps: range,
    ending: Ending,
    saver: Saver,
    backward: Backward = backward_in_turn,
) -> tuple[Validation | None, Path | None]:
    """Trains. Returns the validation and the checkpoint of the last step; no checkpoint if its weights are not finite.

    Raises Diverged, and Ended on all ranks after the same step: each hears of the others' wishes with their losses.
    A checkpoint that a monitor asks for is saved by all ranks after the same step, too.
    """
    model, plan, divergence, job = task.model, task.recipe.train, journal.divergence, task.job
    job.decided(lambda: None)  # from here on a signal ends all ranks together
    schedule = scheduler(opt, plan, steps.start)
    validation, saved = None, None
    opt.checkpoint_requested()  # from the first step on, monitors hear that it is heeded
    for step in steps:
        batch = task.batch(step)
        lr = opt.param_groups[0]["lr"]
        loss = backward(task, opt, batch.parts(plan.grad_accumulation, job.data_rank, job.data_ranks))
        opt.step()
        opt.zero_grad()
        schedule.step()
        asked = opt.checkpoint_requested()
        loss, wishes = job.mean(loss, bool(ending.number), asked)
        journal.note(step + 1, loss, lr, batch.tokens.numel() - batch.padding, wishes)

        last = step + 1 == steps.stop
        ends = not last and (bool(ending.number) if wishes is None else journal.wishes_end)
        if wishes is not None:
            asked, journal.wishes_save = journal.wishes_save, False
        if asked:
            progress.say(f"step {step + 1}: a checkpoint, which a monitor has asked for")
        evaluates, saves = due(plan.eval_every, step, steps), ends or asked or due(plan.checkpoint_every, step, steps)
        why = "its weights are not finite"
        if saves:
            opt.synchronize()
            saves = divergence.look_at_weights(step + 1, model, job)
        if evaluates:
            validation = evaluate(task)
            journal.validated(validation)
            if validation is not None:
                progress.say(f"step {step + 1}: validation {validation}")
        if saves or divergence.step is not None:
            journal.validated(None)  # reads this step's loss, if it is still to be read
        if divergence.step is not None and plan.on_divergence == "stop":
            raise Diverged(f"training has diverged: {divergence.sign}")
        saved = None
        if saves:
            try:
                saving = checkpoint.save(run_dir, step + 1, model, task.corpus.tokenizer, opt, task.recipe, job, saver)
                ends = ends or (not last and any(job.ranks.gather(ending.number)))  # meanwhile
                saved = saving.result() if last or ends else None
            except SavingError as error:
                if last:
                    raise
                why = str(error)
                if not ends:
                    progress.say(f"step {step + 1}: no checkpoint, and training goes on: {error}")
        if ends:
            result = "and saved a checkpoint" if saved else f"without a checkpoint of this step: {why}"
            raise Ended(max(job.ranks.gather(ending.number)), f"ended after step {step + 1}, {result}")
        journal.restart_clock()
    return validation, saved


def due(every: int | None, step: int, steps: range) -> bool:
    """Whether step `step` (from 0) is the last, or `every` divides the number of finished steps."""
    return step + 1 == steps.stop or (every is not None and (step + 1) % every == 0)
