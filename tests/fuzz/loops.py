"""Searches for a training loop that HyTrain runs differently from torch without a word.

    python -m tests.fuzz.loops --programs 20000 --seed 1 [--jobs N]
    python -m tests.fuzz.loops --program 17 --seed 1          one again, with its steps

    seed, number ─▶ a program of what loops do ─┬─▶ torch's optimizer    ─▶ what it saw, its weights ┐
                                                └─▶ HyTrain, some options ─▶ the same │ a refusal     ┴─ compared

A program is a list of actions, which are drawn in the order of usual loops, with some put where nobody expects them. If
HyTrain refuses an action, training either cannot go on, and says so, or the weights are those of torch before it, with
the step's update or without. Exit status 1 if anything else comes out.
"""

from __future__ import annotations

import argparse
import collections
import copy
import os
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import hytrain
from hytrain.config import CLUSTER_VARIABLE, ClusterConfig
from hytrain.errors import HyTrainError
from hytrain.optim import Optimizer
from hytrain.run.cluster import PrivateCluster

LR: Final = 1e-2
WIDTHS: Final = (16, 7)
#: Said where some updates were made and others were not.
ENDS: Final = "training cannot go on"
#: Said by autograd of a graph from before an update. torch's fused optimizers do not count their writes.
CHANGED: Final = "modified by an inplace operation"


class Loop:
    """A model, its optimizer, and what the program has seen so far."""

    def __init__(self, width: int, opt_of: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model = nn.Sequential(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh()),
            nn.Sequential(nn.Linear(2 * width, width), nn.Tanh()),
        )
        self.opt = opt_of(self.model)
        self.saved: Any = None
        self.graph: Tensor | None = None

    @property
    def is_ours(self) -> bool:
        return isinstance(self.opt, Optimizer)

    def batch(self, number: int) -> Tensor:
        return torch.randn(4, self.width, generator=torch.Generator().manual_seed(number))

    def without_update(self, held: bool) -> AbstractContextManager[Any]:
        return self.opt.no_sync() if held and self.is_ours else nullcontext()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------- actions

Action = Callable[..., object]


def backward(loop: Loop, number: int, part: str, retain: bool, held: bool) -> object:
    x = loop.batch(number)
    with loop.without_update(held):
        output = loop.model[0](x) if part == "first" else loop.model(x)
        loss = output.square().mean()
        loss.backward(retain_graph=retain)
    loop.graph = loss if retain else None
    return loss.item()


def backward_again(loop: Loop) -> None:
    """Through a graph that was retained."""
    if loop.graph is not None:
        loss, loop.graph = loop.graph, None
        loss.backward()


def drop(loop: Loop, how: str) -> None:
    match how:
        case "opt":
            loop.opt.zero_grad()
        case "model":
            loop.model.zero_grad()
        case "some":
            for parameter in list(loop.model.parameters())[::2]:
                parameter.grad = None


def scale(loop: Loop, factor: float) -> None:
    for gradient in loop.gradients():
        gradient.mul_(factor)


def clip(loop: Loop, to: float) -> object:
    return nn.utils.clip_grad_norm_(loop.model.parameters(), to).item()


def clip_values(loop: Loop, to: float) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), to)


def read(loop: Loop) -> object:
    return [None if p.grad is None else p.grad.abs().sum().item() for p in loop.model.parameters()]


def write_a_view(loop: Loop) -> None:
    for gradient in loop.gradients():
        gradient.view(-1)[0] = 0.125


def set_by_hand(loop: Loop, every: int) -> None:
    for parameter in list(loop.model.parameters())[::every]:
        parameter.grad = torch.full_like(parameter, 0.01)


def add_noise(loop: Loop) -> None:
    for index, gradient in enumerate(loop.gradients()):
        gradient.add_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(index)))


def set_rate(loop: Loop, rate: float) -> None:
    for group in loop.opt.param_groups:
        group["lr"] = rate


def step(loop: Loop) -> None:
    loop.opt.step()


def step_with_closure(loop: Loop, number: int) -> object:
    def closure() -> Tensor:
        loop.opt.zero_grad()
        loss: Tensor = loop.model(loop.batch(number)).square().mean()
        loss.backward()
        return loss

    return loop.opt.step(closure).item()


def save_state(loop: Loop) -> None:
    loop.saved = copy.deepcopy(loop.opt.state_dict()), copy.deepcopy(loop.model.state_dict())


def load_state(loop: Loop) -> None:
    if loop.saved is not None:
        loop.model.load_state_dict(loop.saved[1])
        loop.opt.load_state_dict(loop.saved[0])


