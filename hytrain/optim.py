"""`hytrain.AdamW`, `Adam`, `SGD`, `Lion` and `Muon`, the user's interface.

    opt = hytrain.AdamW(model, lr=3e-4, weight_decay=0.1)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()

Each presents a session as a torch optimizer. `session` has the processes and the layers, `step.engine` does the work.
"""

from __future__ import annotations

import gc
import operator
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from hytrain import algorithms, session
from hytrain.algorithms import Algorithm
from hytrain.checks import (
    check_device,
    check_free,
    check_masters,
    check_model,
    check_options,
    check_same,
    group_ids,
    groups_for_torch,
    muon_groups,
    read_groups,
)
from hytrain.config import ClusterConfig
from hytrain.cotraining.shares import CoTraining
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.memory.capacity import GpuMemory
from hytrain.model import fsdp
from hytrain.model.consumed import NO_STATE, SCALER, NoState
from hytrain.model.parts import Parts
from hytrain.model.trained import TrainedParameter, plane_dtypes
from hytrain.model.watched import unwatched
from hytrain.run.ranks import Ranks
from hytrain.session import Session
from hytrain.state import dicts
from hytrain.state.saver import Saver
from hytrain.statistics import Statistics
from hytrain.step.engine import Engine
from hytrain.trackers import check_trackers
from protocol.rules import Hyper

if TYPE_CHECKING:
    from hytrain.state import folders


class SharedOptions(TypedDict, total=False):
    """The options that `Optimizer` has for each of its algorithms."""

    grad_accumulation: int
    accumulate_on: str
    max_grad_norm: float | None
    clip: str
    on_nonfinite: str | None
    speculate: bool | None
    loss_scale: float | str | None
    k: float | str
    visit: float | str
    offload_weights: float | str
    offload_activations: bool
    device: torch.device | str | None
    policy: str
    objective: str
    backend: str
    gradient_dtype: torch.dtype | None
    state_dtype: torch.dtype | str
    master_dtype: torch.dtype | str
    overlap: bool
    cores: str | None
    threads: int | None
    run_dir: str | os.PathLike[str] | None
    host_memory_limit: int | None
    gpu_memory_limit: int | None
    trace: bool | None
    pipeline_group: ProcessGroup | None
    log_to: Sequence[str]


