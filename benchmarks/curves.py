"""Whether HyTrain learns as torch.optim.AdamW does: the same recipe with several seeds, losses in one picture.

    python -m benchmarks.curves DIR [--recipe F.yaml] [--seeds 1 2 3] [--set a.b=v …] [--picture OUT.png]

    torch        the recipe's loop in one process, clip_grad_norm_ and torch.optim.AdamW(fused=True)
    HyTrain      the same through three processes
    HyTrain bf16 the same with bf16 weights over fp32 masters
    … moments    the same with bf16 or float8 moments, too, which is not exact
    bitsandbytes the recipe's loop in one process with AdamW8bit over bf16 weights, on a GPU
        └─▶ DIR/SYSTEM-SEED/metrics.jsonl ─▶ a table, a picture

The recipe is examples/demo.yaml unless told otherwise; `--set` changes it. If its weights are in bf16, torch has fp32
masters of them beside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.columns import markdown, number
from hytrain.recipe import config, loop
from hytrain.recipe.config import Recipe
from hytrain.recipe.journal import History
from hytrain.recipe.model import decay_groups
from hytrain.statistics import Statistics

ROOT: Final = Path(__file__).resolve().parent.parent
RECIPE: Final = ROOT / "examples" / "demo.yaml"
PLAIN: Final = "torch"
EIGHT_BIT: Final = "bitsandbytes, 8-bit moments, no masters"
#: System -> what it changes in the recipe.
BF16: Final = ["model.dtype=bfloat16"]
SYSTEMS: Final[dict[str, list[str]]] = {
    PLAIN: [],
    "HyTrain": [],
    "HyTrain bf16": BF16,
    "HyTrain bf16, bf16 moments": [*BF16, "optimizer.state_dtype=bfloat16"],
    "HyTrain bf16, float8 moments": [*BF16, "optimizer.state_dtype=float8"],
    "HyTrain bf16, bf16 moments, no masters": [
        *BF16,
        "optimizer.state_dtype=bfloat16",
        "optimizer.master_dtype=bfloat16",
    ],
    EIGHT_BIT: BF16,
}
#: Colour and style of its lines.
STYLES: Final = dict(
    zip(
        SYSTEMS,
        (
            *(("#2b2d42", "-"), ("#c8553d", "--"), ("#588b8b", "-"), ("#e0a458", "-."), ("#3a6ea5", "--")),
            *(("#8f6593", ":"), ("#7d8597", "--")),
        ),
        strict=True,
    )
)
SMOOTHING: Final = 50
#: Validation losses are drawn from here on, where systems can be told apart.
LAST_PART: Final = 0.6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--recipe", type=Path, default=RECIPE, metavar="F.yaml")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[name for name in SYSTEMS if name != EIGHT_BIT]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=v")
    parser.add_argument("--picture", type=Path, metavar="OUT.png")
    parser.add_argument("--alone", choices=ALONE, help=argparse.SUPPRESS)  # one run, in this process
    arguments = parser.parse_args(argv)
    if arguments.alone:
        recipe, folder = config.load(arguments.recipe, arguments.overrides), arguments.folder
        loop.train(recipe, folder, lambda model, recipe: ALONE[arguments.alone](model, recipe, folder), terminal=False)
        return
    found: dict[str, dict[int, History]] = {system: {} for system in arguments.systems}
    for seed in arguments.seeds:
        for system in arguments.systems:
            overrides = [*arguments.overrides, *SYSTEMS[system], f"run.seed={seed}"]
            folder = arguments.folder / re.sub(r"\W+", "-", f"{system}-{seed}")
            found[system][seed] = run(system, overrides, folder, arguments.recipe.resolve())
    print(table(found))
    if arguments.picture is not None:
        draw(found, arguments.picture)


def run(system: str, overrides: list[str], folder: Path, path: Path = RECIPE) -> History:
    """One run, unless the folder has it by now: what was interrupted goes on. `CalledProcessError` if it fails."""
    recipe, metrics = config.load(path, overrides), folder / "metrics.jsonl"
    before, own = History.read(metrics, recipe.train.steps), folder / "recipe.yaml"
    if before.validation and before.validation[-1][0] == recipe.train.steps:
        if own.exists() and own.read_text() == config.dump(recipe):
            return before
    sets = [word for override in overrides for word in ("--set", override)]
    if system in ALONE:
        command = [sys.executable, "-m", "benchmarks.curves", str(folder), "--alone", system, "--recipe", str(path)]
        command += sets
    else:
        launcher = str(ROOT / "bin" / "hytrain-cluster")
        command = [sys.executable, launcher, str(path), "--run-dir", str(folder), *sets]
    print(f"{system}: {' '.join(overrides)} …", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    own.write_text(config.dump(recipe))  # as the launcher has done
    return History.read(metrics, recipe.train.steps)


# ---------------------------------------------------------------- without HyTrain


class InOneProcess(torch.optim.Optimizer):
    """What the recipe's loop needs of an optimizer besides its update, which the other base makes."""

    def __init__(self, recipe: Recipe, folder: Path, groups: list[dict[str, Any]], **options: Any) -> None:
        train = recipe.train
        super().__init__(groups, lr=train.lr, betas=train.betas, eps=train.eps, **options)  # type: ignore[call-arg]
        self._max_norm = train.max_grad_norm
        self.grad_norm: Tensor | None = None
        self.loss_scale: Tensor | None = None
        self._metrics = folder / "metrics.jsonl"
        self._metrics.write_text("")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._max_norm is not None:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            self.grad_norm = nn.utils.clip_grad_norm_(weights, self._max_norm)
        super().step()

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def log(self, step: int, **numbers: float) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def statistics(self) -> Statistics:
        return Statistics()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def async_save(self, folder: Path) -> Future[None]:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "state.pt")
        saved = Future[None]()
        saved.set_result(None)
        return saved

    def load(self, folder: Path) -> None:
        self.load_state_dict(torch.load(folder / "state.pt"))

    def checkpoint_requested(self) -> bool:
        return False

    def processes(self) -> list[tuple[str, int, Sequence[int]]]:
        return [("trainer", os.getpid(), sorted(os.sched_getaffinity(0)))]