def write_weights(loop: Loop) -> None:
    with torch.no_grad():
        torch._foreach_mul_([*loop.model.parameters()], 0.99)  # all at once, so that what is refused is not half done


def evaluate(loop: Loop) -> object:
    loop.model.eval()
    with torch.no_grad():
        seen = loop.model(loop.batch(99)).sum().item()
    loop.model.train()
    return seen


def norm(loop: Loop) -> object:
    return [parameter.detach().norm().item() for parameter in loop.model.parameters()]


def copied(loop: Loop) -> object:
    with torch.no_grad():
        return copy.deepcopy(loop.model)(loop.batch(98)).sum().item()


def freeze(loop: Loop, part: int, on: bool) -> None:
    loop.model[part].requires_grad_(not on)


def log(loop: Loop) -> None:
    if loop.is_ours:
        loop.opt.log(loop.opt.statistics().step, number=1.0)


def hook(loop: Loop) -> None:
    next(loop.model.parameters()).register_hook(lambda gradient: gradient * 0.5)


#: What may stand anywhere, with how its arguments are drawn.
ANYWHERE: Final[list[tuple[Action, Callable[[random.Random], tuple[Any, ...]]]]] = [
    (backward_again, lambda draw: ()),
    (drop, lambda draw: (draw.choice(["opt", "model", "some"]),)),
    (scale, lambda draw: (draw.choice([0.5, 2.0]),)),
    (clip, lambda draw: (draw.choice([1e-3, 10.0]),)),
    (clip_values, lambda draw: (1e-3,)),
    (read, lambda draw: ()),
    (write_a_view, lambda draw: ()),
    (set_by_hand, lambda draw: (draw.choice([1, 2]),)),
    (add_noise, lambda draw: ()),
    (set_rate, lambda draw: (draw.choice([LR / 2, LR * 2]),)),
    (step, lambda draw: ()),
    (step_with_closure, lambda draw: (draw.randrange(50),)),
    (save_state, lambda draw: ()),
    (load_state, lambda draw: ()),
    (write_weights, lambda draw: ()),
    (evaluate, lambda draw: ()),
    (norm, lambda draw: ()),
    (copied, lambda draw: ()),
    (freeze, lambda draw: (draw.randrange(2), draw.random() < 0.5)),
    (log, lambda draw: ()),
    (hook, lambda draw: ()),
]


@dataclass(frozen=True)
class Program:
    """Actions with their arguments, and what the optimizer is made with."""

    algorithm: str
    width: int
    options: dict[str, Any]
    actions: list[tuple[Action, tuple[Any, ...]]]

    @classmethod
    def drawn(cls, seed: int, number: int) -> Program:
        draw = random.Random(f"{seed}-{number}")
        held, retains, backwards = draw.random() < 0.4, draw.random() < 0.3, draw.choice([1, 1, 1, 2, 3])
        options = {
            "k": draw.choice([0.0, 0.5, 1.0]),
            "overlap": draw.random() < 0.8,
            "grad_accumulation": backwards if draw.random() < 0.5 else 1,
            "accumulate_on": draw.choice(["device", "host", "auto"]),
            "updates": draw.choice(["backward", "step", "auto"]),
        }
        actions: list[tuple[Action, tuple[Any, ...]]] = []
        for turn in range(draw.randint(2, 4)):
            for part in range(backwards):
                where = draw.choices(["all", "first"], [5, 1])[0]
                actions.append((backward, (10 * turn + part, where, retains, held and draw.random() < 0.9)))
            actions += [(step, ()), (drop, (draw.choices(["opt", "model"], [4, 1])[0],))]
        for _ in range(draw.randrange(5)):
            action, arguments = draw.choice(ANYWHERE)
            actions.insert(draw.randrange(len(actions) + 1), (action, arguments(draw)))
        return cls(draw.choice(["AdamW", "SGD"]), draw.choice(WIDTHS), options, actions)

    def torchs(self, model: nn.Module) -> Any:
        if self.algorithm == "SGD":
            return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def ours(self, model: nn.Module) -> Any:
        numbers = {"lr": LR, "momentum": 0.9} if self.algorithm == "SGD" else {"lr": LR}
        return getattr(hytrain, self.algorithm)(model, **numbers, **self.options)

    def __str__(self) -> str:
        lines = [f"  {action.__name__}{arguments}" for action, arguments in self.actions]
        return "\n".join([f"{self.algorithm}, width {self.width}, {self.options}", *lines])


# ---------------------------------------------------------------- the comparison


