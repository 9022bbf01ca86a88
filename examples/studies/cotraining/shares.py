"""Co-training: the parts of each batch, some of which the CPU trains beside the GPU. `cotrain` makes one.

    part      0    1    …  n-2-c   n-1-c  …  n-2   n-1
    who      GPU  GPU   …   GPU     CPU   …  CPU   GPU        c parts for the CPU; the last one starts the updates
                ▲ all updates have ended: the CPU trainer gets the weights and its parts

The gradients are summed in the order of the parts, whoever computed them, so who did changes no bit that the two of
them compute alike. Each part has a seed of its own, so dropout does not depend on it either. If the CPU trainer is
lost, the trainer computes its parts.

Several ranks have one CPU trainer, which is the first one's process. With FSDP2, a part is one micro-batch of each
rank, and its gradient the mean of theirs, as FSDP2's is. A pipeline trains the first n-c parts at once, and `step()`
starts the updates, once the CPU's gradients are added: there, the CPU has the last parts.

Of HyTrain's optimizer it needs two calls on one rank, `lend_weights` and `add_gradients`.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor, nn

from examples.studies.cotraining.partner import WORKER, Partner, hang_s
from examples.studies.cotraining.planner import CpuPartsPlanner, Step
from examples.studies.cotraining.team import NO_JOB, Team
from examples.studies.cotraining.whole import Layout
from examples.studies.cotraining.work import moved, named, seed_of
from hytrain.errors import CapacityError, ClusterError, ConfigError, UnsupportedError, UsageError
from hytrain.memory.capacity import host_bound
from hytrain.memory.clock import Clock, CudaClock, HostClock, Mark, Span
from hytrain.memory.lending import TRAINED
from hytrain.model import fsdp
from hytrain.model.layers import clean
from hytrain.optim import Optimizer
from hytrain.readable import gib
from hytrain.run.ranks import Ranks
from hytrain.tensors import is_distributed

#: With "auto", the CPU computes a part that is not used, to see how long it takes: after 1, 2, 4, 8, … steps.
FIRST_TRIAL: Final = 1
_log = logging.getLogger(__name__)


def cotrain(
    opt: Optimizer,
    model: nn.Module,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    parts: int,
    cpu_parts: int | str = "auto",
    pipeline: Callable[[Sequence[Any]], Tensor | None] | None = None,
) -> CoTraining:
    """Let a process on the CPU train some micro-batches of each step, beside the model's device.

    The gradients are summed in the order of the micro-batches, whoever computed them. The process has the weights
    where the optimizer process keeps them. It ends with what this returns, or with the trainer.

    Several ranks have one such process, with copies of all weights. They all call this, and all that it returns.

    Args:
        opt: HyTrain's optimizer of `model`.
        model: What is trained: the whole model, which `fully_shard` may have sharded over all ranks, or a stage.
        build: Makes the whole model anew, without arguments. The CPU trainer calls it on the meta device, so the model
            takes no memory there, and gives it the weights, buffers and modes of this one.
        loss: Gets a whole model and a micro-batch, and returns what to call `backward()` on, shape (). Divide it by
            the number of micro-batches yourself, on several ranks by that of a rank.
        parts: The number of micro-batches of a step, on each rank.
        cpu_parts: How many of them the CPU trains: fewer than `parts`, or "auto" for as many as make steps shortest,
            often none. On several ranks with FSDP2, it trains as many of each rank.
        pipeline: With a pipeline, what trains micro-batches through it: forward and backward of all that it gets, in
            their order. It returns their losses, shape (len(micro-batches),), on a rank that has them, or else None.

    `build` and `loss` are functions of modules that can be imported, or `functools.partial`s of them with numbers,
    strings, lists and dictionaries; the CPU trainer imports them by name.

    Returns:
        An object whose `backward(batches)` takes the place of the step's backwards.

    Raises:
        ConfigError: A function cannot be imported, or a number does not fit.
        UsageError: Ranks give other numbers.
        UnsupportedError: A CPU trainer cannot train this: with `loss_scale`, on several machines, or where ranks share
            a model in another way.
        CapacityError: Host memory has no room for the gradients of so many parts.
        ClusterError: The CPU trainer does not start: `build` makes another model, for example. With "auto", the log
            says so.
    """
    ranks = Ranks.of_job()
    with ranks.together():
        require_shareable(opt, model, ranks, is_stage=pipeline is not None)
        work = check(build, loss, parts=parts, cpu_parts=cpu_parts)
    ranks.require_same((parts, cpu_parts), "ranks give cotrain() other parts or cpu_parts: give all of them the same")
    ranks = ranks.apart(hang_s())
    return CoTraining(opt, model, loss, work, ranks, parts=parts, cpu_parts=cpu_parts, pipeline=pipeline)


class CoTraining:
    """Trains batches in parts, as many of which on the CPU as was asked for.

    `say` gets a sentence when it decides on a number of parts, and if the CPU trainer is lost; if None, the log does.
    `numbers` has how the last step was shared, for the loop's log: `cpu_parts`, and once it is known how many seconds a
    part takes on both, `gpu_part_s` and `cpu_part_s`. Of several ranks, the first one decides, and says so.
    """

    def __init__(
        self,
        opt: Optimizer,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        work: dict[str, Any],
        ranks: Ranks,
        *,
        parts: int,
        cpu_parts: int | str,
        pipeline: Callable[[Sequence[Any]], Tensor | None] | None,
    ) -> None:
        """Start the CPU trainer, unless the CPU is to train nothing. Raises what `cotrain` raises."""
        self.say: Callable[[str], None] | None = None
        self.numbers: dict[str, float] = {}
        self._opt, self._model, self._loss, self._pipeline, self._ranks = opt, model, loss, pipeline, ranks
        trained = _trained(opt, model)
        self._device = next(iter(trained.values())).device
        self._clock: Clock = CudaClock(self._device) if self._device.type == "cuda" else HostClock()
        layout = Layout(ranks, trained)
        most = _agreed_most(ranks, layout, parts, cpu_parts)
        #: How many parts are trained before weights are lent, and after the CPU's gradients are added.
        self._apart = 0 if pipeline is not None else 1
        self._parts, self._is_auto = parts, cpu_parts == "auto"
        plans = self._is_auto and most and ranks.rank == 0
        self._planner = CpuPartsPlanner(parts, most, self._apart) if plans else None
        self._cpu_parts = 0 if cpu_parts == "auto" else int(cpu_parts)
        self._ended: _Ended | None = None  # the last step, whose time is known once the next one begins
        self._unread = deque[tuple[_Ended, float]]()  # steps that may still run on the device, and their seconds
        self._read: Step | None = None  # the last step that was read
        self._began_s = 0.0
        self._steps, self._next_trial, self._trial = 0, FIRST_TRIAL, NO_JOB
        self._is_warm = False
        self._team: Team | None = None  # None without a CPU trainer
        if most:
            shared: dict[str, Any] = {"layout": layout, "trained": trained, "slots": most}
            try:
                self._team = Team(opt, model, work, ranks, **shared, is_pipeline=pipeline is not None)
            except ClusterError as error:
                if not self._is_auto:
                    raise
                if ranks.rank == 0:
                    _log.warning("the CPU trains no part: %s", error)

    @property
    def pid(self) -> int | None:
        """The CPU trainer's process ID; None if there is none, if it is lost, or on another rank than the first."""
        partner = None if self._team is None else self._team.partner
        return None if partner is None or partner.lost else partner.pid

    def backward(self, batches: Sequence[Any]) -> Tensor:
        """Forward and backward of all parts of a step's batch: the last part's backward starts the updates.

        With a pipeline, `opt.step()` starts them. Call it and `opt.zero_grad()` after this, as after a backward.

        Args:
            batches: The micro-batches, at most `parts` of them, best in host memory: each what `loss` takes. Tensors of
                those that the CPU does not train are brought to the model's device. All ranks have as many; those of a
                pipeline have the same ones, of which the CPU trains the first rank's.

        Returns:
            What `loss` returned for each of them, shape (len(batches),), float32, on the model's device. NaN for what
            a pipeline has trained, on ranks where it returns no losses.

        Raises:
            UsageError: There are no micro-batches, or too many, or ranks have other numbers of them; or something has
                changed that the CPU trainer cannot know.
            UnsupportedError: A micro-batch cannot be sent to the CPU trainer. If `cpu_parts` is "auto" and the CPU had
                no part of the last step, neither of these two is raised: training goes on without the CPU trainer.
        """
        count = len(batches)
        if {*(counts := self._ranks.gather(count))} != {count} or not 0 < count <= self._parts:
            got = " and ".join(map(str, sorted({*counts})))
            raise UsageError(f"backward() got {got} micro-batches: from 1 to parts={self._parts}, as many on all ranks")
        self._begin(batches[0])
        last, cpu_parts = count - self._apart, min(self._cpu_parts, count - 1)
        first = last - cpu_parts
        losses, own, adds = torch.zeros(count, device=self._device), list[tuple[Span, int]](), list[Span]()
        began, seconds = self._clock.mark(), list[float]()

        def train(indices: range) -> None:
            together = [indices] if self._pipeline is not None else [range(index, index + 1) for index in indices]
            for some in filter(None, together):
                before = self._clock.mark()
                losses[some.start : some.stop] = self._train(some, batches)
                own.append(((before, self._clock.mark()), len(some)))

        with self._opt.no_sync():
            train(range(first)[: self._apart])
            jobs = self._hand_over({index: batches[index] for index in range(first, last)})
            train(range(first)[self._apart :])
            beside = own[-1:]
            for slot, (index, job) in enumerate(jobs.items()):
                assert self._team is not None, "it has jobs"
                answer, before = self._team.receive(job), self._clock.mark()
                if answer is None:  # nor are there any of the others
                    train(range(index, last))
                    break
                losses[index], computed = answer
                gradients = self._team.gradients
                added = self._opt.add_gradients(gradients.of(slot, computed.has_gradient))
                gradients.taken = added or gradients.taken
                adds.append((before, self._clock.mark()))
                seconds.append(computed.seconds)
            joined = self._clock.mark()
        if self._team is not None:
            self._team.take_back()
        train(range(last, count))
        if count == self._parts:
            self._ended = _Ended(
                cpu_part_s=fmean(seconds) if seconds else None,
                cpu_parts=cpu_parts,
                part=(beside or own)[-1],
                gap=(beside[0][0][1] if beside else began, joined),
                adds=adds,
                marks=[began, joined, *chain(*(span for span, _ in own), *adds)],
            )
        self.numbers = {"cpu_parts": len(seconds)}
        if self._read is not None and self._read.cpu_part_s is not None:
            self.numbers |= {"gpu_part_s": self._read.gpu_part_s, "cpu_part_s": self._read.cpu_part_s}
        return losses

    def _train(self, some: range, batches: Sequence[Any]) -> Tensor | float:
        """Forward and backward of these micro-batches: one, or several in a pipeline. Returns their losses."""
        if self._pipeline is not None:
            losses = self._pipeline(batches[some.start : some.stop])
            return math.nan if losses is None else losses.detach()
        with self._seeded(some.start):
            loss = self._loss(self._model, moved(batches[some.start], self._device))
            loss.backward()
        return loss.detach()

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
        return seed_of(torch.initial_seed(), self._opt.statistics().step, self._ranks.rank * self._parts + part)

    def _hand_over(self, batches: Mapping[int, Any]) -> dict[int, int]:
        """Give parts to the CPU trainer, by their places in the batch. Returns their jobs."""
        if self._team is None:
            return {}
        return self._team.hand_over({index: (batch, self._seed_of(index)) for index, batch in batches.items()})

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
        if self._team is None:
            return
        partner = self._team.partner
        order: _Order = self._ranks.gather(partner and self._order(partner))[0]
        if order.lost:
            self._go_on(order.lost)
            return
        try:
            self._team.require()
            self._cpu_parts = order.cpu_parts
            if order.is_trial:
                [self._trial] = self._hand_over({0: part}).values()
        except (UsageError, UnsupportedError) as error:
            if not self._is_auto or self._cpu_parts:  # with parts on the CPU, the last step may be wrong
                raise
            self._go_on(str(error))

    def _go_on(self, reason: str) -> None:
        self._tell(logging.WARNING, f"{reason}; from here on, all parts are trained without the CPU trainer")
        self.close()

    def _order(self, partner: Partner) -> _Order:
        """What this step is to be. The CPU may have to try out how long a part takes: one of this step, computed twice.

        It plans, unless a trial is under way.
        """
        if partner.lost:
            return _Order(lost=f"the CPU trainer (process {partner.pid}) is lost: {partner.lost}")
        same, trial = (_Order(cpu_parts=self._cpu_parts, is_trial=each) for each in (False, True))
        if self._planner is None:
            return same
        while 0 < self._next_trial < self._steps:  # the CPU had parts then, or a trial was under way
            self._next_trial *= 2
        if self._trial == NO_JOB and self._cpu_parts == 0 and self._steps == self._next_trial:
            self._next_trial *= 2
            return trial
        if self._trial != NO_JOB:
            if (computed := partner.receive(self._trial, wait=False)) is None:
                return same
            self._trial = NO_JOB
            if not self._is_warm:
                self._is_warm = True
                return trial
            self._planner.observe_cpu(computed.seconds)
        if not self._planner.decide():
            return same
        chosen = self._planner.cpu_parts
        self._tell(
            logging.INFO, f"the CPU trains {chosen} of {self._parts} parts of each batch, since {self._planner.why}"
        )
        return _Order(cpu_parts=chosen)

    def _tell(self, level: int, sentence: str) -> None:
        if self._ranks.rank:
            return
        sentence = f"step {self._opt.statistics().step + 1}: {sentence}"
        if self.say is None:
            _log.log(level, sentence)
        else:
            self.say(sentence)

    def _read_off(self, ended: _Ended, step_s: float) -> Step:
        adds_s, (part, count) = [self._clock.seconds(span) for span in ended.adds], ended.part
        step = Step(
            cpu_parts=ended.cpu_parts,
            step_s=step_s,
            gpu_part_s=self._clock.seconds(part) / count,
            cpu_part_s=ended.cpu_part_s,
            add_s=fmean(adds_s) if adds_s else 0.0,
            idle_s=max(self._clock.seconds(ended.gap) - sum(adds_s), 0.0),
        )
        self._clock.recycle(ended.marks)
        return step

    def close(self) -> None:
        """End the CPU trainer. From then on `backward` trains all parts without it."""
        team, self._team, self._cpu_parts = self._team, None, 0
        if team is not None:
            team.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the first rank wants of a step. `lost`: why the CPU trainer is lost; "" if it is not."""

    cpu_parts: int = 0
    is_trial: bool = False
    lost: str = ""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step whose backwards are launched. Spans are on the trainer's device.

    `part`: one of its parts, or several, and how many. `adds`: the CPU's gradients came into the sums. `gap`: from the
    other parts until all were added. `marks`: all of the step.
    """

    cpu_parts: int
    cpu_part_s: float | None
    part: tuple[Span, int]
    gap: Span
    adds: list[Span]
    marks: list[Mark]


