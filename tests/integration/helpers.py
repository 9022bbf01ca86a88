"""Training with HyTrain, the plain PyTorch loop to compare with, and the comparison.

same seed ─▶ model ─ hytrain.AdamW, three processes ─▶ weights ┐
          ─▶ model ─ Reference, this process alone  ─▶ weights ┴─ equal in every bit
"""

from __future__ import annotations

import io
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from small_models import language_loss, perceptron
from torch import Tensor, nn

import hytrain
from hytrain.kernels.split import split
from hytrain.memory.transfer import Copy, HostTransfers, Transfer
from hytrain.optim import Optimizer
from hytrain.step.health import Health
from workers.coordinate.records import LOG_PATIENCE_STEPS

LR = 1e-2
#: How long to wait for what must happen, if only that a run starts: on a busy machine, too, only a hang is late.
DEADLINE_S = 120.0


class OnMasters(torch.optim.Optimizer):
    """Makes of one of torch's optimizers one whose bfloat16 parameters have float32 masters, rounded half up."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]] | None = None, **options: Any) -> None:
        groups = groups or [{"params": list(model.parameters())}]
        self.master_of: dict[nn.Parameter, nn.Parameter] = {}
        copies = [{**group, "params": [self._master(p) for p in group["params"]]} for group in groups]
        super().__init__(copies, **options)

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


class Reference(OnMasters, torch.optim.AdamW):
    """torch's fused AdamW in this process."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]] | None = None, **options: Any) -> None:
        super().__init__(model, groups, **options, fused=True)


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
        seed(step)
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def wait_for(happened: Callable[[], object], meanwhile: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    """Return once it has happened. Fails if it does not."""
    ends_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < ends_s, f"it has not happened within {DEADLINE_S:.0f} s"
        meanwhile()


def train_until(
    happened: Callable[[], object],
    model: nn.Module,
    opt: hytrain.AdamW,
    first: int,
    loss_of: Callable[[nn.Module, int], Tensor] = language_loss,
) -> int:
    """Train from step `first` on until it has happened, however many steps that takes. Returns the next step.

    The coordinator hears of each step before the next one: it plans in time for them, however slow it is.
    """
    steps = itertools.count(first)

    def one_step() -> None:
        train(model, opt, [next(steps)], loss_of)
        wait_for_coordinator(opt)

    wait_for(happened, one_step)
    return next(steps)


def seed(number: int) -> None:
    """`torch.manual_seed`, which without CUDA would keep the caller's stack each time: a millisecond below pytest."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(number)


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


def scale_by_hand(model: nn.Module, opt: Any, factor: float = 0.5) -> None:
    """Write weights as `import_weights` wants it announced."""
    if isinstance(opt, hytrain.AdamW):
        opt.synchronize()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    opt.import_weights()


def adamw(params: Any, param_groups: Any = None, **options: Any) -> AbstractContextManager[hytrain.AdamW]:
    """`hytrain.AdamW` at this project's learning rate, closed at the end."""
    return opened(hytrain.AdamW, params, param_groups, **{"lr": LR, **options})


@contextmanager
def opened(kind: type[Optimizer], params: Any, param_groups: Any = None, **options: Any) -> Iterator[Any]:
    """An optimizer of HyTrain, closed at the end."""
    opt: Any = kind(params, param_groups=param_groups, **options)
    _began[opt] = time.monotonic()
    try:
        yield opt
    except BaseException:
        cluster = None if opt._started is None else opt._started.place.cluster
        for pid in () if cluster is None else (*cluster.optimizer_pids, cluster.coordinator_pid):
            with suppress(psutil.Error):
                psutil.Process(pid).resume()  # closing waits for what a stopped one still has to do
        raise
    finally:
        opt.close()


def process(opt: hytrain.AdamW, role: str) -> psutil.Process:
    """The process of a role that serves this optimizer."""
    [found] = [pid for known, pid, _ in opt.processes() if known == role]
    return psutil.Process(found)


#: When an optimizer had joined its run, which others may have joined before.
_began: weakref.WeakKeyDictionary[hytrain.AdamW, float] = weakref.WeakKeyDictionary()


def records(opt: hytrain.AdamW, least: int = 0) -> list[dict[str, Any]]:
    """The optimizer's records, once there are so many: the coordinator writes the last when it hears of the end."""
    ends_s = time.monotonic() + DEADLINE_S
    while True:
        *lines, _ = _metrics(opt).read_text().split("\n")
        found = [record for record in map(json.loads, lines) if record["at_s"] > _began[opt]]
        if len(found) >= least:
            return found
        assert time.monotonic() < ends_s, f"{len(found)} records"
        time.sleep(0.001)


def _metrics(opt: hytrain.AdamW) -> Path:
    rank = opt._session.place.rank
    return opt.run_dir / (f"metrics-{rank}.jsonl" if rank else "metrics.jsonl")


def wait_for_coordinator(opt: hytrain.AdamW) -> None:
    """Return once the coordinator has heard of the last steps: then it plans for them, however slow it is.

    Before step 5 it returns at once, since no record is written yet that shows what was heard.
    """
    due, ends_s = opt.statistics().step - LOG_PATIENCE_STEPS, time.monotonic() + DEADLINE_S
    while due > 0 and _newest_step(opt) != due:
        assert time.monotonic() < ends_s, f"no record of step {due}"
        time.sleep(0.001)


def _newest_step(opt: hytrain.AdamW) -> int | None:
    if not _metrics(opt).exists():  # it comes with the first record
        return None
    with _metrics(opt).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        *lines, _ = file.read().split(b"\n")
    newest = json.loads(lines[-1]) if lines else None
    return None if newest is None or newest["at_s"] < _began[opt] else newest["step"]


def on_waiting(patch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with what is waited for, before each wait for an update."""
    wait_for = Health.wait_for

    def told(self: Health, happened: Callable[[], bool], what: str) -> None:
        act(what)
        wait_for(self, happened, what)

    patch.setattr(Health, "wait_for", told)


@contextmanager
def late_weights() -> Iterator[threading.Event]:
    """New weights arrive from the CPU only while somebody waits for an update, or once the event is set.

    So no read of weights that nobody has waited for passes by luck.
    """
    gate, weights_in, wait_for = threading.Event(), HostTransfers.weights_in, Health.wait_for

    def late(self: HostTransfers, copies: Sequence[Copy]) -> Transfer:
        assert gate.wait(DEADLINE_S)
        return weights_in(self, copies)

    def waiting(self: Health, *arguments: Any, **options: Any) -> None:
        gate.set()
        try:
            wait_for(self, *arguments, **options)
        finally:
            gate.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfers, "weights_in", late)
        patch.setattr(Health, "wait_for", waiting)
        try:
            yield gate
        finally:
            gate.set()


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
        unequal = int((bits(a.cpu()) != bits(b.cpu())).sum())
        if unequal:
            found.append(f"{name}: {unequal} of {a.numel()}")
    return found


def same(one: object, other: object) -> bool:
    """Whether two results are equal in every bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bit patterns."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])