def examine(program: Program) -> tuple[str, str | None]:
    """How HyTrain runs it: "the same", "refused" with the sentence, or "DIFFERENT" with what differs."""
    reference = Loop(program.width, program.torchs)
    expected, before = list[object](), list[Callable[[], list[list[Tensor]]]]()
    actions = program.actions
    for index, (action, arguments) in enumerate(actions):
        before.append(_weights_around(reference))
        try:
            expected.append(action(reference, *arguments))
        except RuntimeError:  # what torch itself refuses is no program
            actions = actions[:index]
            break
    loop = Loop(program.width, program.ours)
    try:
        for index, (action, arguments) in enumerate(actions):
            try:
                seen = action(loop, *arguments)
            except (HyTrainError, RuntimeError) as refusal:
                if not isinstance(refusal, HyTrainError) and CHANGED not in str(refusal):
                    raise
                return _refused(loop, str(refusal), before[index]())
            if repr(seen) != repr(expected[index]):
                return "DIFFERENT", f"action {index}, {action.__name__}: {seen} in place of {expected[index]}"
        if not loop.opt._engine.between_steps:  # a step was begun in backward, and is ended or refused now
            outcome, said = _refused(loop, "", _weights_around(reference)())
            return (outcome, said) if outcome == "DIFFERENT" else ("the same", None)
        loop.opt.close()
        if not _same(loop.weights(), reference.weights()):
            return "DIFFERENT", "the weights at the end"
        return "the same", None
    finally:
        loop.opt.close()


def _weights_around(loop: Loop) -> Callable[[], list[list[Tensor]]]:
    """What gives the weights of now, without the step's update and with it."""
    weights, state = loop.weights(), copy.deepcopy(loop.opt.state_dict())
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in loop.model.parameters()]

    def both() -> list[list[Tensor]]:
        loop.graph = None  # it cannot be copied, and nobody comes back to it
        twin = copy.deepcopy(loop)
        for parameter, value, gradient in zip(twin.model.parameters(), weights, gradients, strict=True):
            parameter.data.copy_(value)
            parameter.grad = gradient
        twin.opt.load_state_dict(state)
        twin.opt.step()
        return [weights, twin.weights()]

    return both


def _refused(loop: Loop, sentence: str, weights: list[list[Tensor]]) -> tuple[str, str]:
    if ENDS in sentence:
        return "refused", sentence
    ended = ""
    try:
        loop.opt.step()  # the loop has dropped or set before what the updates were made with: now it is told
    except HyTrainError as error:
        ended = str(error)
    loop.opt.close()
    if ENDS in ended or any(_same(loop.weights(), each) for each in weights):
        return "refused", sentence
    return "DIFFERENT", f"harm was done by what is refused: {sentence}"


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- the search


@contextmanager
def run_for_all() -> Iterator[None]:
    """A run that one optimizer after another joins."""
    with tempfile.TemporaryDirectory() as folder:
        run = PrivateCluster(ClusterConfig(threads=1, run_dir=str(Path(folder, "run"))))
        os.environ[CLUSTER_VARIABLE] = run.cluster.socket_dir
        try:
            yield
        finally:
            del os.environ[CLUSTER_VARIABLE]
            run.close()


def search(seed: int, numbers: range) -> list[tuple[int, str, str | None]]:
    """What became of these programs."""
    torch.set_num_threads(1)
    found = list[tuple[int, str, str | None]]()
    with run_for_all():
        for number in numbers:
            try:
                found.append((number, *examine(Program.drawn(seed, number))))
            except Exception:
                found.append((number, "FAILED", traceback.format_exc()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.loops", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=int, help="only this one")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    if asked.program is not None:
        print(Program.drawn(asked.seed, asked.program))
        print(*search(asked.seed, range(asked.program, asked.program + 1))[0])
        return 0
    size = 100
    parts = [range(first, min(first + size, asked.programs)) for first in range(0, asked.programs, size)]
    outcomes, sentences, bad = collections.Counter[str](), collections.Counter[str](), 0
    with ProcessPoolExecutor(asked.jobs) as pool:
        for found in pool.map(search, [asked.seed] * len(parts), parts):
            for number, outcome, said in found:
                outcomes[outcome] += 1
                if outcome == "refused":
                    updates = Program.drawn(asked.seed, number).options["updates"]
                    sentences[updates + ": " + re.sub(r"\d\.\d\.\w+", "NAME", str(said))[:90]] += 1
                elif outcome != "the same":
                    bad += 1
                    print(f"program {number}: {outcome}: {said}", flush=True)
    for sentence, count in sentences.most_common():
        print(f"{count:7}  {sentence}")
    print(", ".join(f"{outcome}: {count:,}" for outcome, count in outcomes.most_common()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
