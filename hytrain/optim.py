"""`hytrain.AdamW`: what a user touches.

    opt = hytrain.AdamW(model, lr=3e-4, weight_decay=0.1)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()

Construction checks the model, joins or starts the cluster, agrees on the first plan and hangs the hooks in; READY
is its last act. From then on `engine` does the work, and this class is its face as a torch optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import Tensor, nn

from hytrain import saving
from hytrain.checks import check_free, check_group, check_model, check_options, named_groups
from hytrain.config import ClusterConfig
from hytrain.errors import BackendUnavailable, UnsupportedError, UsageError
from hytrain.kernels import backend as backends
from hytrain.memory.arena import allow_descriptors
from hytrain.memory.capacity import GpuMemory, host_bound, host_bytes, require_host_memory, second_bank_fits
from hytrain.memory.planes import Gate, TrainedLayer, TrainedParameter, build_layers
from hytrain.memory.transfer import transfers_for
from hytrain.model import hooks
from hytrain.model.consumed import NO_STATE, SCALER, NoState
from hytrain.model.layers import ModelLayer, split_layers
from hytrain.run.calibration import calibrate
from hytrain.run.cluster import PrivateCluster, Seat, find_or_start
from hytrain.run.link import THREAD_PREFIX, Link
from hytrain.run.trace import TraceWriter
from hytrain.statistics import Statistics
from hytrain.step.engine import Engine
from protocol.handles import layout
from protocol.messages import GroupHyper, LayerTable, Log

ANSWER_TIMEOUT_S: Final = 120.0

_log = logging.getLogger(__name__)

#: Parameters that some hytrain.AdamW trains: no second one may.
_managed: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
#: Those of this process.
_optimizers: weakref.WeakSet[AdamW] = weakref.WeakSet()


class AdamW(torch.optim.Optimizer):
    """AdamW whose state and update live where the coordinator puts them: in host memory, or on the GPU.

    Args:
        model: the module to train. Its parameters stay where they are, float32, bfloat16 or float16, on one device.
        param_groups: as torch's, over parameters of `model`; default is one group with all that need gradients.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW` (Loshchilov & Hutter, 2019).
        grad_accumulation: so many backwards make a step; their gradients are summed in float32, the loop divides
            the loss. The updates begin in the last one, or in a `step()` that comes sooner. See `no_sync`.
        accumulate_on: where the sums lie, 4 bytes a parameter: "device", "host" (they come and go over the link, to the
            same bits), or "auto", which is the device if it has room for them when the first one is made.
        max_grad_norm: clip the gradients' global norm to this, as `torch.nn.utils.clip_grad_norm_` does.
        clip: "global"; or "per_layer", a different algorithm: the norm of each layer's gradients is clipped by itself.
        on_nonfinite: "skip" leaves a step out whose gradients are not all finite, every bit of state as before;
            "raise" does so too, and raises `NonFiniteGradients` in the next backward, `synchronize` or `close`. None
            trains on, as torch does.
        speculate: whether the CPU updates before the global norm is known, and undoes that if it has to, to the bit. It
            takes a second copy of weights and state in host memory; without room for that it waits. None: as measured.
        loss_scale: a number, or "dynamic" for what `torch.amp.GradScaler` does: call `opt.scale(loss).backward()`. Norm
            and update are those of the gradients divided by it; steps that are not finite are skipped, and lower it.
        k: fraction of the parameters that the GPU owns, in [0, 1], or "auto" to let the coordinator decide.
        policy: how "auto" decides: "deadline", "balance", "cotrain", or "random" to move layers all the time.
        objective: what "deadline" aims at: "speed", at the least GPU memory; or "gpu-memory", "host-memory".
        overlap: False lets `step()` do everything, layer by layer: the same bits, to compare with and to debug.
        backend: the CPU's update: "auto", "native", "torch" or "deepspeed".
        gradient_dtype: the dtype in which gradients of float32 parameters travel; default is theirs.
        cores, threads, run_dir, host_memory_limit, trace: for the cluster that this call starts when there is none.

    Raises:
        UnsupportedError: a model or practice that HyTrain refuses, with what to do instead.
        ConfigError: a setting that cannot be.
        CapacityError: memory that cannot suffice, with the arithmetic.
        ClusterError: the other processes did not start, or died.
    """

    def __init__(
        self,
        model: nn.Module,
        param_groups: Iterable[dict[str, Any]] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        grad_accumulation: int = 1,
        accumulate_on: str = "auto",
        max_grad_norm: float | None = None,
        clip: str = "global",
        on_nonfinite: str | None = None,
        speculate: bool | None = None,
        loss_scale: float | str | None = None,
        k: float | str = "auto",
        policy: str = "deadline",
        objective: str = "speed",
        backend: str = "auto",
        gradient_dtype: torch.dtype | None = None,
        overlap: bool = True,
        cores: str | None = None,
        threads: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        host_memory_limit: int | None = None,
        trace: bool | None = None,
    ) -> None:
        self._options = check_options(
            k=k,
            policy=policy,
            objective=objective,
            backend=backend,
            gradient_dtype=gradient_dtype,
            grad_accumulation=grad_accumulation,
            accumulate_on=accumulate_on,
            max_grad_norm=max_grad_norm,
            clip=clip,
            on_nonfinite=on_nonfinite,
            speculate=speculate,
            loss_scale=loss_scale,
            overlap=overlap,
        )
        self._model, self._device = model, check_model(model)
        check_free((parameter for parameter in model.parameters() if parameter.requires_grad), _managed)
        self._parameters: list[TrainedParameter] = []
        self._resting = saving.Resting()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(named_groups(model, param_groups), defaults)
        for group in self.param_groups:
            check_group(group)
        flags = {
            "cores": cores,
            "threads": threads,
            "run_dir": None if run_dir is None else os.fspath(run_dir),
            "host_memory_limit": host_memory_limit,
            "trace": trace,
        }
        self._cluster, self._place = find_or_start(ClusterConfig.resolve(flags=flags))
        try:
            self._build()
        except BaseException:
            self._place.close()
            raise
        _optimizers.add(self)

    def _build(self, before_start: Callable[[], None] = lambda: None) -> None:
        """Layers over all parameters that need gradients now, an engine over them, and the first plan.

        `before_start` is called once it is known that this can be, and before anything is started.
        """
        theirs = set(_managed) - {id(known.parameter) for known in self._parameters}
        groups = [
            [p for p in group["params"] if p.requires_grad and id(p) not in theirs] for group in self.param_groups
        ]
        parts = split_layers(self._model, {id(parameter) for group in groups for parameter in group})
        if not parts:
            raise UnsupportedError("param_groups have no parameter that needs a gradient: nothing to train")
        layers, parameters = build_layers(parts, groups, self._options.gradient_dtype, self._parameters)
        needed, limit = [layer.layout for layer in layers], self._cluster.host_memory_limit
        gpu_bytes, waits = GpuMemory(self._device).for_state_bytes(), self._options.awaits_verdict
        require_host_memory(needed, self._options.k, limit, gpu_bytes=gpu_bytes, awaits_verdict=waits)
        if self._options.may_speculate:
            self._add_banks(layers)
        before_start()
        self._layers, self._parameters = layers, parameters
        gates = _gates(self._layers, parts)
        self._start(continues=hasattr(self, "_engine"))
        detach = hooks.attach(self._engine, self._model, gates, self._parameters)
        _managed.update((id(known.parameter), known.parameter) for known in self._parameters)
        given = [p for group in self.param_groups for p in group["params"]]
        self._others = [p for p in given if id(p) not in _managed and p.numel()]  # an empty one never changes
        self._engine.watch(partial(_any_thawed, weakref.ref(self)), weakref.WeakMethod(self._thaw))
        self._detach = partial(_detach, detach, self._parameters)
        self._leave = partial(_leave, self._engine, self._detach)
        self._close = weakref.finalize(self, _close, os.getpid(), self._leave, self._place)
        self._link.ready(f"{len(self._layers)} layers on {self._device}")

    def _add_banks(self, layers: list[TrainedLayer]) -> None:
        """Let the CPU be ahead of the norm, if the host's memory allows."""
        double, k = [layout(layer.spec, banks=2) for layer in layers], self._options.k
        if second_bank_fits(double, k, self._cluster.host_memory_limit):
            for layer, placed in zip(layers, double, strict=True):
                layer.layout = placed
            return
        _log.warning(
            "updates wait for the norm of all gradients: to make them before, and undo them where that was wrong, "
            "takes %.2f GB of host memory, which are not there",
            host_bytes(double) * (1.0 - (k or 0.0)) / 1e9,
        )

    def _start(self, *, continues: bool) -> None:
        options, cluster = self._options, self._cluster
        if options.backend == "auto" and (reason := backends.why_not_native()):
            _log.warning("the CPU updates with torch, which is slower and not bit for bit the same: %s", reason)
        memory = GpuMemory(self._device)
        transfers = transfers_for(self._device)
        host = _host_backend(options.backend) if self._device.type == "cpu" else None
        self._link = Link(cluster, timeout_s=ANSWER_TIMEOUT_S)
        self._engine = Engine(
            self._layers,
            self._parameters,
            link=self._link,
            transfers=transfers,
            host=host,
            read_groups=partial(_read_groups, weakref.ref(self), _group_ids(self.param_groups)),
            free_gpu_bytes=memory.free_bytes,
            options=options,
            trace=TraceWriter(cluster.run_dir, self._link.address) if cluster.trace else None,
        )
        layers = tuple(layer.spec for layer in self._layers)
        try:
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
                speculate=options.speculate if self._layers[0].layout.banks == 2 else False,
                k=options.k,
                backend=options.backend,
                gpu_bytes=memory.for_state_bytes(),
                host_bytes=host_bound(cluster.host_memory_limit),
                continues=continues,
            )
            plan = self._link.agree(table, calibration)
            self._link.start(self._engine)
            self._engine.start(plan)
        except BaseException:
            self._link.close()
            self._engine.release()
            raise

    def _rebuild(self) -> None:
        """Begin anew over the parameters that need gradients now; what was trained so far stays, to the bit.

        For a moment host memory holds the old state and the new one.
        """
        before, left = self._engine, False
        check_model(self._model)
        before.settle_writes()
        before.expose_state()
        self._resting.take(self._parameters)

        def leave() -> None:
            nonlocal left
            left = True
            self._close.detach()
            self._leave()

        try:
            self._build(leave)
            self._engine.succeed(before)
            self._engine.expose_state()
            self._resting.give(self._parameters)
        except BaseException as error:
            if left:  # what was trained is not where it belongs
                self._engine.on_failure(
                    UsageError(f"beginning anew was interrupted by {type(error).__name__}: {error}")
                )
                if self._close.alive:
                    self._close()
                else:
                    self._place.close()
            else:
                self._resting.drop(self._parameters)
            raise

    def _thaw(self) -> None:
        """The model is entered and some of its frozen parameters are not frozen any more: train them from now on."""
        self._rebuild()
        self._engine.before_root()

    # ------------------------------------------------------------ torch.optim.Optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Mark the end of a step. The updates began while backward ran; see "Backward commits" in the README.

        A `closure` is called once before that, with gradients on, as `torch.optim.AdamW` does; what it returns, usually
        the loss, is returned. Raises `UsageError` whenever going on would train something else than asked for.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._end_step()
        return loss

    def _end_step(self) -> None:
        if any(parameter.grad is not None and id(parameter) not in _managed for parameter in self._others):
            raise UsageError(
                "a parameter that was unfrozen has a gradient, but the model itself was not called since then: call it "
                "between two steps, so that HyTrain sees it (opt.zero_grad() drops what was summed for this one)"
            )
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, and drop those that were summed for a step that has not come.

        The others were consumed in backward, so there is nothing to fill with zeros.
        """
        if not set_to_none:
            raise UsageError(
                "zero_grad(set_to_none=False): HyTrain's gradients are gone after backward; use zero_grad()"
            )
        self._engine.drop_gradients()
        super().zero_grad(set_to_none=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, from the next step on; all others go on as they were.

        Raises `UsageError` between backward and `step()`, and what the constructor raises.
        """
        if not hasattr(self, "_engine"):
            super().add_param_group(param_group)
            return
        before = self._engine
        before.require_boundary("add_param_group")
        named = named_groups(self._model, [param_group])
        own = {id(known.parameter) for known in self._parameters}
        check_free((p for group in named for p in group["params"]), set(_managed) - own)
        for group in named:
            super().add_param_group(group)
        try:
            check_group(self.param_groups[-1])
            self._rebuild()
        except BaseException:
            if self._engine is before:
                del self.param_groups[len(self.param_groups) - len(named) :]
            raise

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW`'s, after all updates have landed. Tensors are views of the planes, not copies.

        bfloat16 parameters have a `remainder` (int16) beside the moments: master = weights and remainder. That of
        float16 parameters is the master itself (float32). The loss scale's state has a key that torch ignores.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.import_written()
        self._engine.expose_state()
        state = saving.state_dict(self.param_groups, self._parameters, self._resting)
        if (scaling := self._engine.clipping.loss_scale) is not None:
            state["loss_scale"] = scaling.state()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or from `torch.optim.AdamW`. Raises `ConfigError` if it does not fit."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._engine.require_no_update("opt.load_state_dict()")
        self._engine.expose_state()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        saving.load_state_dict(
            state_dict, self.param_groups, self._parameters, self._resting, names, when_checked=self._import_for_loading
        )
        if (scaling := self._engine.clipping.loss_scale) is not None:
            scaling.load(state_dict.get("loss_scale"))
        self._engine.state_was_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _import_for_loading(self) -> None:
        """What is loaded may be a view of what is there, so nothing of that is cleared before."""
        self._engine.import_weights(keep_remainder=True)
        self._engine.expose_state()

    @property  # type: ignore[override]
    def state(self) -> NoState:
        """Always empty: see `state_dict`. Raises `UsageError` where torch's would be read, or be written."""
        return self._no_state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_no_state"):
            raise UsageError(NO_STATE)
        self._no_state = NoState()  # torch's constructor

    def __getstate__(self) -> dict[str, Any]:
        """Asked for by `copy` and `pickle`."""
        raise UsageError("a hytrain.AdamW cannot be copied or pickled: do so with its state_dict(), or use opt.save")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked for by `GradScaler.step`, before anything else."""
        raise UsageError(SCALER)

    # ------------------------------------------------------------ HyTrain's own

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the present `loss_scale`, for `opt.scale(loss).backward()`; as it is where there is none.

        Every backward of a step needs it, also those that only sum up: in between the scale does not change.
        """
        return self._engine.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only sum their gradients up; the step's updates begin in the first one after it.

        As `DistributedDataParallel.no_sync`, for loops that know themselves which micro-batch is the last.
        """
        return self._engine.accumulation.held()

    def synchronize(self) -> None:
        """Return once every update has landed in the parameters: before reading them from outside forward."""
        self._engine.synchronize()

    def import_weights(self) -> None:
        """Take the parameters' present values for masters: after writing them from outside (surgery, EMA)."""
        self._engine.import_weights()

    def save(self, folder: str | Path) -> None:
        """Write the whole optimizer state into `folder`, as safetensors: step counts, moments, remainders."""
        engine = self._engine
        engine.import_written()
        engine.expose_state()
        saving.save(
            Path(folder),
            self.param_groups,
            self._parameters,
            self._resting,
            steps=engine.steps,
            loss_scale=engine.clipping.loss_scale,
        )

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote. The model's weights are loaded by whoever loads the model, before or after.

        Raises `ConfigError`, before anything is changed, if it is not whole or not of this model.
        """
        self._engine.require_no_update("opt.load()")
        self._engine.expose_state()
        named = dict(self._model.named_parameters())
        scaling = self._engine.clipping.loss_scale
        self._engine.steps = saving.load(
            Path(folder),
            self.param_groups,
            self._parameters,
            self._resting,
            named,
            loss_scale=scaling,
            when_checked=self._import_for_loading,
        )
        self._engine.state_was_loaded()

    def log(self, step: int, **numbers: float) -> None:
        """Add the loop's own numbers (loss, tokens/s, …) to the record of step `step`, counted from 1."""
        self._link.post("coordinator", Log(step=step, numbers={name: float(value) for name, value in numbers.items()}))

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global gradient norm before clipping, float32 on the device, shape (); None without one.

        It is taken where a step waits for it: with `on_nonfinite`, with `loss_scale` (which is not in it), or with
        `max_grad_norm` and global clipping. Reading its value waits for the device.
        """
        return self._engine.clipping.grad_norm

    @property
    def loss_scale(self) -> Tensor | None:
        """What `scale` multiplies by now, float32 on the device, shape (); None without the option of that name.

        It changes at the end of a step's last backward. Reading its value waits for the device.
        """
        scaling = self._engine.clipping.loss_scale
        return None if scaling is None else scaling.value

    @property
    def skipped_steps(self) -> int:
        """Steps left out by `on_nonfinite` or `loss_scale`, as far as they are known.

        The last one's verdict may be on its way.
        """
        return self._engine.clipping.skipped

    def statistics(self) -> Statistics:
        """The last finished step: its time, stall, k, and who owns what."""
        return self._engine.statistics

    def processes(self) -> list[tuple[str, int, list[int]]]:
        """Role, process ID and cores of each process of the run."""
        pids = {
            "trainer": os.getpid(),
            "optimizer": self._cluster.optimizer_pid,
            "coordinator": self._cluster.coordinator_pid,
        }
        return [(role, pid, _cores(pid)) for role, pid in pids.items()]

    @property
    def run_dir(self) -> Path:
        """The run's folder: metrics, logs."""
        return Path(self._cluster.run_dir)

    def close(self) -> None:
        """End this optimizer, and the private cluster if it had to start one. Runs by itself at exit.

        Raises `NonFiniteGradients`, when all is closed, if it is to be raised for the last step.
        """
        self._close()


def _host_backend(name: str) -> backends.Backend:
    """The update of the trainer's own layers on device "cpu". Raises `BackendUnavailable`.

    The native one gets a single thread: a second pool of OpenMP threads beside torch's would fight it for the cores.
    """
    if name in ("auto", "native"):
        try:
            return backends.load("native", 1)[0]
        except BackendUnavailable:
            if name == "native":
                raise
    return backends.load("torch" if name == "auto" else name, torch.get_num_threads())[0]


def _cores(pid: int) -> list[int]:
    """The cores of all threads of a process: OpenMP binds each to its own, the main thread among them."""
    cores: set[int] = set()
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):
            cores.update(os.sched_getaffinity(thread.id))
    return sorted(cores)


def _group_ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """Which parameters are in which group."""
    return [[id(parameter) for parameter in group["params"]] for group in param_groups]


def _read_groups(of: Callable[[], AdamW | None], ids: list[list[int]]) -> tuple[GroupHyper, ...]:
    """The hyperparameters as they are now. The list of groups may have been replaced since the last time."""
    optimizer = of()
    param_groups = [] if optimizer is None else optimizer.param_groups
    if len(param_groups) != len(ids):
        raise UsageError(f"opt.param_groups has {len(param_groups)} groups in place of {len(ids)}: use add_param_group")
    if _group_ids(param_groups) != ids:
        raise UsageError(
            "opt.param_groups has other parameters than it was made with: add some with add_param_group, freeze some "
            "with requires_grad_(False), or make the optimizer anew"
        )
    for group in param_groups:
        if not all(0.0 <= float(beta) < 1.0 for beta in group["betas"]):
            raise UsageError(f"betas in opt.param_groups are {tuple(group['betas'])}: they lie in [0, 1)")
    return tuple(
        GroupHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )
        for group in param_groups
    )


def _close(pid: int, leave: Callable[[], None], place: PrivateCluster | Seat) -> None:
    """End an optimizer; in a forked child, whose parent goes on with it, do nothing."""
    if os.getpid() != pid:
        return
    if threading.current_thread().name.startswith(THREAD_PREFIX):  # the garbage collector runs on whatever thread
        threading.Thread(target=_close, args=(pid, leave, place), name="hytrain-close").start()
        return
    try:
        leave()
    finally:  # Ctrl-C while the last updates land
        place.close()


def _any_thawed(of: Callable[[], AdamW | None]) -> bool:
    """Whether a parameter needs a gradient now that nobody trains, and the model has all of its own in place.

    `torch.func.functional_call` calls it with others in theirs.
    """
    optimizer = of()
    if optimizer is None or not any(p.requires_grad and id(p) not in _managed for p in optimizer._others):
        return False
    present = {id(parameter) for parameter in optimizer._model.parameters()}
    return all(id(p) in present for group in optimizer.param_groups for p in group["params"])


def _leave(engine: Engine, detach: Callable[[], None]) -> None:
    """End an engine: the run's processes are free for another."""
    try:
        engine.close()
    finally:
        detach()


def _detach(hooks: Callable[[], None], parameters: list[TrainedParameter]) -> None:
    """The model is an ordinary one from now on."""
    hooks()
    for known in parameters:
        known.drop_consumed()
        _managed.pop(id(known.parameter), None)


def _end_in_child() -> None:
    """A forked child, a worker of a DataLoader say, has a copy of the model, and no part in its training."""
    for optimizer in list(_optimizers):
        if optimizer._engine.end_in_child():
            optimizer._detach()


os.register_at_fork(after_in_child=_end_in_child)


def _gates(layers: list[TrainedLayer], parts: list[ModelLayer]) -> list[tuple[nn.Module, Gate]]:
    """A gate for each module that reads layers; each parameter learns which gates cover it."""
    found: dict[int, tuple[nn.Module, list[TrainedLayer]]] = {}
    for layer, part in zip(layers, parts, strict=True):
        for module in part.modules:
            found.setdefault(id(module), (module, []))[1].append(layer)
    gates = [(module, Gate(tuple(read))) for module, read in found.values()]
    covers: dict[int, list[Gate]] = {}
    for module, gate in gates:
        for parameter in module.parameters(recurse=True):
            covers.setdefault(id(parameter), []).append(gate)
    for layer in layers:
        for segment in layer.segments:
            segment.owner.gates = [gate for gate in covers.get(id(segment.owner.parameter), []) if layer in gate.layers]
    return gates