class TorchsOptions(SharedOptions, total=False):
    """Those that torch's classes have besides, and HyTrain only with their defaults, or without an effect."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class Optimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the GPU or in host memory, layer by layer: the base class of all algorithms.

    The GPU updates the layers whose state it holds. A CPU process updates the others while the GPU works. The
    coordinator process decides which layers are where. Given the same gradients, the result is the same bit for bit.

    Args:
        model: The module to train. Its parameters stay where they are: float32, bfloat16 or float16, on one device.
            After `fully_shard` or `parallelize_module`, each rank trains its shards; all ranks construct the optimizer
            together. A pipeline's rank may give several modules.
        param_groups: What torch's `params` takes, over parameters of `model`: an iterable of parameters, of names and
            parameters, or of groups of them. By default, one group with all parameters.
        defaults: The algorithm's hyperparameters, for groups without their own.
        grad_accumulation: How many backwards make a step. Their gradients are summed in float32; the loop divides the
            loss. The updates start in the last backward, or in an earlier `step()`. See `no_sync`.
        accumulate_on: Where the sums are kept, 4 bytes per parameter: "device"; "host", from where they travel over
            the link (the same bits); or "auto", the device if it has room when the first sum is made.
        max_grad_norm: Clip the global norm of the gradients to this, as `torch.nn.utils.clip_grad_norm_` does.
        clip: "global"; or "per_layer", a different algorithm, which clips the norm of each layer's gradients.
        on_nonfinite: "skip" skips a step whose gradients are not all finite; no bit of the state changes. "raise" does
            so too, and raises `NonFiniteGradients` in the next backward, `synchronize` or `close`. None trains on, as
            torch does.
        speculate: Whether the CPU updates before the global norm is known, and undoes the update exactly if it was
            wrong. This needs a second copy of weights and state in host memory; without room for it, the CPU waits.
            With None, the coordinator decides by measurement; with `Muon`, the CPU waits.
        loss_scale: A number, or "dynamic" to do what `torch.amp.GradScaler` does. Call `opt.scale(loss).backward()`.
            Norm and update are those of the gradients divided by the scale. Steps that are not finite are skipped and
            lower a dynamic scale.
        k: Fraction of the parameters that the GPU owns, in [0, 1], or "auto" to let the coordinator decide.
        visit: The fraction of the parameters that the GPU updates although their state is in host memory, from where
            it is fetched for each update. The CPU updates the rest. A number with a number for k, or "auto" with
            k="auto" and policy "deadline", which then decides both.
        offload_weights: The fraction of the parameters whose weights rest in host memory. They are copied to the GPU
            before they are needed, in forward and again in backward, and take no memory there otherwise. Whole blocks
            are offloaded, and only while the GPU owns none of their state. With "auto", all of them are at first, and
            then as many as policy "deadline" finds best in the memory that steps leave free; others stay with all.
        offload_activations: Whether what the model's forward saves for backward goes to host memory, and comes back for
            that: with activation checkpointing the blocks' inputs, otherwise all that blocks save. The same bits.
        device: Where to train a model that is still on the CPU: it is moved there, but for weights that are offloaded.
            So the GPU need not hold them all. By default where the model is.
        policy: How "auto" decides: "deadline", "balance", "cotrain"; or "random", which moves layers all the time.
        objective: What "deadline" optimizes: "speed", with the least GPU memory; "gpu-memory"; or "host-memory".
        backend: Implementation of the CPU's update: "auto", "native", "torch" or "deepspeed".
        gradient_dtype: The dtype in which gradients of float32 parameters are copied. By default their own.
        state_dtype: The dtype of the moments. "float32" is exact. "bfloat16" and "float8" are not: moments take two
            bytes or one in place of four, and are rounded stochastically, with the same bits wherever they are updated;
            see docs/memory.md.
        master_dtype: The dtype of the masters of bfloat16 weights. "float32" is exact. "bfloat16" is not: the weights
            are their own masters, rounded stochastically, and take two bytes less. Others keep their masters.
        overlap: False makes `step()` do every update, layer by layer: the same bits, for comparisons and debugging.
        cores: The optimizer process's cores. This option and those below are for the processes that this call starts
            if none are running.
        threads: The optimizer process's threads.
        run_dir: The run's folder.
        host_memory_limit: The most host memory that planes may take, in bytes.
        gpu_memory_limit: The most memory to plan with on each GPU, in bytes.
        trace: Whether to write `trace.json`, the timeline of all processes.
        pipeline_group: The process group of a pipeline's stages, which train different parameters. Norms are those of
            all stages together.
        log_to: What else gets the numbers of `log`, and k, step time and stall of each logged step: "tensorboard" and
            "wandb". The files are in the run's folder; W&B is offline unless WANDB_MODE is set. Rank 0 writes them.
        torchs: What torch's class of the same name takes besides. `fused` and `foreach` choose among torch's
            implementations: they are taken, and change nothing here. Others must have their defaults.

    Raises:
        UnsupportedError: HyTrain refuses the model or a practice; the message says what to do instead.
        ConfigError: A setting is invalid.
        MissingPackage: `log_to` needs a library that is not installed.
        CapacityError: Memory cannot suffice; the message shows the arithmetic.
        ClusterError: The other processes did not start, or died.
    """

    algorithm: ClassVar[Algorithm]

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None,
        defaults: dict[str, Any],
        *,
        grad_accumulation: int = 1,
        accumulate_on: str = "auto",
        max_grad_norm: float | None = None,
        clip: str = "global",
        on_nonfinite: str | None = None,
        speculate: bool | None = None,
        loss_scale: float | str | None = None,
        k: float | str = "auto",
        visit: float | str = 0.0,
        offload_weights: float | str = 0.0,
        offload_activations: bool = False,
        device: torch.device | str | None = None,
        policy: str = "deadline",
        objective: str = "speed",
        backend: str = "auto",
        gradient_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str = "float32",
        master_dtype: torch.dtype | str = "float32",
        overlap: bool = True,
        cores: str | None = None,
        threads: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        host_memory_limit: int | None = None,
        gpu_memory_limit: int | None = None,
        trace: bool | None = None,
        pipeline_group: ProcessGroup | None = None,
        log_to: Sequence[str] = (),
        **torchs: Any,
    ) -> None:
        if unknown := torchs.keys() - {*self.algorithm.not_offered, *self.algorithm.implementations}:
            raise TypeError(f"hytrain.{self.algorithm.name} has no option {min(unknown)!r}")
        ranks = Ranks.of_job()
        with ranks.together():
            self.algorithm.check_as_torch(torchs)
            options = check_options(
                algorithm=self.algorithm,
                k=k,
                visit=visit,
                offload_weights=offload_weights,
                offload_activations=offload_activations,
                policy=policy,
                objective=objective,
                backend=backend,
                gradient_dtype=gradient_dtype,
                state_dtype=state_dtype,
                master_dtype=master_dtype,
                grad_accumulation=grad_accumulation,
                accumulate_on=accumulate_on,
                max_grad_norm=max_grad_norm,
                clip=clip,
                on_nonfinite=on_nonfinite,
                speculate=speculate,
                loss_scale=loss_scale,
                overlap=overlap,
            )
            if ranks.rank == 0:
                check_trackers(log_to, "log_to")
            target = check_device(device, ranks)
            self._model: nn.Module = Parts(model) if isinstance(model, list | tuple) else cast(nn.Module, model)
            check_model(self._model)
            check_masters(self._model, options)
            fsdp.reshard(self._model)
            super().__init__(self._groups_from(param_groups), defaults)
            for group in self.param_groups:
                self.algorithm.check(group)
            flags = {
                "cores": cores,
                "threads": threads,
                "run_dir": None if run_dir is None else os.fspath(run_dir),
                "host_memory_limit": host_memory_limit,
                "gpu_memory_limit": gpu_memory_limit,
                "trace": trace,
            }
            config = ClusterConfig.resolve(flags=flags)
            self._precision = options.precision
            self._note_groups()
            _replace(self._model, self.param_groups)
        check_same(ranks, options)
        me = weakref.ref(self)
        self._saver = Saver()
        self._session = Session(
            self._model,
            options,
            config,
            ranks=ranks,
            pipeline_group=pipeline_group,
            device=target,
            groups=partial(_groups, me),
            read_groups=partial(_read_groups, me),
            log_to=log_to,
        )
        self._close = weakref.finalize(self, self._session.close)
        _made.add(self)

    @property
    def _engine(self) -> Engine:
        return self._session.engine

    @property
    def _saved(self) -> tuple[list[dict[str, Any]], list[TrainedParameter], dicts.Resting]:
        return self.param_groups, self._session.parameters, self._session.resting

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Mark the end of a step. Its updates started while backward ran; see docs/backward-commits.md.

        Args:
            closure: Called once before that, with gradients enabled, as torch's optimizers do.

        Returns:
            What the closure returns, usually the loss; None without a closure.

        Raises:
            UsageError: Continuing would train something else than asked for.
        """
        return self._step(closure)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """`torch.compile(opt.step)` has nothing to compile here. What it wraps must not be what is disabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), unwatched():
            self._session.require_all_seen()
            self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, and drop the sums of a step that has not started its updates.

        All other gradients were consumed in backward.

        Raises:
            UsageError: `set_to_none` is False, or the step's updates have started.
        """
        if not set_to_none:
            raise UsageError(
                "zero_grad(set_to_none=False): HyTrain's gradients are gone after backward; use zero_grad()"
            )
        self._zero_grad()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _zero_grad(self) -> None:
        self._engine.drop_gradients()
        with unwatched():
            super().zero_grad(set_to_none=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, from the next step on. All other parameters continue unchanged.

        It also raises what the constructor raises.

        Raises:
            UsageError: Called between backward and `step()`.
        """
        if not hasattr(self, "_session"):  # torch's constructor
            super().add_param_group(param_group)
            return
        before, groups = self._engine, len(self.param_groups)
        try:
            with self._session.ranks.together():
                before.before_regroup("add_param_group")
                named = self._groups_from([param_group])
                self._session.require_free([p for group in named for p in group["params"]])
                for group in named:
                    super().add_param_group(group)
                    self.algorithm.check(self.param_groups[-1])
            self._note_groups()
            self._session.rebuild()
        except BaseException:
            if self._engine is before:
                del self.param_groups[groups:]
                self._note_groups()
            raise

    def _groups_from(self, param_groups: ParamsT | None) -> list[dict[str, Any]]:
        """The groups that torch's constructor gets, with those of their defaults that not all of them have."""
        return groups_for_torch(self._model, param_groups)

    def _note_groups(self) -> None:
        """Remember what the groups are, to notice when the loop changes more than it may."""
        self._kept = [parameter for group in self.param_groups for parameter in group["params"]]  # by nothing else
        self._group_ids = group_ids(self.param_groups)
        self._rules = [self.algorithm.rule(group) for group in self.param_groups]
        self._no_state.planes = {
            id(parameter): plane_dtypes(parameter, rule, self._precision)
            for group, rule in zip(self.param_groups, self._rules, strict=True)
            for parameter in group["params"]
        }

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of torch's optimizer of the same name, after waiting for all updates.

        A parameter that was never updated has no entry, as in torch; before the first step, all have entries of zeros.
        Each entry counts the parameter's updates in `step`, also where torch does not. Moments are views of the planes,
        not copies; float8 ones are copies, in bfloat16 and in host memory. If the GPU owns some layers and the host
        others, those of the GPU are copied to the host. bfloat16 parameters have a `remainder` (int16) next to the
        moments: weights and remainder together are the master. The `remainder` of float16 parameters is the master
        itself (float32). Remainders are copies. The loss scale's state is in the first group, and the step's number
        beside the groups, under keys that torch ignores.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.import_written()
        self._engine.before_load("opt.state_dict()")
        self._engine.expose_state()
        state = dicts.state_dict(*self._saved, loss_scale=self._engine.loss_scale)
        state["steps"] = self._engine.steps
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or from torch; parameters may have names for numbers.

        Raises:
            ConfigError: The state does not fit.
            UsageError: Called between backward and `step()`.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._engine.before_load("opt.load_state_dict()")
        self._engine.expose_state()
        dicts.load_state_dict(
            state_dict,
            *self._saved,
            list(self._model.named_parameters(remove_duplicate=False)),
            loss_scale=self._engine.loss_scale,
            when_checked=self._import_for_loading,
        )
        counts = map(dicts.count_of, state_dict["state"].values())
        self._session.restored(state_dict.get("steps", max(counts, default=0)))
        self._engine.state_was_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _import_for_loading(self) -> None:
        """Called before state is overwritten. Keeps remainders: what is loaded may be a view of the current state."""
        self._engine.import_weights(keep_remainder=True)
        self._engine.expose_state()

    @property  # type: ignore[override]
    def state(self) -> NoState:
        """Always empty, but true; see `state_dict`. Reading or writing an entry raises `UsageError`."""
        return self._no_state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_no_state"):
            raise UsageError(NO_STATE)
        self._no_state = NoState()  # torch's constructor

    def __getstate__(self) -> dict[str, Any]:
        """Called by `copy` and `pickle`."""
        raise UsageError("an optimizer of HyTrain cannot be copied or pickled: use its state_dict(), or opt.save")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step`, before anything else."""
        raise UsageError(SCALER)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by `Accelerator.prepare`, which the Trainer calls too, before anything else."""
        raise UnsupportedError(
            "Accelerate and the Hugging Face Trainer clip, accumulate and save in ways that only an adopted "
            "optimizer of HyTrain follows. With a Trainer, leave its optimizers out and call "
            "hytrain.integrations.transformers.adopt(trainer); with an Accelerator, prepare what "
            "hytrain.integrations.accelerate.adopt(accelerator, model, …) returns"
        )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the present `loss_scale`, for `opt.scale(loss).backward()`.

        Without `loss_scale`, the loss itself. Every backward of a step needs it, also those that only sum gradients.
        The scale does not change between them.
        """
        scaling = self._engine.loss_scale
        return loss if scaling is None else scaling.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backwards only sum their gradients. The updates start in the first backward after it.

        Like `DistributedDataParallel.no_sync`, for loops that know which micro-batch is the last.
        """
        return self._session.accumulation.held()

    def cotrain(
        self,
        build: Callable[[], nn.Module],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        parts: int,
        cpu_parts: int | str = "auto",
    ) -> CoTraining:
        """Let a process on the CPU train some micro-batches of each step, beside the model's device.

        The gradients are summed in the order of the micro-batches, whoever computed them. The process has the weights
        where the optimizer process keeps them. It ends with the optimizer, or with what this returns.

        Args:
            build: Makes the model anew, without arguments. The CPU trainer calls it on the meta device, so the model
                takes no memory there, and gives it the weights, buffers and modes of this one.
            loss: Gets a model and a micro-batch, and returns what to call `backward()` on, shape (). Divide it by the
                number of micro-batches yourself.
            parts: The number of micro-batches of a step.
            cpu_parts: How many of them the CPU trains: fewer than `parts`, or "auto" for as many as make steps
                shortest, often none.

        `build` and `loss` are functions of modules that can be imported, or `functools.partial`s of them with numbers,
        strings, lists and dictionaries; the CPU trainer imports them by name.

        Returns:
            An object whose `backward(batches)` takes the place of the step's backwards.

        Raises:
            ConfigError: A function cannot be imported, or a number does not fit.
            UnsupportedError: A CPU trainer cannot train this: on several ranks, with `loss_scale`.
            UsageError: It was called before, and what it returned is not closed.
            CapacityError: Host memory has no room for the gradients of so many parts.
            ClusterError: The CPU trainer does not start: `build` makes another model, for example. With "auto", the log
                says so.
        """
        return self._session.cotrain(build, loss, parts=parts, cpu_parts=cpu_parts)

    def synchronize(self) -> None:
        """Return when every update has arrived in the parameters.

        Parameters wait by themselves when they are used. Call it before reading a view or an array that was made of one
        before the step.
        """
        self._engine.synchronize()

    def import_weights(self) -> None:
        """Take the parameters' present values as the masters.

        Writes through torch are noticed without it. Call it after others, as through a NumPy array.
        """
        self._engine.import_weights()

    def save(self, folder: str | Path) -> None:
        """Write the whole optimizer state into `folder` as safetensors: step counts, moments, remainders.

        All ranks call it, with a folder that all of them see. Each one writes its own shards.

        A state that `folder` has is replaced in one rename: if the process is killed, the folder has the old state or
        the new one. `sha256sum -c SHA256SUMS` in the folder checks it, and so does `load`. The folder's other files
        stay. Several processes may save into one folder: the last one to finish has saved its state.

        Raises `SavingError` if it cannot be written: the disk is full, for example. Then the old state is there, and
        training can go on.
        """
        self._write(folder, "opt.save()")(Ranks.of_job(), in_parallel=True)

    def async_save(self, folder: str | Path) -> Future[None]:
        """Like `save`, but return as soon as there is a copy of this step's state, and train on meanwhile.

        The copy is in GPU memory that no step so far has needed. Without so much of it on every rank, it is the files,
        which the system has in memory. A thread of this process writes the files, waits for the disk, computes the
        checksums, and makes the state the folder's current one. Then the future is done, or has the `SavingError`,
        which is also logged. The next save waits for it, and so does `close`.

        The name and the meaning are those of `torch.distributed.checkpoint.async_save`. Model weights are not part of
        it: save them before the next step.
        """
        finish = self._write(folder, "opt.async_save()", self._session.memory)
        return self._saver.start(finish, f"the optimizer's state in {folder}")

    def _write(self, folder: str | Path, asked: str, memory: GpuMemory | None = None) -> folders.Finish:
        """Write the state into files, and return what makes them the folder's state."""
        from hytrain.state import folders  # importing torch's distributed checkpoints takes a second

        self._saver.wait()
        engine = self._engine
        engine.import_written()
        engine.before_load(asked)
        engine.expose_state()
        return folders.save(Path(folder), *self._saved, steps=engine.steps, loss_scale=engine.loss_scale, memory=memory)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, on any number of ranks. Load the model's weights yourself, before or after.

        What others save there meanwhile is not read.

        Raises:
            ConfigError: The folder is incomplete, damaged, or another model's. Nothing has changed.
            UsageError: Called between backward and `step()`.
        """
        from hytrain.state import folders

        self._saver.wait()
        self._engine.before_load("opt.load()")
        self._engine.expose_state()
        steps = folders.load(
            Path(folder),
            *self._saved,
            dict(self._model.named_parameters()),
            loss_scale=self._engine.loss_scale,
            when_checked=self._import_for_loading,
        )
        self._session.restored(steps)
        self._engine.state_was_loaded()

    def log(self, step: int, **numbers: float) -> None:
        """Add the loop's own numbers (loss, tokens/s, …) to the record of step `step`.

        Call it after the step, before it, or some steps later, with all numbers or with each by itself. Steps are
        counted from 1 and on from what `load` or `load_state_dict` restored, unless the loop counts in another way:
        if the first `step` of this process is not one of its steps or the next one, it becomes the number of the last
        finished step, or of the next step if the last one is already logged or none is finished.

        Raises `UsageError` for what no record can have, before anything is sent: training can go on.
        """
        self._session.log(operator.index(step), {name: float(value) for name, value in numbers.items()})

    def checkpoint_requested(self) -> bool:
        """Whether `hytrain-monitor --checkpoint` has asked for a checkpoint since the last call.

        A loop that calls it after each step, and saves when it is True, can be asked; without, the monitor says that
        it cannot. Recipes do. Each rank answers for itself, perhaps in another step than the others: agree on it.
        """
        return self._engine.checkpoint_requested()

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global gradient norm before clipping: float32 on the device, shape (); or None.

        It is computed if a step needs it: with `on_nonfinite`, with `loss_scale` (the norm is unscaled), or with
        `max_grad_norm` and global clipping. Reading its value waits for the device.
        """
        return self._engine.grad_norm

    @property
    def loss_scale(self) -> Tensor | None:
        """The present loss scale: float32 on the device, shape (); None without the option `loss_scale`.

        It changes at the end of a step's last backward. Reading its value waits for the device.
        """
        scaling = self._engine.loss_scale
        return None if scaling is None else scaling.value

    @property
    def skipped_steps(self) -> int:
        """The number of steps that `on_nonfinite` or `loss_scale` has skipped.

        The last step may be missing: its norm may not be known yet.
        """
        return self._engine.skipped_steps

    def statistics(self) -> Statistics:
        """The last finished step: its time, stall, k, and the layers that the GPU owns."""
        return self._engine.statistics

    def processes(self) -> list[tuple[str, int, list[int]]]:
        """Role, process ID and cores of each of the run's processes."""
        return self._session.processes()

    @property
    def run_dir(self) -> Path:
        """The run's folder, with metrics and logs."""
        return self._session.run_dir

    def __enter__(self) -> Self:
        """`with hytrain.AdamW(…) as opt:` closes it at the end, also after an exception."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End this optimizer, and the processes that it started. Runs by itself at exit.

        Raises:
            NonFiniteGradients: The last step's gradients were not finite, with `on_nonfinite="raise"`. Everything is
                closed.
        """
        self._saver.close()
        self._close()


class Adam(Optimizer):
    """Adam (Kingma & Ba, 2015), as in `torch.optim.Adam`.

    Args:
        model: As for `Optimizer`.
        param_groups: As for `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Added to the gradient, times the weight: it is not decoupled.
        amsgrad: HyTrain has only False.
        maximize: Maximize the objective instead of minimizing it.
        options: The other options of `Optimizer`, which also says what is raised.
    """

    algorithm = algorithms.ADAM

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(model, param_groups, defaults, amsgrad=amsgrad, **options)


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, 2019), as in `torch.optim.AdamW`: Adam with decoupled weight decay.

    Its arguments are those of `Adam`.
    """

    algorithm = algorithms.ADAMW

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None:
        super().__init__(model, param_groups, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options)


