"""One optimizer's part in a run: the processes that it joined or started, and the engine over its layers.

    AdamW ─▶ Session ─▶ build: layers ─▶ Link.join ─▶ the first plan ─▶ hooks ─▶ READY
                    └─▶ rebuild, when parameters join: a new engine takes over the exact state of the old one
                    └─▶ close, called automatically when the AdamW is no longer referenced

One session at a time trains a parameter. Python's exit and the link's threads keep a session and its engine until it
is closed. So they refer to optimizer, model and parameters weakly, or none of these would ever end. `optim` presents
the session as a torch optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Set
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hytrain.checks import Groups, check_free, check_model
from hytrain.config import ClusterConfig
from hytrain.cotraining.partner import ADDRESS, WORKER
from hytrain.cotraining.shares import CoTraining
from hytrain.errors import BackendUnavailable, UnsupportedError, UsageError
from hytrain.kernels import choice
from hytrain.kernels.backend import Backend
from hytrain.kernels.torch_backend import vectors
from hytrain.memory.arena import allow_descriptors
from hytrain.memory.capacity import gpu_memory, host_bound, host_bytes, host_free, require_host_memory, second_bank_fits
from hytrain.memory.transfer import transfers_for
from hytrain.memory.visits import ring_bytes
from hytrain.model import fsdp, hooks
from hytrain.model.blueprint import Planned, Read, blueprints_of, converted
from hytrain.model.layers import find_blocks, split_layers
from hytrain.model.offloaded import load, offloadable_blocks, take_back, take_to
from hytrain.model.parts import Parts
from hytrain.model.sharing import counted_here
from hytrain.model.trained import (
    Gate,
    OffloadedBlock,
    TrainedLayer,
    TrainedParameter,
    build_gates,
    build_layers,
    mark_blocks,
)
from hytrain.options import Options
from hytrain.run import environment
from hytrain.run.calibration import calibrate
from hytrain.run.cluster import find_or_start
from hytrain.run.link import LOG_BYTES, THREAD_PREFIX, Link, log_bytes
from hytrain.run.nodes import connect_nodes
from hytrain.run.ownership import PlanBook
from hytrain.run.ranks import Ranks
from hytrain.run.seats import Seat
from hytrain.run.trace import EVERY_STEP, NO_STEP, TraceWriter
from hytrain.state import dicts
from hytrain.step.accumulation import Accumulation
from hytrain.step.activations import Activations
from hytrain.step.engine import Engine
from hytrain.step.numbers import StepNumbers
from hytrain.step.offload import window_bytes
from hytrain.tensors import flat, has_memory, is_distributed, local
from hytrain.trackers import THREAD_NAME, Trackers
from protocol.handles import layout
from protocol.messages import LayerTable, Log, Plan
from protocol.rules import ON_DEVICE

ANSWER_TIMEOUT_S: Final = 120.0
#: The coordinator ends an optimizer process that hangs. The trainer waits so much longer, in case that hangs, too.
HANG_GRACE_S: Final = 15.0
#: Steps' numbers are below this, as all that read records can tell them apart, with doubles too.
STEPS: Final = 1 << 53
#: A log this many steps late is probably none of an earlier step, but of a loop that counts in another way.
LATE_STEPS: Final = 100

_log = logging.getLogger(__name__)

#: The parameters that some session trains. No second session may train them.
_managed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """The processes, layers and engine of one `hytrain.AdamW`.

    The constructor raises what that of `hytrain.AdamW` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        config: ClusterConfig,
        *,
        ranks: Ranks,
        groups: Groups,
    ) -> None:
        self._pid = os.getpid()
        self.ranks = ranks
        self._stage = None if (stages := options.pipeline_group) is None else torch.distributed.get_rank(stages)
        came_from = check_model(model)
        self._model_of, self._options, self._device = weakref.ref(model), options, options.device or came_from
        self._first: dict[nn.Parameter, Tensor] = {}  # values that are not on the device yet
        self.memory = gpu_memory(self._device)
        self._groups = groups
        self.accumulation = Accumulation(options.grad_accumulation)
        self.resting = dicts.Resting(options.algorithm, options.precision)
        self.parameters: list[TrainedParameter] = []
        self.layers: list[TrainedLayer] = []
        self._blocks: list[OffloadedBlock] = []
        self._engine: Engine | None = None
        self._numbers = StepNumbers()
        self._host_bytes = 0  # of host memory, this rank's part
        self._host_free: Callable[[], int | None] = lambda: None  # what is left of it
        self._others: list[TensorWeakRef] = []  # frozen parameters: in the groups, but not trained
        self._unhook: Callable[[], None] = lambda: None
        self._closed = self._said_late = False
        self._cotraining: Callable[[], CoTraining | None] = lambda: None  # its user keeps it, and it the model
        self.last_words = f"this hytrain.{options.algorithm.name} is closed"
        self._place = find_or_start(config, self.ranks)
        self._cluster = self._place.cluster
        self.memory.limit = self._cluster.gpu_memory_limit
        with contextlib.ExitStack() as undo:  # what a start that fails has done, down to the model
            undo.callback(self._place.close)
            connect_nodes(self._cluster, self._place.rank, self.ranks)
            deferred = [planned for each in blueprints_of(model) for planned in each.planned]
            if deferred or self._device != came_from:
                undo.callback(take_back, model, came_from, self._first)
                blocks = find_blocks(model) if options.offload_weights != 0.0 else ()
                take_to(model, self._device, blocks, deferred, self._first)
            self._build()
            undo.callback(self._leave)
            if self._place.rank == 0:
                launcher = self._cluster.launcher_pid if isinstance(self._place, Seat) else None
                environment.write(self.run_dir, self._device, launcher)
            self._trackers = Trackers(options.log_to if ranks.rank == 0 else (), self.run_dir, self._cluster.run_name)
            undo.pop_all()
        self._first = {}
        for segment in (segment for layer in self.layers for segment in layer.segments):
            segment.first = None
        self._tracked = self.engine.statistics  # the last that they have
        _sessions.add(self)

    @property
    def _model(self) -> nn.Module:
        model = self._model_of()
        assert model is not None, "the optimizer keeps it"
        return model

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "built in the constructor"
        return self._engine

    def _build(self, before_start: Callable[[], None] = lambda: None) -> None:
        """Build layers over all parameters that need gradients now, and an engine; agree on the first plan.

        `before_start` is called after all checks have passed, and before anything is started.
        """
        fsdp.reshard(self._model)
        with self.ranks.together():
            layers, parameters, gates = self._split()
            groups = self._groups.read()
        by_id = {id(known.parameter): known for known in parameters}
        named = [(name, p) for name, p in self._model.named_parameters() if id(p) in by_id]
        hyper = [astuple(groups[by_id[id(parameter)].group]) for _, parameter in named]
        self._counted = counted_here(self.ranks, self._stage or 0, named, hyper)
        before_start()
        continues = self._engine is not None
        self.layers, self.parameters = layers, parameters
        with contextlib.ExitStack() as undo:
            with self.ranks.together():
                self._start(undo, continues=continues)
                self._hook(undo, gates)
            self._link.ready(f"{len(layers)} layers on {self._device}")
            undo.pop_all()

    def _hook(self, undo: contextlib.ExitStack, gates: list[tuple[Any, Gate]]) -> None:
        """Connect the model to the engine. `undo` gets what undoes that."""
        engine, parameters = self.engine, self.parameters
        detach = hooks.attach(
            self._model, gates, parameters, engine=engine, reads=engine.reads, backward=engine.backward
        )

        def unhook() -> None:
            for known in parameters:
                if not known.is_gone:
                    _managed.pop(id(known.parameter), None)
            detach()

        self._unhook = unhook
        undo.callback(unhook)
        _managed.update((id(known.parameter), known.parameter) for known in parameters)
        given = [p for group in self._groups.now for p in group["params"]]
        self._others = [TensorWeakRef(p) for p in given if id(p) not in _managed and p.numel()]  # empty: no change
        renew = weakref.WeakMethod(self._renew)
        engine.watch(lambda: (method := renew()) is not None and method())

    def _split(self) -> tuple[list[TrainedLayer], list[TrainedParameter], list[tuple[Any, Gate]]]:
        """The layers of what is to be trained now, their parameters and gates. Checks that memory suffices."""
        options = self._options
        theirs = set(_managed) - self._own()
        groups = [[p for p in group["params"] if p.requires_grad and id(p) not in theirs] for group in self._groups.now]
        wanted = {id(parameter) for group in groups for parameter in group}
        fsdp.require_reduced(self._model, wanted)
        rules = [options.algorithm.rule(group) for group in self._groups.now]
        whole = {id(p) for group, rule in zip(groups, rules, strict=True) if rule in ON_DEVICE for p in group}
        parts = split_layers(self._model, wanted, whole=whole)
        if not parts:
            raise UnsupportedError(
                "param_groups have no parameter that needs a gradient: nothing to train"
                if self.ranks.world == 1
                else "this rank has no element of what is to be trained: train a model this small on fewer ranks"
            )
        empty = [(n, p) for n, p in self._model.named_parameters() if id(p) in wanted and not local(p).numel()]
        empty = [(name, parameter) for name, parameter in empty if parameter.numel()]
        layers, parameters = build_layers(
            parts, groups, rules, options.gradient_dtype, self.parameters, empty, options.precision
        )
        limit, ranks = self._cluster.host_memory_limit, len(self.ranks.node)
        self._host_bytes, self._host_free = host_bound(limit, ranks), host_free(limit, self._device, ranks)
        numel = sum(layer.spec.numel for layer in layers)
        must_visit = sum(layer.spec.numel for layer in layers if layer.spec.stays_on_device) / numel
        require_host_memory(
            [layer.layout for layer in layers],
            options.k,
            limit,
            ranks=ranks,
            gpu_bytes=self.memory.for_state_bytes(),
            awaits_verdict=options.awaits_verdict,
            visit=1.0 if options.visit is None else max(options.visit, must_visit),
        )
        # A second bank would be of no use to layers that the CPU cannot update.
        if options.may_speculate and (options.speculate or not any(layer.spec.stays_on_device for layer in layers)):
            self._add_banks(layers)
        gates = build_gates(layers, parts)
        self._blocks = [] if options.offload_weights == 0.0 else offloadable_blocks(gates, find_blocks(self._model))
        if options.offload_activations:
            mark_blocks(gates, find_blocks(self._model))
        for known in parameters:
            for layer, index in known.places if known.parameter in self._first else ():
                segment = layer.segments[index]
                segment.first = segment.part(flat(self._first[known.parameter]))
        return layers, parameters, gates

    def _own(self) -> set[int]:
        return {id(known.parameter) for known in self.parameters if not known.is_gone}

    def _add_banks(self, layers: list[TrainedLayer]) -> None:
        """Give layers a second bank, for updates before the norm is known, if host memory allows."""
        double, k = [layout(layer.spec, banks=2) for layer in layers], self._options.k
        if second_bank_fits(double, k, self._cluster.host_memory_limit, len(self.ranks.node)):
            for layer, placed in zip(layers, double, strict=True):
                layer.layout = placed
            return
        _log.warning(
            "updates wait for the norm of all gradients: to make them before, and undo them where that was wrong, "
            "takes %.2f GB of host memory, which are not there",
            host_bytes(double) * (1.0 - (k or 0.0)) / 1e9,
        )

    def _start(self, undo: contextlib.ExitStack, *, continues: bool) -> None:
        """Join the processes, agree on the first plan, and start an engine with it. `undo` gets what undoes that."""
        options, cluster = self._options, self._cluster
        builds = options.backend in ("auto", "native")  # before the optimizer process needs it
        if builds and (reason := choice.why_not_native(fuses=vectors().fuses)) and options.backend == "auto":
            _log.warning("the CPU updates with torch, which is slower and not bit for bit the same: %s", reason)
        memory, transfers = self.memory, transfers_for(self._device)
        self._transfers = transfers
        hold_bytes = memory.for_waiting_bytes()
        there = [*self._model.parameters(), *self._model.buffers()]
        free = host_free(None, self._device, len(self.ranks.node))  # a stated limit is one for planes
        host = _host_backend(options.backend) if self._device.type == "cpu" else None
        plans = PlanBook("trainer", len(self.layers))
        link = self._link = Link(self._place, timeout_s=ANSWER_TIMEOUT_S)
        undo.callback(link.close)
        engine = self._engine = Engine(
            self.layers,
            self.parameters,
            link=self._link,
            plans=plans,
            transfers=transfers,
            host=host,
            read_groups=self._groups.read,
            gpu_room=memory.room,
            host_free=self._host_free,
            hold_bytes=hold_bytes,
            accumulation=self.accumulation,
            options=options,
            ranks=self.ranks,
            counted=self._counted,
            activations=Activations(transfers, self._device, there, free) if options.offload_activations else None,
            blocks=self._blocks,
            is_stage=self._stage is not None,
            trace=TraceWriter(cluster.run_dir, self._link.address, EVERY_STEP if cluster.trace else NO_STEP),
            updater=f"optimizer-{self._place.rank} (process {cluster.optimizer_pids[self._place.rank]})",
            hang_timeout_s=cluster.hang_timeout_s + HANG_GRACE_S,
        )
        undo.callback(link.close, engine.release)
        layers = tuple(layer.spec for layer in self.layers)
        calibration = calibrate(layers, self._device, transfers, host)
        self._link.join()
        allow_descriptors(len(layers))
        table = LayerTable(
            layers=layers,
            inbox=self._link.name,
            device=self._device.type,
            policy=options.policy,
            objective=options.objective,
            awaits_verdict=options.awaits_verdict,
            speculate=options.speculate if self.layers[0].layout.banks == 2 else False,
            k=options.k,
            backend=options.backend,
            gpu_bytes=self._first_bytes(),
            host_bytes=self._host_bytes,
            continues=continues,
            rank=self.ranks.rank,
            world=self.ranks.world,
            visit=options.visit,
            offload_weights=options.offload_weights if self._blocks else 0.0,
            blocks=tuple(tuple(layer.lid for layer in block.layers) for block in self._blocks),
            window_bytes=window_bytes(self._blocks),
            ring_bytes=ring_bytes([segment for layer in layers for segment in layer.segments]),
            hold_bytes=hold_bytes,
            gpu=environment.gpu_uuid(self._device),
        )
        plan = self._link.agree(table, calibration, plans)
        self._link.start(engine)
        self._load_first(plan)
        engine.start(plan)
        for blueprint in blueprints_of(self._model):
            blueprint.make(self._give, self._device)
        if self._blocks:
            memory.begin_anew()

    def _first_bytes(self) -> int | None:
        """The GPU memory for state, and for weights of blocks that can be offloaded, before a step was measured."""
        free = self.memory.for_state_bytes()
        there = sum(known.own.nbytes for b in self._blocks for known in b.parameters if has_memory(known.own))
        return None if free is None else free + there

    def _load_first(self, plan: Plan) -> None:
        """Bring first values to the device, but for blocks that stay in host memory."""
        away = [b for b in self._blocks if plan.places.offloaded.issuperset(one.lid for one in b.layers)]
        stays = {known.parameter for block in away for known in block.parameters}
        for parameter in self._first.keys() - stays:
            load(parameter, self._first[parameter])

    def _give(self, planned: Planned, read: Read) -> None:
        """A blueprint has made a parameter's first values."""
        if planned.parameter.is_meta:
            return  # the model does not have it any more
        known = next((known for known in self.parameters if known.parameter is planned.parameter), None)
        values = converted(read(tuple(slice(0, size) for size in planned.parameter.shape)), planned.through)
        if known is None:
            planned.parameter.data.copy_(values)
        else:
            self.engine.begin_with(known, values)

    def rebuild(self) -> None:
        """Start a new engine with the exact state trained so far. Host memory holds both states for a while."""
        before, left = self.engine, False
        if self._shares is not None:
            raise UsageError(
                "other parameters are to be trained, which the CPU trainer does not know: close what cotrain() "
                "returned, and call it again afterwards"
            )
        check_model(self._model)
        before.import_written()
        before.restore_weights()
        before.expose_state()
        self.resting.take(self.parameters)

        def leave() -> None:
            nonlocal left
            left = True
            self._leave()

        try:
            self._build(leave)
            self.engine.continue_from(before)
            self.engine.expose_state()
            self.resting.give(self.parameters)
        except BaseException as error:
            if left:  # the old engine is gone, and the new one lacks the state
                self.engine.on_failure(UsageError(f"beginning anew was interrupted by {type(error).__name__}: {error}"))
                self.close()
            else:
                self.resting.drop(self.parameters)
            raise

    def _renew(self) -> bool:
        """The model is entered between two steps: train unfrozen parameters. True if a new engine has taken over."""
        if not any(p.requires_grad and id(p) not in _managed for of in self._others if (p := of()) is not None):
            return False
        fsdp.reshard(self._model)
        present = {id(parameter) for parameter in self._model.parameters()}
        if not all(id(p) in present for group in self._groups.now for p in group["params"]):
            return False  # `torch.func.functional_call` has replaced parameters
        self.rebuild()
        self.engine.before_root()
        return True

    def trains(self, identities: Set[int]) -> bool:
        """Whether it trains one of these parameters."""
        return not self._own().isdisjoint(identities)

    def require_free(self, parameters: list[Tensor]) -> None:
        """Raise `UnsupportedError` if another session trains one of these."""
        check_free(parameters, set(_managed) - self._own())

    def require_all_seen(self) -> None:
        """Raise `UsageError` if an unfrozen parameter got a gradient, but the model was not called since it was."""
        if any(p.grad is not None and id(p) not in _managed for of in self._others if (p := of()) is not None):
            raise UsageError(
                "a parameter that was unfrozen has a gradient, but the model itself was not called since then: call it "
                "between two steps, so that HyTrain sees it (opt.zero_grad() drops what was summed for this one)"
            )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if not 0 <= step < STEPS:
            raise UsageError(f"opt.log({step}, …): steps are counted from 1, or from 0, and below 2**53")
        if (nbytes := log_bytes(numbers)) > LOG_BYTES:
            raise UsageError(
                f"opt.log({step}, …) with {len(numbers)} numbers takes {nbytes} bytes, above {LOG_BYTES}: a record is "
                "a line of metrics.jsonl, so write what is this large into a file of your own"
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

    def restored(self, steps: int) -> None:
        """The state of a run after `steps` steps was loaded: go on with its count."""
        self.engine.steps = steps
        self._numbers.restored(steps)

    def cotrain(
        self,
        build: Callable[[], nn.Module],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        parts: int,
        cpu_parts: int | str,
    ) -> CoTraining:
        """Begin to share batches with a CPU trainer for this session's parameters, which must not change then."""
        self._require_shareable()
        cores, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        if self._device.type == "cuda":
            cores = _cores(self._cluster.optimizer_pids[self._place.rank])
            threads = len(cores)
        shares = CoTraining(
            build,
            loss,
            parts=parts,
            cpu_parts=cpu_parts,
            model=self._model,
            parameters=self.parameters,
            engine=self.engine,
            transfers=self._transfers,
            accumulation=self.accumulation,
            host_bytes=host_bound(None),
            cores=cores,
            threads=threads,
            log=self.run_dir / "logs" / f"{ADDRESS}.log",
            answer_timeout_s=self._cluster.hang_timeout_s,
        )
        self._cotraining = weakref.ref(shares)
        return shares

    @property
    def _shares(self) -> CoTraining | None:
        """What `cotrain` returned, unless that is closed or gone."""
        shares = self._cotraining()
        return None if shares is None or shares.is_closed else shares

    def _require_shareable(self) -> None:
        """Raises `UnsupportedError` or `UsageError` if no CPU trainer can train this session's parameters."""
        if getattr(sys.modules["__main__"].__spec__, "name", "") == WORKER:
            raise UsageError(
                "the CPU trainer has imported a script that trains: move the functions that cotrain() gets into a "
                "module of their own"
            )
        if self.ranks.world > 1 or any(is_distributed(known.parameter) for known in self.parameters):
            has = "shards of them" if self._stage is None else "those of one stage"
            raise UnsupportedError(
                f"cotrain() with a sharded model: a CPU trainer needs all weights, and a rank has {has}"
            )
        if isinstance(self._model, Parts):
            raise UnsupportedError("cotrain() with several modules: give the optimizer one module that has them")
        if self._options.loss_scale is not None:
            raise UnsupportedError(
                "cotrain() with loss_scale: the CPU trainer does not know the scale; train in bfloat16, or leave it out"
            )
        if self._shares is not None:
            raise UsageError("cotrain() was called before: close what it returned first")

    def processes(self) -> list[tuple[str, int, list[int]]]:
        optimizer = self._cluster.optimizer_pids[self._place.rank]
        pids = {"trainer": os.getpid(), "optimizer": optimizer, "coordinator": self._link.coordinator_pid}
        if (shares := self._shares) is not None and shares.pid is not None:
            pids[ADDRESS.role] = shares.pid
        return [(role, pid, _cores(pid)) for role, pid in pids.items()]

    @property
    def run_dir(self) -> Path:
        return Path(self._cluster.run_dir)

    def close(self) -> None:
        """End the engine, and the processes if this session started them. Does nothing in a forked child.

        Raises `NonFiniteGradients`, after everything is closed, if the last step demands it.
        """
        if os.getpid() != self._pid or self._closed:
            return
        if threading.current_thread().name.startswith(
            (THREAD_PREFIX, THREAD_NAME)
        ):  # the garbage collector may run on any thread
            threading.Thread(target=self.close, name="hytrain-close").start()
            return
        self._closed = True
        try:
            self._leave()
            self._others.clear()
            self.resting.clear()
        finally:  # also after Ctrl-C during the wait for the last updates
            self._place.close()
            self._trackers.close()

    def _leave(self) -> None:
        """End the engine. The run's processes can then serve another one."""
        unhook, self._unhook = self._unhook, lambda: None
        try:
            if (shares := self._shares) is not None:
                shares.close()
        finally:
            self._end_engine(unhook)

    def _end_engine(self, unhook: Callable[[], None]) -> None:
        try:
            self.engine.close(self.last_words)
        finally:
            unhook()
            for known in self.parameters:
                known.let_go()

    def end_in_child(self) -> None:
        if self.engine.end_in_child():
            self._unhook()


def managed() -> set[int]:
    return set(_managed)


def _host_backend(name: str) -> Backend:
    """The backend that updates the trainer's own layers on device "cpu". Raises `BackendUnavailable`.

    The native backend gets a single thread: more OpenMP threads would compete with torch's for the cores.
    """
    if name in ("auto", "native"):
        try:
            return choice.load("native", 1)[0]
        except BackendUnavailable:
            if name == "native":
                raise
    return choice.load("torch" if name == "auto" else name, torch.get_num_threads())[0]


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


os.register_at_fork(after_in_child=_end_in_child)
