"""One optimizer's part in a run: the processes that it joined or started, and the engine over its layers.

    AdamW ─▶ Session ─▶ build: layers ─▶ Link.join ─▶ the first plan ─▶ hooks ─▶ READY
                    └─▶ rebuild, when parameters join: a new engine takes over the exact state of the old one
                    └─▶ close, called automatically when the AdamW is no longer referenced

One session at a time trains a parameter. Python's exit and the link's threads keep a session and its engine until it
is closed. So they refer to optimizer, model and parameters weakly, or none of these would ever end. `build`
makes layers and engine; `optimizer` presents the session as a torch optimizer.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hytrain.build import Build, Site
from hytrain.checks import Groups, check_model
from hytrain.errors import HyTrainError, UnsupportedError, UsageError
from hytrain.memory.arena import allow_descriptors
from hytrain.memory.capacity import gpu_memory
from hytrain.model import fsdp, hooks
from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter
from hytrain.options import Options
from hytrain.run import environment
from hytrain.run.cluster import find_or_start
from hytrain.run.coordinator import LOG_BYTES, log_bytes
from hytrain.run.link import THREAD_PREFIX, Link
from hytrain.run.nodes import Nodes
from hytrain.run.ownership import PlanBook
from hytrain.run.ranks import Ranks
from hytrain.run.seats import Seat
from hytrain.state import dicts
from hytrain.step.accumulation import Accumulation
from hytrain.step.check import SelfCheck
from hytrain.step.engine import Engine
from hytrain.step.numbers import StepNumbers
from hytrain.trackers import THREAD_NAME, Trackers
from protocol.messages import Command, Log

ANSWER_TIMEOUT_S: Final = 120.0
#: Steps' numbers are below this, as all that read records can tell them apart, with doubles too.
STEPS: Final = 1 << 53
#: A log this many steps late is probably none of an earlier step, but of a loop that counts in another way.
LATE_STEPS: Final = 100

_log = logging.getLogger(__name__)

#: The parameters that some session trains. No second session may train them.
_managed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(Site):
    """The processes, layers and engine of one `hytrain.AdamW`.

    The constructor raises what that of `hytrain.AdamW` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        ranks: Ranks,
        groups: Groups,
        accumulation: Accumulation,
        resting: dicts.Resting,
    ) -> None:
        self._pid, self._model_of, self.first = os.getpid(), weakref.ref(model), {}
        self.options, self.groups, self.ranks, self.accumulation = options, groups, ranks, accumulation
        self.stage = None if options.pipeline_group is None else torch.distributed.get_rank(options.pipeline_group)
        came_from = check_model(model)
        self.device = options.device or came_from
        self.memory = gpu_memory(self.device)
        self.resting = resting
        self.parameters: list[TrainedParameter] = []
        self.layers: list[TrainedLayer] = []
        self._engine: Engine | None = None
        self._numbers = StepNumbers()
        config = options.cluster_config()
        self.check = SelfCheck(config.check, options, groups) if config.check else None
        self._others: list[TensorWeakRef] = []  # frozen parameters: in the groups, but not trained
        self._unhook: Callable[[], None] = lambda: None
        self._closed = self._said_late = False
        self.last_words = f"this hytrain.{options.algorithm.name} is closed"
        self.place = find_or_start(config, self.ranks)
        self.memory.limit = self.place.settings.gpu_memory_limit
        with contextlib.ExitStack() as undo:  # what a start that fails has done, down to the model
            undo.callback(self.place.close)
            self._nodes = Nodes(self.ranks)
            undo.callback(self._nodes.close)
            self.take_model(came_from, undo)
            build = self._build()
            undo.callback(self._leave)
            if self.place.rank == 0:
                launcher = self.place.cluster.launcher_pid if isinstance(self.place, Seat) else None
                environment.write(self.run_dir, self.device, launcher)
            self._trackers = Trackers(
                options.log_to if ranks.rank == 0 else (), self.run_dir, self.place.cluster.run_name
            )
            undo.pop_all()
        build.end_beginning()
        self._tracked = self.engine.statistics  # the last that they have
        _sessions.add(self)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "built in the constructor"
        return self._engine

    def _build(self, before_start: Callable[[], None] = lambda: None) -> Build:
        """Build layers over all parameters that need gradients now, and an engine; agree on the first plan.

        `before_start` is called after all checks have passed, and before anything is started.
        """
        build = Build(self, self.parameters, set(_managed) - self._own())
        before_start()
        continues = self._engine is not None
        self.layers, self.parameters = build.layers, build.parameters
        with contextlib.ExitStack() as undo:
            with self.ranks.together():
                self._start(build, undo, continues=continues)
                self._hook(undo, build.gates)
            self._link.ready(f"{len(build.layers)} layers on {self.device}")
            undo.pop_all()
        return build

    def _hook(self, undo: contextlib.ExitStack, gates: list[tuple[Any, Gate]]) -> None:
        """Connect the model to the engine. `undo` gets what undoes that."""
        engine, parameters = self.engine, self.parameters
        detach = hooks.attach(self.model, gates, parameters, engine=engine)

        def unhook() -> None:
            for known in parameters:
                if not known.is_gone:
                    _managed.pop(id(known.parameter), None)
            detach()

        self._unhook = unhook
        undo.callback(unhook)
        _managed.update((id(known.parameter), known.parameter) for known in parameters)
        given = [p for group in self.groups.now for p in group["params"]]
        self._others = [TensorWeakRef(p) for p in given if id(p) not in _managed and p.numel()]  # empty: no change
        renew = weakref.WeakMethod(self._renew)
        engine.renew = lambda: (method := renew()) is not None and method()

    def _own(self) -> set[int]:
        return {id(known.parameter) for known in self.parameters if not known.is_gone}

    def _start(self, build: Build, undo: contextlib.ExitStack, *, continues: bool) -> None:
        """Join the processes, agree on the first plan, and start an engine with it. `undo` gets what undoes that."""
        plans = PlanBook("trainer", len(build.layers))
        calibration = build.calibration()  # before the link, which waits for the processes that are starting
        link = self._link = Link(self.place, self._nodes, timeout_s=ANSWER_TIMEOUT_S)
        undo.callback(link.close)
        engine = self._engine = build.engine(link, plans)
        undo.callback(link.close, engine.release)
        link.join()
        allow_descriptors(len(build.layers))
        plan = link.agree(build.table(link.name, continues=continues), calibration, plans)
        link.start(engine)
        build.fill(engine, plan)

    def rebuild(self, model: nn.Module) -> None:
        """Start a new engine over it with the exact state trained so far. Host memory holds both states for a while."""
        before, model_before, left = self.engine, self._model_of, False
        check_model(model)
        before.import_written()
        before.restore_weights()
        before.expose_state()
        self.resting.take(self.parameters)

        def leave() -> None:
            nonlocal left
            left = True
            self._leave()

        try:
            self._model_of = weakref.ref(model)
            self._build(leave)
            self.engine.continue_from(before)
            self.engine.expose_state()
            self.resting.give(self.parameters)
        except BaseException as error:
            if left:  # the old engine is gone, and the new one lacks the state
                self.engine.on_failure(UsageError(f"beginning anew was interrupted by {type(error).__name__}: {error}"))
                self.close()
            else:
                self._model_of = model_before
                self.resting.drop(self.parameters)
            raise

    def _renew(self) -> bool:
        """The model is entered between two steps: train unfrozen parameters. True if a new engine has taken over."""
        if not any(p.requires_grad and id(p) not in _managed for of in self._others if (p := of()) is not None):
            return False
        fsdp.reshard(self.model)
        present = {id(parameter) for parameter in self.model.parameters()}
        if not all(id(p) in present for group in self.groups.now for p in group["params"]):
            return False  # `torch.func.functional_call` has replaced parameters
        self.rebuild(self.model)
        self.engine.before_root()
        return True

    def trains(self, identities: Set[int]) -> bool:
        """Whether it trains one of these parameters."""
        return not self._own().isdisjoint(identities)

    def require_free(self, parameters: list[Tensor]) -> None:
        """Raise `UnsupportedError` if another session trains one of these."""
        taken = set(_managed) - self._own()
        if any(id(parameter) in taken for parameter in parameters):
            raise UnsupportedError(
                "another optimizer of HyTrain trains some of these parameters: give each parameter to one optimizer; "
                "or close() that one"
            )

    def require_all_seen(self) -> None:
        """Raise `UsageError` if an unfrozen parameter got a gradient, but the model was not called since it was."""
        if any(p.grad is not None and id(p) not in _managed for of in self._others if (p := of()) is not None):
            raise UsageError(
                "a parameter that was unfrozen has a gradient, but since then the model itself has not been called "
                "between two steps, where HyTrain sees it: unfreeze before a step's first forward (opt.zero_grad() "
                "drops what was summed for this one)"
            )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if not 0 <= step < STEPS:
            raise UsageError(f"opt.log({step}, …): a step is a whole number from 0 on, below 2**53")
        if (nbytes := log_bytes(numbers)) > LOG_BYTES:
            raise UsageError(
                f"opt.log({step}, …) with {len(numbers)} numbers takes {nbytes} bytes, above {LOG_BYTES}: a record is "
                "a line of metrics.jsonl, so write larger things into a file of your own"
            )
        finished = self.engine.steps
        place = self._numbers.place(step, finished, between=self.engine.between_steps)
        if place.renames is not None:
            self.engine.steps += step - place.renames
        elif step <= finished - LATE_STEPS and not self._said_late:
            self._said_late = True
            _log.warning(
                "opt.log(%d, …) after step %d: what the record of step %d has already stays as it is; a step's number "
                "is counted through the whole run, not anew in each epoch",
                step,
                finished,
                step,
            )
        self._trackers.write(step, numbers)
        self._link.log(Log(step=step, numbers=numbers, renames=place.renames, ahead=place.ahead))
        if (last := self.engine.statistics).step and last is not self._tracked:
            self._tracked = last
            self._trackers.write(self.engine.steps, {"step_s": last.step_s, "stall_s": last.stall_s, "k": last.k})

    def begin_with(self, steps: int, loss_scale: dict[str, Any] | None) -> None:
        """State was loaded before this session began, and rests: go on from it."""
        self.engine.expose_state()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for rest in self.resting:
            rest.name = names[id(rest.parameter)]
        self.resting.give(self.parameters)
        if self.engine.verdicts.loss_scale is not None:
            self.engine.verdicts.loss_scale.load(loss_scale)
        self.restored(steps)

    def limit_memory(self, *, gpu: int | None, host: int | None) -> None:
        """Plan with at most so many bytes from the next plan on. The ranks of the machine share what the host has."""
        for name, nbytes in (("gpu", gpu), ("host", None if host is None else host // len(self.ranks.node))):
            if nbytes is not None:
                self._link.post("coordinator", Command(name=f"{name}_memory_limit", value=str(nbytes)))

    def restored(self, steps: int) -> None:
        """The state of a run after `steps` steps was loaded: go on with its count.

        It included remainders, which belong to weights that are loaded before the next step.
        """
        self.engine.steps = self.engine.statistics.step = steps
        self._numbers.restored(steps)
        self.engine.masters.state_was_loaded = True

    def processes(self) -> list[tuple[str, int, list[int]]]:
        optimizer = self.place.cluster.optimizer_pids[self.place.rank]
        pids = {"trainer": os.getpid(), "optimizer": optimizer, "coordinator": self._link.coordinator.pid}
        return [(role, pid, _cores(pid)) for role, pid in pids.items()]

    @property
    def run_dir(self) -> Path:
        return Path(self.place.cluster.run_dir)

    def close(self) -> None:
        """End the engine, and the processes if this session started them. Does nothing in a forked child.

        Raises `NonFiniteGradients`, after everything is closed, if the last step demands it.
        """
        if os.getpid() != self._pid or self._closed:
            return
        # The garbage collector may run on any thread.
        if threading.current_thread().name.startswith((THREAD_PREFIX, THREAD_NAME)):
            threading.Thread(target=self.close, name="hytrain-close").start()
            return
        self._closed = True
        if self.check is not None:
            self.check.close()
        try:
            self._leave()
            self._others.clear()
            self.resting.clear()
        finally:  # also after Ctrl-C during the wait for the last updates
            self._nodes.close()
            self.place.close()
            self._trackers.close()

    def _leave(self) -> None:
        """End the engine. The run's processes can then serve another one."""
        unhook, self._unhook = self._unhook, lambda: None
        try:
            self.engine.close(UsageError(self.last_words))
        finally:
            unhook()
            for known in self.parameters:
                known.let_go()

    def before_fork(self) -> None:
        """Wait for all updates."""
        with contextlib.suppress(HyTrainError):  # a failure, which the next call tells
            if os.getpid() == self._pid and not self._closed:
                self.engine.reads.before_fork()

    def end_in_child(self) -> None:
        if self.engine.end_in_child():
            self._unhook()


def _cores(pid: int) -> list[int]:
    """The cores of all threads of a process. OpenMP binds each thread to its own core, even the main thread."""
    cores: set[int] = set()
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):
            cores.update(os.sched_getaffinity(thread.id))
    return sorted(cores)


def _end_in_child() -> None:
    """A forked child, such as a DataLoader worker, has a copy of the model, but takes no part in training it."""
    for session in list(_sessions):
        session.end_in_child()


def _before_fork() -> None:
    """A child gets the model as it is, so no update may be under way."""
    try:
        for session in list(_sessions):
            session.before_fork()
    except KeyboardInterrupt:  # which Python would ignore here: once more, when this has ended
        threading.Timer(0.1, _thread.interrupt_main).start()


os.register_at_fork(before=_before_fork, after_in_child=_end_in_child)
