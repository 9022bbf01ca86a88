"""Co-training: the parts of each batch, some of which the CPU trains beside the GPU. `cotrain` makes one.

    part      0    1    …  n-2-c   n-1-c  …  n-2   n-1
    who      GPU  GPU   …   GPU     CPU   …  CPU   GPU        c parts for the CPU; the last one starts the updates
                ▲ all updates have ended: the CPU trainer gets the weights and its parts

The gradients are summed in the order of the parts, whoever computed them, so who did changes no bit that the two of
them compute alike. Each part has a seed of its own, so dropout does not depend on it either. If the CPU trainer is
lost, the trainer computes its parts.

Of HyTrain's optimizer it needs two calls: `lend_weights` and `add_gradients`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.studies.cotraining.partner import WORKER, Partner
from examples.studies.cotraining.planner import CpuPartsPlanner, Step
from examples.studies.cotraining.told import Told
from examples.studies.cotraining.work import moved, named, seed_of
from hytrain.config import ClusterConfig
from hytrain.errors import CapacityError, ClusterError, ConfigError, UnsupportedError, UsageError
from hytrain.memory.capacity import host_bound
from hytrain.memory.clock import Clock, CudaClock, HostClock, Mark, Span
from hytrain.memory.lending import TRAINED, Loan
from hytrain.model.layers import clean
from hytrain.optim import Optimizer
from hytrain.readable import gib
from hytrain.tensors import is_distributed

#: With "auto", the CPU computes a part that is not used, to see how long it takes: after 1, 2, 4, 8, … steps.
FIRST_TRIAL: Final = 1
_NONE: Final = 0  # no job has this number

_log = logging.getLogger(__name__)


def cotrain(
    opt: Optimizer,
    model: nn.Module,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    parts: int,
    cpu_parts: int | str = "auto",
) -> CoTraining:
    """Let a process on the CPU train some micro-batches of each step, beside the model's device.

    The gradients are summed in the order of the micro-batches, whoever computed them. The process has the weights
    where the optimizer process keeps them. It ends with what this returns, or with the trainer.

    Args:
        opt: HyTrain's optimizer of `model`.
        model: What is trained.
        build: Makes the model anew, without arguments. The CPU trainer calls it on the meta device, so the model takes
            no memory there, and gives it the weights, buffers and modes of this one.
        loss: Gets a model and a micro-batch, and returns what to call `backward()` on, shape (). Divide it by the
            number of micro-batches yourself.
        parts: The number of micro-batches of a step.
        cpu_parts: How many of them the CPU trains: fewer than `parts`, or "auto" for as many as make steps shortest,
            often none.

    `build` and `loss` are functions of modules that can be imported, or `functools.partial`s of them with numbers,
    strings, lists and dictionaries; the CPU trainer imports them by name.

    Returns:
        An object whose `backward(batches)` takes the place of the step's backwards.

    Raises:
        ConfigError: A function cannot be imported, or a number does not fit.
        UnsupportedError: A CPU trainer cannot train this: on several ranks, with `loss_scale`.
        CapacityError: Host memory has no room for the gradients of so many parts.
        ClusterError: The CPU trainer does not start: `build` makes another model, for example. With "auto", the log
            says so.
    """
    require_shareable(opt, model)
    work = check(build, loss, parts=parts, cpu_parts=cpu_parts)
    return CoTraining(opt, model, loss, work, parts=parts, cpu_parts=cpu_parts)


class CoTraining:
    """Trains batches in parts, as many of which on the CPU as was asked for.

    `say` gets a sentence when it decides on a number of parts, and if the CPU trainer is lost; if None, the log does.
    `numbers` has how the last step was shared, for the loop's log: `cpu_parts`, and once it is known how many seconds a
    part takes on both, `gpu_part_s` and `cpu_part_s`.
    """

    def __init__(
        self,
        opt: Optimizer,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        work: dict[str, Any],
        *,
        parts: int,
        cpu_parts: int | str,
    ) -> None:
        """Start the CPU trainer, unless the CPU is to train nothing. Raises what `cotrain` raises."""
        self.say: Callable[[str], None] | None = None
        self.numbers: dict[str, float] = {}
        self._opt, self._model, self._loss = opt, model, loss
        with opt.lend_weights() as lent:
            named = {clean(name): parameter for name, parameter in model.named_parameters()}
            trained = {name: each for name, each in named.items() if name in lent and lent[name].kind == TRAINED}
        self._device = next(iter(trained.values())).device
        self._clock: Clock = CudaClock(self._device) if self._device.type == "cuda" else HostClock()
        most = _most(parts, cpu_parts, sum(parameter.nbytes for parameter in trained.values()), host_bound(None))
        self._parts = parts
        self._planner = CpuPartsPlanner(parts, most) if cpu_parts == "auto" and most else None
        self._cpu_parts = 0 if cpu_parts == "auto" else int(cpu_parts)
        self._ended: _Ended | None = None  # the last step, whose time is known once the next one begins
        self._unread = deque[tuple[_Ended, float]]()  # steps that may still run on the device, and their seconds
        self._read: Step | None = None  # the last step that was read
        self._began_s = 0.0
        self._steps, self._next_trial, self._trial = 0, FIRST_TRIAL, _NONE
        self._is_warm = False
        self._partner: Partner | None = None
        self._lent: Loan | None = None
        self._close_partner: Callable[[], object] = lambda: None
        if most:
            self._told = Told(model, trained.keys())
            work = work | {
                "evaluated": self._told.evaluated,
                "path": [each for each in sys.path if isinstance(each, str)],
            }
            cores, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
            if self._device.type == "cuda":
                [cores] = [list(of) for role, _, of in opt.processes() if role == "optimizer"]
                threads = len(cores)
            try:
                self._partner = Partner(
                    work,
                    {name: torch.empty_like(each, device="meta") for name, each in trained.items()},
                    self._told.others,
                    device=self._device,
                    slots=most,
                    cores=cores,
                    threads=threads,
                    log=opt.run_dir / "logs" / "cpu_trainer-0.log",
                    answer_timeout_s=ClusterConfig.resolve().hang_timeout_s,
                )
                close = self._close_partner = weakref.finalize(self, self._partner.close)
                close.atexit = False  # the process ends with this one
            except ClusterError as error:
                if self._planner is None:
                    raise
                _log.warning("the CPU trains no part: %s", error)

    @property
    def pid(self) -> int | None:
        """The CPU trainer's process ID; None if there is none, or if it is lost."""
        return None if self._partner is None or self._partner.lost else self._partner.pid

    def backward(self, batches: Sequence[Any]) -> Tensor:
        """Forward and backward of all parts of a step's batch: the last part's backward starts the updates.

        Call `opt.step()` and `opt.zero_grad()` after it, as after a backward.

        Args:
            batches: The micro-batches, at most `parts` of them, best in host memory: each what `loss` takes. Tensors of
                those that the CPU does not train are brought to the model's device.

        Returns:
            What `loss` returned for each of them, shape (len(batches),), float32, on the model's device.

        Raises:
            UsageError: There are no micro-batches, or too many; or something has changed that the CPU trainer cannot
                know.
            UnsupportedError: A micro-batch cannot be sent to the CPU trainer. If `cpu_parts` is "auto" and the CPU had
                no part of the last step, neither of these two is raised: training goes on without the CPU trainer.
        """
        count = len(batches)
        if not 0 < count <= self._parts:
            raise UsageError(f"backward() got {count} micro-batches: from 1 to parts={self._parts}")
        self._begin(batches[0])
        last = count - 1
        cpu_parts = min(self._cpu_parts, last)
        first = last - cpu_parts
        losses, own, adds = torch.zeros(count, device=self._device), dict[int, Span](), list[Span]()
        began, seconds = self._clock.mark(), list[float]()

        def train(index: int) -> None:
            before = self._clock.mark()
            with self._seeded(index):
                loss = self._loss(self._model, moved(batches[index], self._device))
                loss.backward()
            losses[index] = loss.detach()
            own[index] = before, self._clock.mark()

        with self._opt.no_sync():
            for index in range(first)[:1]:
                train(index)
            jobs = self._hand_over({index: batches[index] for index in range(first, last)})
            for index in range(first)[1:]:
                train(index)
            for slot, (index, job) in enumerate(jobs.items()):
                assert self._partner is not None, "it has jobs"
                computed = self._partner.receive(job)
                before = self._clock.mark()
                if computed is None:
                    train(index)
                    continue
                gradients = self._partner.gradients(slot, computed)
                self._partner.taken = self._opt.add_gradients(gradients) or self._partner.taken
                losses[index] = computed.loss
                adds.append((before, self._clock.mark()))
                seconds.append(computed.seconds)
        self._take_back()
        train(last)
        if count == self._parts:
            self._ended = _Ended(
                cpu_part_s=fmean(seconds) if seconds else None,
                cpu_parts=cpu_parts,
                part=own[first - 1 if first else last],
                gap=(own[first - 1][1] if first else began, own[last][0]),
                adds=adds,
                marks=[began, *chain(*own.values(), *adds)],
            )
        self.numbers = {"cpu_parts": len(seconds)}
        if self._read is not None and self._read.cpu_part_s is not None:
            self.numbers |= {"gpu_part_s": self._read.gpu_part_s, "cpu_part_s": self._read.cpu_part_s}
        return losses

    @contextmanager
    def _seeded(self, part: int) -> Iterator[None]:
        """The random numbers of one part of this step. Those of the loop go on afterwards as if there had been none."""
        devices = [] if self._device.type == "cpu" else [self._device]
        seed = self._seed_of(part)
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                with torch.cuda.device(self._device):
                    torch.cuda.manual_seed(seed)
            yield

    def _seed_of(self, part: int) -> int:
        return seed_of(torch.initial_seed(), self._opt.statistics().step, part)

    def _hand_over(self, batches: Mapping[int, Any]) -> dict[int, int]:
        """Give parts to the CPU trainer, by their places in the batch. Returns their jobs."""
        if not batches:
            return {}
        assert self._partner is not None, "nobody else trains parts"
        parts = [(batch, self._seed_of(index)) for index, batch in batches.items()]
        self._lent = self._opt.lend_weights()
        return dict(zip(batches, self._partner.hand_over(self._lent, parts), strict=True))

    def _take_back(self) -> None:
        """The CPU trainer uses the weights no more, unless for a trial, of which only the time is used."""
        if self._lent is not None:
            self._lent.close()
            self._lent = None

    def _begin(self, part: Any) -> None:
        """A step begins: read what is known of those before, and choose the parts of this one."""
        now_s = time.monotonic()
        if self._ended is not None:
            self._unread.append((self._ended, now_s - self._began_s))
            self._ended = None
        self._began_s, self._steps = now_s, self._steps + 1
        while self._unread and all(map(self._clock.passed, self._unread[0][0].marks)):
            self._read = self._read_off(*self._unread.popleft())
            if self._planner is not None:
                self._planner.observe(self._read)
        if self._partner is None:
            return
        if self._partner.lost:
            self._go_on(f"the CPU trainer (process {self._partner.pid}) is lost: {self._partner.lost}")
            return
        try:
            self._told.require(self._partner.others, self._device)
            if self._planner is not None:
                self._choose(self._planner, self._partner, part)
        except (UsageError, UnsupportedError) as error:
            if self._planner is None or self._cpu_parts:  # with parts on the CPU, the last step may be wrong
                raise
            self._go_on(str(error))

    def _go_on(self, reason: str) -> None:
        self._tell(logging.WARNING, f"{reason}; from here on, all parts are trained without the CPU trainer")
        self.close()

    def _choose(self, planner: CpuPartsPlanner, partner: Partner, part: Any) -> None:
        """Plan, unless the CPU is trying out how long a part takes. That is a part of this step, computed twice."""
        while 0 < self._next_trial < self._steps:  # the CPU had parts then, or a trial was under way
            self._next_trial *= 2
        if self._trial == _NONE and self._cpu_parts == 0 and self._steps == self._next_trial:
            self._next_trial *= 2
            [self._trial] = self._hand_over({0: part}).values()
        if self._trial != _NONE:
            if (computed := partner.receive(self._trial, wait=False)) is None:
                return
            self._trial = _NONE
            if not self._is_warm:
                self._is_warm = True
                [self._trial] = self._hand_over({0: part}).values()
                return
            planner.observe_cpu(computed.seconds)
        if planner.decide():
            self._cpu_parts = planner.cpu_parts
            shared = f"the CPU trains {self._cpu_parts} of {self._parts} parts of each batch"
            self._tell(logging.INFO, f"{shared}, since {planner.why}")

    def _tell(self, level: int, sentence: str) -> None:
        sentence = f"step {self._opt.statistics().step + 1}: {sentence}"
        if self.say is None:
            _log.log(level, sentence)
        else:
            self.say(sentence)

    def _read_off(self, ended: _Ended, step_s: float) -> Step:
        adds_s = [self._clock.seconds(span) for span in ended.adds]
        step = Step(
            cpu_parts=ended.cpu_parts,
            step_s=step_s,
            gpu_part_s=self._clock.seconds(ended.part),
            cpu_part_s=ended.cpu_part_s,
            add_s=fmean(adds_s) if adds_s else 0.0,
            idle_s=max(self._clock.seconds(ended.gap) - sum(adds_s), 0.0),
        )
        self._clock.recycle(ended.marks)
        return step

    def close(self) -> None:
        """End the CPU trainer. From then on `backward` trains all parts without it."""
        self._partner, self._planner, self._cpu_parts = None, None, 0
        self._close_partner()


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step whose backwards are launched. Spans are on the trainer's device.

    `part`: one of its parts. `adds`: the CPU's gradients came into the sums. `gap`: between the other parts and the
    last one. `marks`: all of the step.
    """

    cpu_parts: int
    cpu_part_s: float | None
    part: Span
    gap: Span
    adds: list[Span]
    marks: list[Mark]


def require_shareable(opt: Optimizer, model: nn.Module) -> None:
    """Raises `UnsupportedError` or `UsageError` if no CPU trainer can train the optimizer's parameters."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") == WORKER:
        raise UsageError(
            "the CPU trainer has imported a script that trains: move the functions that cotrain() gets into a "
            "module of their own"
        )
    given = [parameter for group in opt.param_groups for parameter in group["params"]]
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if has_ranks or any(map(is_distributed, given)):
        raise UnsupportedError(
            "cotrain() with a sharded model: a CPU trainer needs all weights, and a rank has only a part of them"
        )
    if not {*map(id, given)} <= {*map(id, model.parameters())}:
        raise UnsupportedError("cotrain() with several modules: give the optimizer one module that has them")
    if opt.loss_scale is not None:
        raise UnsupportedError(
            "cotrain() with loss_scale: the CPU trainer does not know the scale; train in bfloat16, or leave it out"
        )