def require_shareable(opt: Optimizer, model: nn.Module, ranks: Ranks, *, is_stage: bool) -> None:
    """Raises `UnsupportedError` or `UsageError` if no CPU trainer can train the optimizer's parameters."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") == WORKER:
        raise UsageError(
            "the CPU trainer has imported a script that trains: move the functions that cotrain() gets into a "
            "module of their own"
        )
    fsdp.reshard(model)  # or else some parameters are not there
    given = {id(parameter): parameter for group in opt.param_groups for parameter in group["params"]}
    if len(ranks.node) < ranks.world:
        raise UnsupportedError(
            "cotrain() on several machines: ranks and CPU trainer share memory, so start all ranks on one machine"
        )
    groups = [group for group in fsdp.param_groups(model) if fsdp.is_mean_over(group, ranks.world)]
    is_shared = bool(given) and given.keys() <= {id(each) for group in groups for each in fsdp.sharded(group)}
    has_shards = any(map(is_distributed, given.values()))
    if has_shards if is_stage else (has_shards or ranks.world > 1) and not is_shared:
        raise UnsupportedError(
            "cotrain() on several ranks: a CPU trainer needs whole parameters, and gradients that are means over all "
            "ranks. Apply fully_shard to the whole model, over all ranks and without mp_policy; or give cotrain() a "
            "stage that is not sharded, and pipeline="
        )
    if not given.keys() <= {*map(id, model.parameters())}:
        raise UnsupportedError("cotrain() with several modules: give the optimizer one module that has them")
    if opt.loss_scale is not None:
        raise UnsupportedError(
            "cotrain() with loss_scale: the CPU trainer does not know the scale; train in bfloat16, or leave it out"
        )


def _trained(opt: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The parameters that the optimizer trains, by name."""
    with opt.lend_weights() as lent:
        named = {clean(name): parameter for name, parameter in model.named_parameters()}
        return {name: each for name, each in named.items() if name in lent and lent[name].kind == TRAINED}


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


def _agreed_most(ranks: Ranks, layout: Layout, parts: int, cpu_parts: int | str) -> int:
    """How many parts the CPU may train at most, on all ranks. Raises `CapacityError`."""
    slot_bytes = sum(each.nbytes for each in layout.like.values())
    with ranks.together():
        most = _most(parts, cpu_parts, slot_bytes, host_bound(None) - (slot_bytes if ranks.world > 1 else 0))
    return int(min(ranks.gather(most)))


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
