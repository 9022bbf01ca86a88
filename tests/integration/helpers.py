"""Small models, fixed batches, the plain PyTorch loop to compare with, and programs to run.

    same seed ─▶ model ─ hytrain.AdamW, three processes ─▶ weights ┐
              ─▶ model ─ Reference, this process alone  ─▶ weights ┴─ equal in every bit

All sizes are multiples of 16 elements: torch's fused AdamW computes the rest of a tensor in another way.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hytrain
from hytrain.kernels.split import split
from hytrain.recipe import config, loop, report
from hytrain.recipe.config import Recipe
from hytrain.recipe.optimizer import hytrain_adamw
from hytrain.recipe.report import Summary
from hytrain.step.health import Health
from workers.records import LOG_PATIENCE_STEPS

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
CLUSTER = ROOT / "bin" / "hytrain-cluster"
VOCAB = 256
LR = 1e-2


# ---------------------------------------------------------------- models and batches


def gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 120 k parameters, dropout on, the embedding tied to the head."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=48, n_layer=3, n_head=4, n_positions=32, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(dtype).train()


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 150 k parameters, untied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        vocab_size=VOCAB,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


def perceptron(width: int = 32, depth: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A few blocks of a Linear and a Tanh: the quickest model with more than one layer."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]).to(dtype)


class Poisoned(nn.Module):
    """A perceptron, or another model, with gradients that are inf or NaN in chosen steps. The loop sets `step`.

    `poison` has for each such step the number of the parameter, and the value.
    """

    def __init__(self, body: nn.Module, poison: dict[int, tuple[int, float]]) -> None:
        super().__init__()
        self.body, self.poison, self.step = body, poison, 0
        for index, parameter in enumerate(body.parameters()):
            parameter.register_hook(partial(self._poison, index))

    def _poison(self, index: int, gradient: Tensor) -> Tensor | None:
        where, value = self.poison.get(self.step, (-1, 0.0))
        return gradient.index_fill(0, torch.tensor([1]), value) if where == index else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def in_parts(model: nn.Module, step: int) -> Tensor:
    """As `square_loss`, but the model itself is never called, only its children."""
    x = vectors(step)
    for block in model.children():
        x = block(x)
    loss: Tensor = (x - vectors(step).sin()).square().mean()
    return loss


def scale_by_hand(model: nn.Module, opt: Any, factor: float = 0.5) -> None:
    """Write weights as `import_weights` wants it announced."""
    if isinstance(opt, hytrain.AdamW):
        opt.synchronize()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    opt.import_weights()


def tokens(step: int, batch: int = 4, length: int = 16) -> Tensor:
    """The batch of one step, int64 (batch, length)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (batch, length), generator=generator)


