"""The base class of `hytrain.AdamW` and all others: a torch optimizer over a session.

`session` has the processes and the layers, `step.engine` does the work, `state.saving` saves and loads.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hytrain import session
from hytrain.algorithms import Algorithm
from hytrain.checks import Groups, check_free, check_masters, check_model, check_same, groups_for_torch
from hytrain.errors import UnsupportedError, UsageError
from hytrain.memory.lending import Lent
from hytrain.memory.transfer import Transfer
from hytrain.model import fsdp
from hytrain.model.consumed import SCALER
from hytrain.model.layers import clean
from hytrain.model.parts import Parts
from hytrain.model.trained import plane_dtypes
from hytrain.model.watched import unwatched
from hytrain.options import TABLE, Options
from hytrain.run.ranks import Ranks
from hytrain.session import Session
from hytrain.state.saving import SavedOptimizer
from hytrain.statistics import Statistics
from hytrain.trackers import check_trackers


class Optimizer(SavedOptimizer):
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
        options: Those of docs/options.md: `hytrain.options` is the table. Besides, what torch's class of the same name
            takes: `fused` and `foreach` choose among torch's implementations, so they are taken, and change nothing
            here. Others must have their defaults.

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
        **options: Any,
    ) -> None:
        if unknown := options.keys() - {*TABLE, *self.algorithm.not_offered, *self.algorithm.implementations}:
            raise TypeError(f"hytrain.{self.algorithm.name} has no option {min(unknown)!r}")
        ranks = Ranks.of_job()
        with ranks.together():
            self.algorithm.check_as_torch(options)
            self._options = Options.of(self.algorithm, options)
            if ranks.rank == 0:
                check_trackers(self._options.log_to, "log_to")
            self._model: nn.Module = Parts(model) if isinstance(model, list | tuple) else cast(nn.Module, model)
            check_model(self._model)
            check_masters(self._model, self._options)
            fsdp.reshard(self._model)
            super().__init__(self._groups_from(param_groups), defaults)
            for group in self.param_groups:
                self.algorithm.check(group)
            config = self._options.cluster_config()
            self._groups = Groups(self, self.algorithm)
            self._note_groups()
            _replace(self._model, self.param_groups)
        check_same(ranks, self._options)
        self._session = Session(self._model, self._options, config, ranks=ranks, groups=self._groups)
        self._close = weakref.finalize(self, self._session.close)
        _made.add(self)

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
        if not set_to_none and not self._session.accumulation.timing.in_step:
            raise UsageError(
                "zero_grad(set_to_none=False): HyTrain's gradients are gone after backward; use zero_grad(), or pass "
                'updates="step"'
            )
        self._zero_grad(set_to_none)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            self._engine.drop_gradients()
        with unwatched():
            super().zero_grad(set_to_none=set_to_none)

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
        self._groups.note()
        self._no_state.planes = {
            id(parameter): plane_dtypes(parameter, rule, self._options.precision)
            for group, rule in zip(self.param_groups, self._groups.rules, strict=True)
            for parameter in group["params"]
        }

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step`, before anything else."""
        timing = self._session.accumulation.timing
        if timing.in_step:
            timing.saw("has a GradScaler")
            return False
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

    def lend_weights(self) -> dict[str, Lent]:
        """Wait for all updates, and say where another process finds the present weights, by the parameters' names.

        They are in shared memory: what the CPU updates is there in any case, the rest is copied. They stay as they are
        until updates begin in the step's last backward, and nobody may write them. A descriptor is this process's,
        until the next call.
        """
        return self._engine.lend_weights()

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
        return self._engine.add_gradients([gradients.get(name) for name in named])

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
        same = other._model is model and any(identity in given for ids in other._groups.ids for identity in ids)
        if same or other._session.trains(trained):
            other._session.last_words = (
                "this optimizer is closed, as a newer one was made for parameters that it trained: use the newer "
                "one, or give one optimizer all of them, in as many param_groups as wanted"
            )
            other.close()
    check_free((parameter for parameter in model.parameters() if parameter.requires_grad), session.managed())