class Plain(InOneProcess, torch.optim.AdamW):
    """AdamW of torch alone. 16-bit weights have fp32 masters."""

    def __init__(self, model: nn.Module, recipe: Recipe, folder: Path) -> None:
        groups = decay_groups(model, recipe.train.weight_decay)
        self._weights: list[Tensor] = [weight for group in groups for weight in group["params"]]
        masters = {id(weight): weight.detach().float() for weight in self._weights if weight.dtype != torch.float32}
        for group in groups:
            group["params"] = [masters.get(id(weight), weight) for weight in group["params"]]
        self._masters: list[Tensor] = [master for group in groups for master in group["params"]]
        super().__init__(recipe, folder, groups, fused=True)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rounded = [
            (weight, master)
            for weight, master in zip(self._weights, self._masters, strict=True)
            if weight is not master
        ]
        for weight, master in rounded:
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        with torch.no_grad():
            for weight, master in rounded:
                weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in (*self._weights, *self._masters):
            weight.grad = None


def eight_bit(model: nn.Module, recipe: Recipe, folder: Path) -> InOneProcess:
    """bitsandbytes' AdamW with 8-bit moments over the model's own weights, without masters."""
    from bitsandbytes.optim import AdamW8bit

    kind = type("EightBit", (InOneProcess, AdamW8bit), {})
    made: InOneProcess = kind(recipe, folder, decay_groups(model, recipe.train.weight_decay))
    return made


#: What trains in one process, and how its optimizer is made.
ALONE: Final[dict[str, Callable[[nn.Module, Recipe, Path], Any]]] = {PLAIN: Plain, EIGHT_BIT: eight_bit}


# ---------------------------------------------------------------- what came of it


def table(found: dict[str, dict[int, History]]) -> str:
    """Final validation losses by seed, their mean and spread; how far each system's losses are from the first one's."""
    body = []
    base = next(iter(found.values()))
    for system, runs in found.items():
        final = [history.validation[-1][1] for history in runs.values()]
        apart = max(
            abs(mine[1] - theirs[1])
            for seed, history in runs.items()
            for mine, theirs in zip(history.training, base[seed].training, strict=True)
        )
        spread = statistics.stdev(final) if len(final) > 1 else 0.0
        each = ", ".join(number(value, 4) for value in final)
        body.append([system, each, number(statistics.mean(final), 4), number(spread, 4), f"{apart:.4g}"])
    head = ("system", "final validation loss, by seed", "mean", "standard deviation", "largest distance of a step")
    return markdown(head, body)


def draw(found: dict[str, dict[int, History]], path: Path) -> None:
    """Training losses, smoothed, and the last validation losses of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (whole, end) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2))
    for system, runs in found.items():
        colour, style = STYLES[system]
        for index, history in enumerate(runs.values()):
            name = system if index == 0 else None
            steps, losses = zip(*((step, loss) for step, loss, _ in history.training), strict=True)
            whole.plot(steps, smoothed(losses), linestyle=style, color=colour, label=name)
            last = [each for each in history.validation if each[0] > LAST_PART * history.validation[-1][0]]
            end.plot(*zip(*last, strict=True), linestyle=style, color=colour)
    whole.set(xlabel="step", ylabel="nats per token", title=f"training loss, mean of {SMOOTHING} steps")
    end.set(xlabel="step", title="validation loss, at the end")
    whole.legend(frameon=False)
    for axes in (whole, end):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last steps."""
    return [statistics.fmean(losses[max(0, at - SMOOTHING + 1) : at + 1]) for at in range(len(losses))]


if __name__ == "__main__":
    main()