def check(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], *, parts: int, cpu_parts: int | str
) -> dict[str, Any]:
    """What the CPU trainer has to import, as JSON. Raises `ConfigError`."""
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ConfigError(f"parts is {parts!r}: the number of micro-batches of a step, at least 1")
    is_number = isinstance(cpu_parts, int) and not isinstance(cpu_parts, bool)
    if cpu_parts != "auto" and not (is_number and 0 <= int(cpu_parts) < parts):
        raise ConfigError(
            f'cpu_parts is {cpu_parts!r}: "auto", or from 0 to {parts - 1}, since the GPU trains the last of the parts'
        )
    return {"build": named("build", build), "loss": named("loss", loss)}


def _most(parts: int, cpu_parts: int | str, slot_bytes: int, host_bytes: int) -> int:
    """How many parts the CPU may train at most. Raises `CapacityError` if gradients of that many have no room."""
    room = max(host_bytes, 0) // max(slot_bytes, 1)
    if cpu_parts == "auto":
        if not room and parts > 1:
            _log.warning("the CPU trains no part: the gradients of one need %s of host memory", gib(slot_bytes))
        return min(parts - 1, room)
    if int(cpu_parts) > room:
        raise CapacityError(
            f"cpu_parts={cpu_parts} needs {gib(int(cpu_parts) * slot_bytes)} of host memory for gradients, and "
            f"there is room for {gib(room * slot_bytes)}"
        )
    return int(cpu_parts)
