"""The report at the end of a run: a summary, the curves of loss and k, the processes, a sample text.

The loop calls `draw_curve` and `continue_text`; the trainer prints `Summary.render`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure  # without pyplot, which would look for a window system

from hytrain.readable import format_cores, table
from hytrain.recipe import config
from hytrain.recipe.journal import History
from hytrain.recipe.optimizer import Process
from hytrain.recipe.sharding import inference
from hytrain.recipe.task import Task
from hytrain.recipe.validation import Validation

LOSS_COLOUR, VALIDATION_COLOUR, K_COLOUR = "#1f5a99", "#c2571a", "#7a7a7a"


@dataclass(frozen=True, slots=True)
class Summary:
    step: int
    parameters: int
    training_loss: float  # of the last step, in nats per token
    validation: Validation | None
    seconds: float  # of training, without validation and saving
    tokens_per_s: float
    tflops: float
    mfu: float | None
    k: float
    checkpoint: Path | None  # None if the weights are not finite
    curve: Path
    processes: tuple[Process, ...]
    sample: str | None

    def render(self) -> str:
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        lines = [
            f"trained {self.parameters / 1e6:.2f} M parameters to step {self.step}: "
            f"{self.seconds:.1f} s of training, {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.tflops:.3g} TFLOP/s{mfu}, k = {self.k:.3f}",
            f"training loss {self.training_loss:.4f} nats per token at the last step",
        ]
        if self.validation is not None:
            lines.append(f"validation {self.validation}")
        if self.processes:
            rows = [(role, str(pid), format_cores(tuple(sorted(cores)))) for role, pid, cores in self.processes]
            lines += ["", table(("process", "pid", "cores"), rows)]
        if self.sample is not None:
            lines += ["", "a sample:", self.sample]
        saved = self.checkpoint or "none, because the weights are not finite"
        return "\n".join([*lines, "", f"checkpoint  {saved}", f"curve       {self.curve}"])


def draw_curve(history: History, path: Path, title: str) -> None:
    """Saves a PNG of training and validation loss per step, with k on a second axis."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    losses = figure.add_subplot()
    shares = losses.twinx()
    steps, values, ks = zip(*history.training, strict=True) if history.training else ((), (), ())
    (k_line,) = shares.step(steps, ks, where="post", color=K_COLOUR, linewidth=1, linestyle="--", label="k")
    noisy = len(values) > 50
    losses.plot(steps, values, color=LOSS_COLOUR, linewidth=0.7, alpha=0.3 if noisy else 1.0)
    (train_line,) = losses.plot(steps, smoothed(values), color=LOSS_COLOUR, linewidth=1.6, label="training")
    lines = [train_line, k_line]
    if history.validation:
        places, held_out = zip(*history.validation, strict=True)
        look: dict[str, Any] = {"color": VALIDATION_COLOUR, "marker": "o", "markersize": 4, "linewidth": 1.4}
        lines[1:1] = losses.plot(places, held_out, **look, label="validation")
    losses.set(xlabel="step", ylabel="loss in nats per token", title=title)
    losses.locator_params(axis="x", integer=True)
    losses.grid(alpha=0.25)
    shares.set_ylabel("k: share of the parameters the GPU owns", color=K_COLOUR)
    shares.set_ylim(-0.02, 1.02)
    losses.legend(handles=lines, loc="upper right", frameon=False)
    figure.savefig(path)


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average over about a fiftieth of the run, corrected for its bias at the start."""
    weight = 1 / max(1.0, len(values) / 50)
    total, mass, means = 0.0, 0.0, []
    for value in values:
        total += weight * (value - total)
        mass += weight * (1 - mass)
        means.append(total / mass)
    return means


def continue_text(task: Task, sample: config.Sample) -> str:
    """The prompt and the model's continuation, with as much context as in training. Deterministic for given weights.

    Several ranks call the model together, and take the tokens that rank 0 has chosen.
    """
    words = task.corpus.tokenizer
    assert words is not None, "a recipe with a sample has text"
    numbers, ending = task.corpus.opening(sample.prompt)
    tokens, begin = torch.tensor(numbers), len(numbers)
    random = torch.Generator().manual_seed(task.recipe.run.seed)
    # Each token makes the context longer: blocks would be compiled anew.
    with inference(task.model), torch.compiler.set_stance("force_eager"):
        for _ in range(sample.tokens):
            context = tokens[None, -task.recipe.data.sequence_length :].to(task.device)
            with task.autocast():
                logits = task.model(input_ids=context, use_cache=False).logits[0, -1].float().cpu()
            if sample.temperature == 0:
                chosen = logits.argmax(keepdim=True)
            else:
                chosen = torch.multinomial((logits / sample.temperature).softmax(-1), 1, generator=random)
            tokens = torch.cat([tokens, task.job.first(chosen)])
            if ending and ending in words.decode(tokens[begin:]):
                break
    if task.recipe.data.kind == "text":
        return words.decode(tokens)
    answer = words.decode(tokens[begin:])
    return f"{sample.prompt}\n{answer.partition(ending)[0] if ending else answer}"
