"""`hytrain.AdamW`: what a user touches.

    opt = hytrain.AdamW(model, lr=3e-4, weight_decay=0.1)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()

The face of a session as a torch optimizer. `session` has the processes and the layers, `step.engine` does the work.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hytrain import saving, session
from hytrain.checks import check_free, check_group, check_model, check_options, named_groups
from hytrain.config import ClusterConfig
from hytrain.errors import UsageError
from hytrain.model.consumed import NO_STATE, SCALER, NoState
from hytrain.session import Session
from hytrain.statistics import Statistics
from hytrain.step.engine import Engine
from protocol.messages import GroupHyper


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
        options = check_options(
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
        self._model = model
        check_model(model)
        check_free((parameter for parameter in model.parameters() if parameter.requires_grad), session.managed())
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
        self._group_ids = _ids(self.param_groups)
        me = weakref.ref(self)
        self._session = Session(
            model,
            options,
            ClusterConfig.resolve(flags=flags),
            groups=partial(_groups, me),
            read_groups=partial(_read_groups, me),
        )
        self._close = weakref.finalize(self, self._session.close)

    @property
    def _engine(self) -> Engine:
        return self._session.engine

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
            self._session.require_all_seen()
            self._engine.step()
        return loss

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
        if not hasattr(self, "_session"):  # torch's constructor
            super().add_param_group(param_group)
            return
        before = self._engine
        before.before_regroup("add_param_group")
        named = named_groups(self._model, [param_group])
        self._session.require_free([p for group in named for p in group["params"]])
        for group in named:
            super().add_param_group(group)
        try:
            check_group(self.param_groups[-1])
            self._group_ids = _ids(self.param_groups)
            self._session.rebuild()
        except BaseException:
            if self._engine is before:
                del self.param_groups[len(self.param_groups) - len(named) :]
                self._group_ids = _ids(self.param_groups)
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
        state = saving.state_dict(self.param_groups, self._session.parameters, self._session.resting)
        if (scaling := self._engine.loss_scale) is not None:
            state["loss_scale"] = scaling.state()
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or from `torch.optim.AdamW`. Raises `ConfigError` if it does not fit."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._engine.before_load("opt.load_state_dict()")
        self._engine.expose_state()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        saving.load_state_dict(
            state_dict,
            self.param_groups,
            self._session.parameters,
            self._session.resting,
            names,
            when_checked=self._import_for_loading,
        )
        if (scaling := self._engine.loss_scale) is not None:
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
        return self._session.accumulation.held()

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
            self._session.parameters,
            self._session.resting,
            steps=engine.steps,
            loss_scale=engine.loss_scale,
        )

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote. The model's weights are loaded by whoever loads the model, before or after.

        Raises `ConfigError`, before anything is changed, if it is not whole or not of this model.
        """
        self._engine.before_load("opt.load()")
        self._engine.expose_state()
        named = dict(self._model.named_parameters())
        self._engine.steps = saving.load(
            Path(folder),
            self.param_groups,
            self._session.parameters,
            self._session.resting,
            named,
            loss_scale=self._engine.loss_scale,
            when_checked=self._import_for_loading,
        )
        self._engine.state_was_loaded()

    def log(self, step: int, **numbers: float) -> None:
        """Add the loop's own numbers (loss, tokens/s, …) to the record of step `step`, counted from 1."""
        self._session.log(step, {name: float(value) for name, value in numbers.items()})

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global gradient norm before clipping, float32 on the device, shape (); None without one.

        It is taken where a step waits for it: with `on_nonfinite`, with `loss_scale` (which is not in it), or with
        `max_grad_norm` and global clipping. Reading its value waits for the device.
        """
        return self._engine.grad_norm

    @property
    def loss_scale(self) -> Tensor | None:
        """What `scale` multiplies by now, float32 on the device, shape (); None without the option of that name.

        It changes at the end of a step's last backward. Reading its value waits for the device.
        """
        scaling = self._engine.loss_scale
        return None if scaling is None else scaling.value

    @property
    def skipped_steps(self) -> int:
        """Steps left out by `on_nonfinite` or `loss_scale`, as far as they are known.

        The last one's verdict may be on its way.
        """
        return self._engine.skipped_steps

    def statistics(self) -> Statistics:
        """The last finished step: its time, stall, k, and who owns what."""
        return self._engine.statistics

    def processes(self) -> list[tuple[str, int, list[int]]]:
        """Role, process ID and cores of each process of the run."""
        return self._session.processes()

    @property
    def run_dir(self) -> Path:
        """The run's folder: metrics, logs."""
        return self._session.run_dir

    def close(self) -> None:
        """End this optimizer, and the private cluster if it had to start one. Runs by itself at exit.

        Raises `NonFiniteGradients`, when all is closed, if it is to be raised for the last step.
        """
        self._close()


def _groups(of: Callable[[], AdamW | None]) -> list[dict[str, Any]]:
    """The parameter groups as they are now; none once nobody holds the optimizer."""
    optimizer = of()
    return [] if optimizer is None else optimizer.param_groups


def _ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """Which parameters are in which group."""
    return [[id(parameter) for parameter in group["params"]] for group in param_groups]


def _read_groups(of: Callable[[], AdamW | None]) -> tuple[GroupHyper, ...]:
    """The hyperparameters as they are now. The list of groups may have been replaced since the last time."""
    param_groups, optimizer = _groups(of), of()
    ids = [] if optimizer is None else optimizer._group_ids
    if len(param_groups) != len(ids):
        raise UsageError(f"opt.param_groups has {len(param_groups)} groups in place of {len(ids)}: use add_param_group")
    if _ids(param_groups) != ids:
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
