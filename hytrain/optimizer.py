"""The base class of `hytrain.AdamW` and all others: a torch optimizer over a session.

`session` has the processes and the layers, `step.engine` does the work, `state.saving` saves and loads.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Self, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hytrain.errors import ConfigError, UsageError
from hytrain.memory.lending import Loan
from hytrain.memory.transfer import Transfer
from hytrain.model import fsdp
from hytrain.model.consumed import SCALER
from hytrain.model.given import tensors_of
from hytrain.model.layers import clean
from hytrain.model.parts import Parts
from hytrain.model.watched import unwatched
from hytrain.options import TABLE
from hytrain.readable import nearest, size
from hytrain.run.ranks import Ranks
from hytrain.started import StartedOptimizer
from hytrain.statistics import Statistics
from hytrain.step.scaling import LossScale
from hytrain.uncompiled import uncompiled, undecorated

_clear_gradients: Final = undecorated(torch.optim.Optimizer.zero_grad)


class Optimizer(StartedOptimizer):
    """An optimizer whose state is on the GPU or in host memory, layer by layer: the base class of all algorithms.

    The GPU updates the layers whose state it holds. A CPU process updates the others while the GPU works. The
    coordinator process decides which layers are where. Given the same gradients, the result is the same bit for bit.

    Args:
        params: What torch's `params` takes: an iterable of parameters, of names and parameters, or of groups of them.
            HyTrain finds the model that contains them when it is first called with gradients; until then this is an
            optimizer like torch's. Or the module to train: then training is prepared at once. A pipeline's rank may
            give several modules. Parameters stay where they are: float32, bfloat16 or float16, on one device. After
            `fully_shard` or `parallelize_module`, each rank trains its shards; all ranks make the optimizer together,
            and call the model for the first time together.
        param_groups: With a model: which of its parameters to train, as torch's `params` takes them. By default, one
            group with all parameters.
        defaults: The algorithm's hyperparameters, for groups without their own.
        options: Those of docs/options.md: `hytrain.options` is the table. Options of torch's class of the same name are
            accepted, too: `fused` and `foreach` without effect, because they choose among torch's implementations, the
            others with their defaults.

    With parameters instead of a model, errors about the model are raised by its first forward.

    Raises:
        UnsupportedError: HyTrain refuses the model or a practice; the message says what to do instead.
        ConfigError: A setting is invalid.
        MissingPackage: `log_to` needs a library that is not installed.
        CapacityError: Memory cannot suffice; the message shows the arithmetic.
        ClusterError: The other processes did not start, or died.
    """

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        defaults: dict[str, Any],
        *,
        param_groups: ParamsT | None = None,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - {*TABLE, *self.algorithm.not_offered, *self.algorithm.implementations}:
            wrong, known = min(unknown), [*inspect.signature(type(self)).parameters, *TABLE]
            meant = f"; did you mean {close!r}?" if (close := nearest(wrong, known)) else ""
            raise TypeError(f"hytrain.{self.algorithm.name} has no option {wrong!r}{meant}")
        model = _model_in(params)
        if model is None and param_groups is not None:
            raise ConfigError("param_groups are of a model, hytrain.AdamW(model, param_groups=…): give them alone")
        ranks = Ranks() if model is None else Ranks.of_job()
        with ranks.together():
            self._prepare(options)
            if model is not None:
                self._check_model(ranks, model)
            self._model = model
            super().__init__(self._groups_from(cast(ParamsT, params) if model is None else param_groups), defaults)
            for group in self.param_groups:
                self.algorithm.check(group)
        if model is None:
            self._search()
        else:
            self._start(ranks)

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

    @uncompiled
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """`torch.compile(opt.step)` has nothing to compile here. What it wraps must not be what is disabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._starts_in_step():
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
        if not set_to_none and not self._accumulation.timing.in_step:
            raise UsageError(
                "zero_grad(set_to_none=False): HyTrain's gradients are gone after backward; use zero_grad(), or pass "
                'updates="step"'
            )
        self._zero_grad(set_to_none)

    @uncompiled
    def _zero_grad(self, set_to_none: bool) -> None:
        if set_to_none and self._started is not None:
            self._engine.drop_gradients()
        with unwatched():
            _clear_gradients(self, set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model, from the next step on. All other parameters continue unchanged.

        An optimizer that was made of parameters also takes those of other modules. It also raises what the constructor
        raises.

        Raises:
            UsageError: Called between backward and `step()`.
        """
        with torch.inference_mode(False):  # layers have new memory, which updates write
            self._add_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step`, before anything else."""
        timing = self._accumulation.timing
        if timing.in_step:
            timing.saw("has a GradScaler")
            return False
        raise UsageError(SCALER)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss multiplied by the current `loss_scale`, for `opt.scale(loss).backward()`.

        Without `loss_scale`, the loss itself. Every backward of a step needs it, also those that only sum gradients.
        The scale does not change between them.
        """
        if self._options.loss_scale is None:
            return loss
        scaling = self._engine.verdicts.loss_scale
        assert scaling is not None, "it is an option"
        return scaling.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backwards only sum their gradients. The updates start in the first backward after it.

        Like `DistributedDataParallel.no_sync`, for loops that know which micro-batch is the last.
        """
        return self._accumulation.held()

    def lend_weights(self) -> Loan:
        """Lend the current weights to other processes of this user, which `hytrain.weights.attach(opt.run_dir)`.

        Waits for all updates. Training may go on: a process that has attached them sees this step's until it releases
        them. Weights of CPU-updated layers are lent where they are in host memory, the rest is copied. docs/lending.md
        says more.

        Returns:
            A context. At its end, or with the next call, the weights are taken back: they cannot be attached any more.
            Until then, it maps names to where the tensors are.

        Raises:
            UsageError: Called between backward and `step()`, when updates have begun.
            CapacityError: Host memory has no room for the copies.
        """
        model = self._session.model
        self._engine.before_load("opt.lend_weights()")
        fsdp.reshard(model)  # or else some parameters are not there by their names
        return self._engine.lend_weights(tensors_of(model))

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> Transfer | None:
        """Add gradients that were computed elsewhere to this step's sums, as a backward does that is not its last.

        Args:
            gradients: By the parameters' names, as `lend_weights` has them: in the parameters' shapes and dtypes,
                contiguous, in host memory that is pinned if the model is on a GPU. With `loss_scale`, multiply them.

        Returns:
            Its `synchronize()` returns once that memory may be written again. None if there were no gradients.

        Raises:
            UsageError: A gradient is of no parameter that is trained, or a backward would be refused now.
        """
        named = {clean(known.name): known for known in self._session.parameters}
        for name, gradient in gradients.items():
            own = named[name].own if name in named else None
            if own is None or (gradient.shape, gradient.dtype) != (own.shape, own.dtype):
                wanted = "no such parameter is trained" if own is None else f"it is {own.dtype} of shape {[*own.shape]}"
                given = f"{gradient.dtype} of shape {[*gradient.shape]}"
                raise UsageError(f"add_gradients() got {given} for {name}: {wanted}")
        return self._engine.backward.add([gradients.get(name) for name in named])

    def limit_memory(self, gpu: int | str | None = None, host: int | str | None = None) -> None:
        """Change `gpu_memory_limit` and `host_memory_limit` while training, as "24GiB" or in bytes. None leaves one.

        The next plans keep to it: state moves, and gives memory back, over some steps.
        """
        limits: dict[str, int | None] = {}
        for name, given in (("gpu", gpu), ("host", host)):
            try:
                limits[name] = None if given is None else operator.index(size(given))
            except ValueError as error:
                raise ConfigError(f"limit_memory({name}={given!r}): {error}") from None
            if (limits[name] or 0) < 0:
                raise ConfigError(f"limit_memory({name}={given}): give bytes, at least 0")
        self._session.limit_memory(**limits)

    def park(self, weights: bool = False) -> None:
        """Give back the GPU memory that HyTrain holds between two steps, until `resume`: state, slots, fetched weights.

        What host memory has anyway is freed, and the rest is copied there. Forward still works, but updates do not.

        Args:
            weights: Whether the weights of the trained parameters leave, too: then the model cannot be used. Memory
                that other tensors share stays, such as a view that you keep.

        Raises:
            UsageError: Called between backward and `step()`.
            CapacityError: Host memory has no room for the copies. Nothing has changed.
        """
        if self._started is not None:
            with torch.no_grad():
                self._engine.parking.park(weights=weights)

    def resume(self) -> None:
        """Take again what `park` has given back, with the same bits. Does nothing if nothing is parked.

        Raises:
            torch.OutOfMemoryError: The memory is not free yet. Free it, and call this again.
        """
        if self._started is not None:
            with torch.no_grad():
                self._engine.parking.resume()

    @contextmanager
    def parked(self, weights: bool = False) -> Iterator[None]:
        """`with opt.parked():` is `park` and, at the end, `resume`, also after an exception."""
        self.park(weights)
        try:
            yield
        finally:
            self.resume()

    def synchronize(self) -> None:
        """Return when every update has arrived in the parameters.

        Parameters wait by themselves when they are used. Call it before reading a view or an array that was made of a
        parameter before the step.
        """
        if self._started is not None:
            self._engine.synchronize()

    def import_weights(self) -> None:
        """Make the parameters' current values the masters.

        Writes through torch are noticed without it. Call it after other writes, such as through a NumPy array.
        """
        if self._started is not None:
            self._engine.import_weights()
        else:
            self._resting.drop_remainders()

    def log(self, step: int, **numbers: float) -> None:
        """Add the loop's own numbers (loss, tokens/s, …) to the record of step `step`.

        Call it after the step, before it, or some steps later, with all numbers or with each by itself. Steps are
        counted from 1 and on from what `load` or `load_state_dict` restored, unless the loop counts in another way:
        if the first `step` of this process is not one of its steps or the next one, it becomes the number of the last
        finished step, or of the next step if the last one is already logged or none is finished.

        Raises `UsageError` for what no record can have, before anything is sent: training can go on.
        """
        number, given = operator.index(step), {name: float(value) for name, value in numbers.items()}
        if self._is_searching:
            self._logs.append((number, given))
        else:
            self._session.log(number, given)

    def checkpoint_requested(self) -> bool:
        """Whether `hytrain-monitor --checkpoint` has asked for a checkpoint since the last call.

        Call it after each step, and save when it is True, as recipes do. For a loop that never calls it, the monitor
        says that it cannot ask. Each rank answers for itself, perhaps in another step than the others: agree on a step.
        """
        return self._started is not None and self._engine.checkpoint_requested()

    @property
    def grad_norm(self) -> Tensor | None:
        """The last step's global gradient norm before clipping: float32 on the device, shape (); or None.

        It is computed if a step needs it: with `on_nonfinite`, with `loss_scale` (the norm is unscaled), or with
        `max_grad_norm` and global clipping. Reading its value waits for the device.
        """
        return None if self._started is None else self._engine.verdicts.grad_norm

    @property
    def loss_scale(self) -> Tensor | None:
        """The current loss scale: float32 on the device, shape (); None without the option `loss_scale`.

        It changes at the end of a step's last backward. Reading its value waits for the device.
        """
        return None if self._options.loss_scale is None else cast(LossScale, self._engine.verdicts.loss_scale).value

    @property
    def skipped_steps(self) -> int:
        """The number of steps that `on_nonfinite` or `loss_scale` has skipped.

        The last step may be missing: its norm may not be known yet.
        """
        return 0 if self._started is None else self._engine.verdicts.skipped

    def statistics(self) -> Statistics:
        """The last finished step: its time, stall, k, and the layers that the GPU owns."""
        return Statistics() if self._started is None else self._engine.statistics

    def processes(self) -> list[tuple[str, int, list[int]]]:
        """Role, process ID and cores of each of the run's processes."""
        return self._session.processes()

    @property
    def run_dir(self) -> Path:
        """The run's folder, with metrics and logs."""
        return self._session.run_dir

    def __repr__(self) -> str:
        """As torch's, below a line about the run."""
        last = self.statistics()
        if not self._close.alive:
            state = "closed"
        elif self._started is None:
            state = "waits for its model to be called"
        else:
            state = f"step {last.step}, k={last.k:.3f}, run in {self.run_dir}"
        return f"hytrain.{self.algorithm.name}: {state}\n{super().__repr__()}"

    def __enter__(self) -> Self:
        """`with hytrain.AdamW(…) as opt:` closes it at the end, also after an exception."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _model_in(params: Any) -> nn.Module | None:
    """The model, or the container of several modules; None if these are parameters."""
    if isinstance(params, list | tuple) and any(isinstance(part, nn.Module) for part in params):
        return Parts(params)
    return params if isinstance(params, nn.Module) else None