class SGD(Optimizer):
    """Stochastic gradient descent, as in `torch.optim.SGD`.

    With momentum, it has 4 bytes of state per parameter, and none without, besides the masters of 16-bit weights.
    A group's momentum may change, but not between 0 and other numbers.

    Args:
        model: As for `Optimizer`.
        param_groups: As for `Optimizer`.
        lr: Learning rate.
        momentum: How much of the momentum buffer is kept in each step.
        dampening: The gradient's part in the buffer is 1 - dampening, from the second step on.
        weight_decay: Added to the gradient, times the weight: it is not decoupled.
        nesterov: Nesterov's momentum. It needs a momentum, and no dampening.
        maximize: Maximize the objective instead of minimizing it.
        options: The other options of `Optimizer`, which also says what is raised.
    """

    algorithm = algorithms.SGD

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None = None,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchsOptions],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(model, param_groups, {**defaults, "nesterov": nesterov, "maximize": maximize}, **options)


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), with 4 bytes of state per parameter.

    Each weight moves by the learning rate, in the direction of a sign. So the authors advise a learning rate 3 to 10
    times smaller than AdamW's, and a weight decay as many times larger.

    Args:
        model: As for `Optimizer`.
        param_groups: As for `Optimizer`.
        lr: Learning rate.
        betas: The momentum's part in the sign of the step; its decay rate.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
        options: The other options of `Optimizer`, which also says what is raised.
    """

    algorithm = algorithms.LION

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(model, param_groups, defaults, **options)


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for matrices, as in `torch.optim.Muon`, and AdamW for the rest.

    A matrix moves by its momentum, made orthogonal. That takes the whole matrix and a GPU: the momentum is on the GPU,
    or visits it from host memory. With 4 bytes of state per parameter, no optimizer process updates it.

    Args:
        model: As for `Optimizer`.
        param_groups: As for `Optimizer`. Each group is Muon's, with parameters of two dimensions, or AdamW's, with
            `use_muon=False`. By default, Muon has the matrices of the repeated blocks except embeddings, and AdamW has
            all other parameters: embeddings, the head, norms and biases.
        lr: Learning rate of Muon's groups.
        weight_decay: Their decoupled weight decay.
        momentum: How much of the momentum buffer is kept in each step.
        nesterov: Nesterov's momentum.
        ns_coefficients: Of the Newton-Schulz iteration that makes a matrix orthogonal: a, b and c.
        eps: The least norm by which a matrix is divided before that.
        ns_steps: The number of its steps.
        adjust_lr_fn: "original", or None, multiplies the learning rate of a matrix by sqrt(max(1, rows / columns));
            "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), so that learning rates of AdamW fit.
        adamw: Hyperparameters of AdamW's groups, where they are not those of `torch.optim.AdamW`: `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        options: The other options of `Optimizer`, which also says what is raised.
    """

    algorithm = algorithms.MUON

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        param_groups: ParamsT | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        torchs = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}
        rest = dict(adamw or {})
        if unknown := rest.keys() - torchs.keys():
            raise ConfigError(f"adamw has {min(unknown)!r}: it takes {', '.join(torchs)}")
        self._defaults_of: dict[bool, dict[str, Any]] = {
            False: {"use_muon": False, **torchs, **rest},
            True: {
                "use_muon": True,
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        }
        super().__init__(model, param_groups, {}, **options)

    def _groups_from(self, param_groups: ParamsT | None) -> list[dict[str, Any]]:
        given = muon_groups(self._model) if param_groups is None else param_groups
        groups = groups_for_torch(self._model, given)
        return [{**self._defaults_of[bool(group.get("use_muon", True))], **group} for group in groups]


#: All that were made and still exist, also those that are closed.
_made: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _replace(model: nn.Module, param_groups: list[dict[str, Any]]) -> None:
    """Close the optimizers of parameters that a new one is made for: the newest one trains them.

    A notebook's cell that makes `opt` anew cannot close the old one, which has the name until then. Whoever still uses
    the old one gets an error. Raises `UnsupportedError` if another one trains other parameters of the model.
    """
    if any(other._close.alive for other in _made):
        gc.collect()  # an unreachable optimizer may be in a reference cycle: a scheduler creates one
    given = {id(p): p.requires_grad for group in param_groups for p in group["params"]}
    trained = {identity for identity, needs_gradient in given.items() if needs_gradient}
    for other in list(_made):
        same = other._model is model and any(identity in given for ids in other._group_ids for identity in ids)
        if same or other._session.trains(trained):
            other._session.last_words = (
                "this optimizer is closed, as a newer one was made for parameters that it trained: use the newer "
                "one, or give one optimizer all of them, in as many param_groups as wanted"
            )
            other.close()
    check_free((parameter for parameter in model.parameters() if parameter.requires_grad), session.managed())


def _groups(of: Callable[[], Optimizer | None]) -> list[dict[str, Any]]:
    """The current parameter groups; none if the optimizer is gone."""
    optimizer = of()
    return [] if optimizer is None else optimizer.param_groups


def _read_groups(of: Callable[[], Optimizer | None]) -> tuple[Hyper, ...]:
    optimizer = of()
    if optimizer is None:
        return ()
    return read_groups(optimizer.algorithm, optimizer.param_groups, optimizer._group_ids, optimizer._rules)