def vectors(step: int, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """The batch of one step for `perceptron`, (8, width)."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)


def language_loss(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step)
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def square_loss(model: nn.Module, step: int) -> Tensor:
    x = vectors(step, dtype=next(model.parameters()).dtype)
    loss: Tensor = (model(x) - x.sin()).float().square().mean()
    return loss


# ---------------------------------------------------------------- training


class Reference(torch.optim.AdamW):
    """torch's fused AdamW in this process; bfloat16 parameters have float32 masters, rounded half up."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]] | None = None, **options: Any) -> None:
        groups = groups or [{"params": list(model.parameters())}]
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        copies = [{**group, "params": [self._master(p) for p in group["params"]]} for group in groups]
        super().__init__(copies, **options, fused=True)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype is torch.float32:
            return parameter
        self.master_of[parameter] = nn.Parameter(parameter.detach().float())
        return self.master_of[parameter]

    def step(self, closure: Any = None) -> Any:
        for parameter, master in self.master_of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        result = super().step(closure)
        with torch.no_grad():
            for parameter, master in self.master_of.items():
                parameter.copy_(split(master.detach())[0])
        return result

    def import_weights(self) -> None:
        """Make written weights the masters."""
        for parameter, master in self.master_of.items():
            master.data.copy_(parameter.data)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for parameter in self.master_of:
            parameter.grad = None


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: Iterable[int],
    loss_of: Callable[[nn.Module, int], Tensor] = language_loss,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """The loop that any PyTorch user would write; dropout depends on the step alone. Returns the losses."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def same_as_torch(
    run: Callable[[Any, Any], object],
    make: Callable[[], nn.Module] = perceptron,
    groups_of: Callable[[nn.Module], list[dict[str, Any]] | None] = lambda model: None,
    **options: Any,
) -> None:
    """`run(model, optimizer)` returns the same as with torch's fused AdamW, and leaves the same weights."""
    ours, theirs = make(), make()
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    numbers = {"lr": LR, **{name: options[name] for name in names if name in options}}
    expected = run(theirs, Reference(theirs, groups_of(theirs), **numbers))
    with adamw(ours, groups_of(ours), **options) as opt:
        assert run(ours, opt) == expected
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []


def same_bits(run: Callable[[Any, Any], object], make: Callable[[], nn.Module], *choices: dict[str, Any]) -> None:
    """`run(model, optimizer)` leaves the same state and weights, whatever the options."""
    results = []
    for options in choices:
        model = make()
        with adamw(model, **options) as opt:
            run(model, opt)
            results.append(state(opt) | weights(model))
        assert differing(results[-1], results[0]) == [], options


@contextmanager
def adamw(model: nn.Module, *arguments: Any, **options: Any) -> Iterator[hytrain.AdamW]:
    """`hytrain.AdamW` at this project's learning rate, closed at the end."""
    opt = hytrain.AdamW(model, *arguments, **{"lr": LR, **options})
    _began[opt] = (opt.run_dir / "metrics.jsonl").stat().st_size
    try:
        yield opt
    except BaseException:
        for pid in (opt._session._cluster.optimizer_pid, opt._session._cluster.coordinator_pid):
            with suppress(psutil.Error):
                psutil.Process(pid).resume()  # closing waits for what a stopped one still has to do
        raise
    finally:
        opt.close()


def process(opt: hytrain.AdamW, role: str) -> psutil.Process:
    """The process of a role that serves this optimizer."""
    [found] = [pid for known, pid, _ in opt.processes() if known == role]
    return psutil.Process(found)


#: How long the run's records were when an optimizer joined it.
_began: weakref.WeakKeyDictionary[hytrain.AdamW, int] = weakref.WeakKeyDictionary()


def records(opt: hytrain.AdamW) -> list[dict[str, Any]]:
    """The optimizer's records until now."""
    with (opt.run_dir / "metrics.jsonl").open() as file:
        file.seek(_began[opt])
        *lines, _ = file.read().split("\n")
    return [json.loads(line) for line in lines]


def wait_for_coordinator(opt: hytrain.AdamW) -> None:
    """Return once the coordinator has heard of the last steps: then it plans for them, however slow it is."""
    due, ends_s = opt.statistics().step - LOG_PATIENCE_STEPS, time.monotonic() + 60.0
    while due > 0 and _newest_step(opt) != due:
        assert time.monotonic() < ends_s, f"no record of step {due}"
        time.sleep(0.001)


def _newest_step(opt: hytrain.AdamW) -> int | None:
    metrics = opt.run_dir / "metrics.jsonl"
    with metrics.open("rb") as file:
        file.seek(max(_began[opt], metrics.stat().st_size - 4096))
        *lines, _ = file.read().split(b"\n")
    return json.loads(lines[-1])["step"] if lines else None


def on_waiting(patch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with what is waited for, before each wait for an update."""
    wait_for = Health.wait_for

    def told(self: Health, happened: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        act(what)
        wait_for(self, happened, what, timeout_s)

    patch.setattr(Health, "wait_for", told)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, without passing through HyTrain's hooks."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def state(opt: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the optimizer's state, `exp_avg.3` and so on."""
    entries = opt.state_dict()["state"].items()
    return {f"{plane}.{index}": tensor.clone() for index, entry in entries for plane, tensor in entry.items()}


def saved_and_loaded(saved: Any) -> Any:
    """What `torch.save` and `torch.load` make of it."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=not isinstance(saved, nn.Module))


def keep(opt: hytrain.AdamW, form: str, folder: Path) -> Callable[[hytrain.AdamW], object]:
    """Keep the state in `form`, "files" or "dictionary"; what loads it."""
    if form == "files":
        opt.save(folder)
        return lambda other: other.load(folder)
    saved = saved_and_loaded(opt.state_dict())
    return lambda other: other.load_state_dict(saved)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """What differs in any bit: names, and how many elements. NaN equals itself."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    found = []
    for name, a in one.items():
        b = other[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        unequal = int((bits(a) != bits(b)).sum())
        if unequal:
            found.append(f"{name}: {unequal} of {a.numel()}")
    return found


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bit patterns."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


# ---------------------------------------------------------------- programs


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, to its end; its output as text."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240, **options)


def cluster(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`bin/hytrain-cluster`, to its end."""
    return run(sys.executable, CLUSTER, *arguments, **options)


def environment(**changed: str | None) -> dict[str, str]:
    """This process's environment, changed; None takes a variable away."""
    values = {**os.environ, **changed}
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def started(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes for its input and output, which is gone at the end."""
    words = [str(word) for word in command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    with subprocess.Popen(words, text=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], start: str) -> str:
    """The first line of its output that begins with `start`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"it ended before it said {start!r}: {''.join(lines)}")


def go_on(process: subprocess.Popen[str]) -> None:
    """Let a paused script go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def role_of(process: psutil.Process) -> str:
    """ "launcher", "optimizer", "coordinator" by the module that runs, else the program's own name."""
    words = process.cmdline()
    for word in words:
        if word.startswith("workers."):
            return word.removeprefix("workers.")
    return "launcher" if str(CLUSTER) in words else Path(words[-1] if len(words) == 1 else words[1]).stem


def roles_below(process: psutil.Process) -> dict[str, psutil.Process]:
    """The children of a process, by role."""
    children = process.children()
    found = {role_of(child): child for child in children}
    assert len(found) == len(children), [child.cmdline() for child in children]
    return found


def train_recipe(recipe: Path, run_dir: Path, *overrides: str) -> Summary:
    """Train a recipe in this process, with a run of its own in `run_dir`."""
    made: list[hytrain.AdamW] = []

    def make(model: nn.Module, recipe: Recipe) -> Any:
        made.append(hytrain_adamw(model, recipe))  # type: ignore[arg-type]
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYTRAIN_RUN_DIR", str(run_dir))
        patch.setattr(report, "draw_curve", lambda *arguments: None)  # matplotlib keeps its fonts open
        run_dir.mkdir(exist_ok=True)
        try:
            return loop.train(config.load(recipe, overrides), run_dir, make, terminal=False)
        finally:
            for opt in made:
                opt.close()


def write_recipe(folder: Path, **changes: Any) -> Path:
    """A recipe for a small GPT-2 on a few kilobytes of text, its sections updated by `changes`."""
    words = ["the", "people", "of", "these", "states", "shall", "prosper"]
    (folder / "text.txt").write_text(" ".join(words[(i * i + i // 7) % 7] for i in range(3000)))
    sections: dict[str, Any] = {
        "run": {"seed": 3, "threads": 1},
        "model": {
            "config": {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32},
            "dtype": "bfloat16",
        },
        "data": {"paths": ["text.txt"], "sequence_length": 32, "batch_size": 4},
        "train": {"steps": 60, "lr": 1e-2, "warmup_steps": 5, "eval_batches": 1, "device": "cpu"},
        "optimizer": {"k": 0.3},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path
