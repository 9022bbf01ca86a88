"""HyTrain with Hugging Face Accelerate, where the loop clips or accumulates, or the state is large.

An Accelerator takes `hytrain.AdamW` like any other optimizer. One that was adopted knows before a backward what the
loop does after it, so its updates begin in backward:

    accelerator = Accelerator()
    model, loader = accelerator.prepare(model, loader)
    opt = adopt(accelerator, model, lr=3e-4, max_grad_norm=1.0)      # was: torch.optim.AdamW(model.parameters(), …)
    opt, scheduler = accelerator.prepare(opt, scheduler_for(opt))

Accelerate pickles an optimizer's `state_dict()`. That of an adopted one is small, and the state is saved separately:

    save_state(folder) ──▶ folder/optimizer.bin     the small one
                      └──▶ folder/hytrain/          the state, layer by layer, independent of k
    load_state(folder) ──▶ loads the small one, and the optimizer reads folder/hytrain

A second optimizer of the same Accelerator has `hytrain_1` beside its `optimizer_1.bin`, and so on.

With Accelerate's FSDP2 plugin, `adopt` has the model sharded. Checkpoints are Accelerate's own there: they contain the
state, in torch's form.

`integrations.transformers` does the same for a Trainer, whose loop uses Accelerate too.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

import hytrain
from hytrain.checks import groups_for_torch
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.extras import needed
from hytrain.model.watched import unwatched
from hytrain.optim import Optimizer

with needed("hytrain.integrations.accelerate", "hf"):
    import accelerate

FOLDER: Final = "hytrain"  # the folder in a checkpoint with the state of the first optimizer


class Adopted(Optimizer):
    """An optimizer of HyTrain with a `state_dict()` that costs nothing to pickle.

    Attributes: `folder`, the name of its folder in every checkpoint; `checkpoint`, where the next `load_state_dict`
    of a small state finds that folder; `unhook`, called by `close`.
    """

    def __init__(self, model: nn.Module, *arguments: Any, max_grad_norm: float | None = None, **options: Any) -> None:
        super().__init__(model, *arguments, max_grad_norm=max_grad_norm, **options)
        self.max_grad_norm = max_grad_norm
        self.folder = FOLDER
        self.checkpoint: Path | None = None
        self._key = uuid.uuid4().hex
        self.unhook: Callable[[], object] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """The hyperparameters and this optimizer's key, without the state: `save` and `load` are for that."""
        groups = [{**group, "params": []} for group in self.param_groups]
        return {"state": {}, "param_groups": groups, "hytrain": self._key, "folder": self.folder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the folder in `checkpoint` for a small state, else a full one of torch or HyTrain.

        Raises `ConfigError` if the state does not fit, or if a small one of another optimizer has no checkpoint.
        """
        checkpoint, self.checkpoint = self.checkpoint, None
        folder = state_dict.get("folder", FOLDER)
        if "hytrain" not in state_dict:
            super().load_state_dict(_with_frozen(state_dict, self.param_groups))
        elif checkpoint is not None:
            self.load(checkpoint / folder)
        elif state_dict["hytrain"] != self._key:  # `accelerator.prepare` loads its own
            raise ConfigError(
                f"this state has no moments, they are in the folder {folder!r} beside it: opt.load(folder)"
            )

    def save_beside(self, checkpoint: Path) -> None:
        """Write the state that the optimizer's own file in this checkpoint lacks."""
        self.save(checkpoint / self.folder)

    def norm(self) -> Tensor | None:
        """The norm of this step's gradients before clipping, 0 if there are none; None if HyTrain computes none.

        A backward that has left its graph only sums: the updates begin here, as they would in `step()`.
        """
        with torch.no_grad(), unwatched():
            return self._engine.norm_before_step()

    def close(self) -> None:
        """As `Optimizer.close`. The Accelerator then clips and saves without HyTrain."""
        try:
            super().close()
        finally:
            self.unhook()


class Sharded(Adopted):
    """The same under FSDP2, where Accelerate saves and loads the state itself, in torch's distributed checkpoints."""

    state_dict = Optimizer.state_dict
    load_state_dict = Optimizer.load_state_dict

    def save_beside(self, checkpoint: Path) -> None:
        pass


def _with_frozen(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state in torch's form, renumbered for `groups`, also if it lacks frozen parameters.

    A plain Trainer's state lacks them, and has two groups even if one is empty. A state that fits neither way is
    returned unchanged.
    """
    theirs = state_dict["param_groups"]
    if len(theirs) != len(groups):
        theirs = [group for group in theirs if group["params"]]
    numbers, first = dict[int, int](), 0
    packed = []
    for group, other in zip(groups, theirs, strict=False):
        every = range(first, first + len(group["params"]))
        trained = [n for n, parameter in zip(every, group["params"], strict=True) if parameter.requires_grad]
        meant = list(every) if len(other["params"]) == len(every) else trained
        if len(other["params"]) != len(meant):
            return state_dict
        numbers.update(zip(other["params"], meant, strict=True))
        packed.append({**other, "params": list(every)})
        first = every.stop
    if len(theirs) != len(groups) or not state_dict["state"].keys() <= numbers.keys():
        return state_dict
    state = {numbers[index]: entry for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": packed}


class _Hooks:
    """HyTrain's hooks in an Accelerator, for as long as it has optimizers of HyTrain.

    Its references are weak, so an optimizer without other references ends, with its processes.
    """

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._optimizers: dict[str, weakref.ref[Adopted]] = {}  # by their folders
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._announce),
        ]
        self._replaced: dict[str, Any] = {"clip_grad_norm_": self._clip_grad_norm_}
        if accelerator.is_fsdp2:
            self._replaced |= {"prepare": self._prepare, "no_sync": self._no_sync}
        vars(accelerator).update(self._replaced)

    def add(self, opt: Adopted) -> None:
        """Give an optimizer the first free folder, until it is closed or deleted."""
        names = (f"{FOLDER}_{number}" if number else FOLDER for number in itertools.count())
        opt.folder = next(name for name in names if name not in self._optimizers)
        self._optimizers[opt.folder] = weakref.ref(opt)
        remove = weakref.finalize(opt, self._remove, opt.folder)
        remove.atexit = False
        opt.unhook = remove

    def _remove(self, folder: str) -> None:
        del self._optimizers[folder]
        accelerator = self._accelerator()
        if self._optimizers or accelerator is None:
            return
        for handle in self._handles:
            handle.remove()
        for name, method in self._replaced.items():
            if vars(accelerator).get(name) == method:
                delattr(accelerator, name)
        del _hooks[accelerator]

    def _present(self) -> list[Adopted]:
        return [opt for of in self._optimizers.values() if (opt := of()) is not None]

    def _clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Accelerate's own clipping. For HyTrain's parameters, which are clipped already, their norm before that.

        It is None if HyTrain does not compute a norm. Raises `UsageError` between the micro-batches of a step.
        """
        accelerator = self._accelerator()
        assert accelerator is not None, "its method was called"
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for opt in self._present():
            if not _asks_for_all_of(opt, asked):
                continue
            if norm_type != 2 or max_norm not in (opt.max_grad_norm, float("inf")):
                raise UsageError(
                    f"clip_grad_norm_ to {max_norm} comes too late for HyTrain, which clips to "
                    f"{opt.max_grad_norm}: pass max_grad_norm={max_norm} where the optimizer is made"
                )
            if accelerator.scaler is None:
                return opt.norm()
            max_norm = float("inf")  # Accelerate unscales them, and has their norm; `step()` clips them
        norm: Tensor | None = type(accelerator).clip_grad_norm_(accelerator, asked, max_norm, norm_type)
        return norm

    def _prepare(self, *objects: Any, **options: Any) -> Any:
        """Accelerate's own, except for adopted optimizers and their models, which `adopt` has prepared.

        Accelerate would refuse the one without the other, replace the optimizer's parameters, and move its state.
        """
        accelerator = self._accelerator()
        assert accelerator is not None, "its method was called"
        prepared: dict[int, Any] = {}
        for index, item in enumerate(objects):
            for opt in self._present():
                if isinstance(item, torch.optim.Optimizer) and getattr(item, "optimizer", item) is opt:
                    prepared[index] = accelerator.prepare_optimizer(item, device_placement=False)
                    prepared[index]._is_accelerate_prepared = True  # not to be wrapped twice
                elif opt._model is item:
                    prepared[index] = item
        if others := [index for index in range(len(objects)) if index not in prepared]:
            result = type(accelerator).prepare(accelerator, *(objects[index] for index in others), **options)
            prepared.update(zip(others, result if len(others) > 1 else [result], strict=True))
        return tuple(prepared[index] for index in range(len(objects))) if len(objects) > 1 else prepared[0]

    def _no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accelerate's own: no gradients are reduced in it, so HyTrain sees nothing of its backwards."""
        accelerator = self._accelerator()
        assert accelerator is not None, "its method was called"
        for opt in self._present():
            if opt._model is model:
                opt._accumulation.count_no_more()  # a step is one backward: FSDP2 sums what comes before
        context: AbstractContextManager[None] = type(accelerator).no_sync(accelerator, model)
        return context

    def _save(self, models: list[nn.Module], weights: list[dict[str, Tensor]], checkpoint: str) -> None:
        for opt in self._present():
            opt.save_beside(Path(checkpoint))

    def _announce(self, models: list[nn.Module], checkpoint: str) -> None:
        for opt in self._present():
            opt.checkpoint = Path(checkpoint)


#: By Accelerator, if it has such an optimizer.
_hooks: weakref.WeakKeyDictionary[accelerate.Accelerator, _Hooks] = weakref.WeakKeyDictionary()


def _asks_for_all_of(opt: Adopted, asked: list[Tensor]) -> bool:
    """Whether these are all parameters that `opt` trains, ignoring others without a gradient; False if none is.

    Raises `UsageError` for a mixture, because HyTrain has the norm of exactly its own parameters.
    """
    trained = {id(p) for group in opt.param_groups for p in group["params"] if p.requires_grad}
    found = {id(parameter) for parameter in asked}
    if found.isdisjoint(trained):
        return False
    if not found >= trained or any(p.grad is not None and id(p) not in trained for p in asked):
        raise UsageError(
            "clip_grad_norm_ got only some of the parameters of an optimizer of HyTrain, or others as well: HyTrain "
            "has clipped exactly its own parameters by their common norm, so call clip_grad_norm_ once per optimizer, "
            "with all of its parameters"
        )
    return True


def adopt(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    param_groups: ParamsT | None = None,
    *arguments: Any,
    optimizer: type[Optimizer] = hytrain.AdamW,
    **options: Any,
) -> Adopted:
    """Create `hytrain.AdamW(model, …)`, or another optimizer, for `accelerator.prepare`.

    Accelerate's clipping and checkpoints work with it. With Accelerate's FSDP2 plugin, all ranks call it together, and
    it has the Accelerator shard the model. It also raises what the optimizer raises.

    Args:
        accelerator: The Accelerator of the loop.
        model: The model, already prepared; with FSDP2, sharded in place if it was not prepared yet.
        param_groups: As for the optimizer. With FSDP2, parameters from before or after the sharding.
        arguments: Further positional arguments of the optimizer.
        optimizer: `hytrain.AdamW`, `hytrain.SGD` or `hytrain.Lion`.
        options: Keyword arguments of the optimizer.

    Returns:
        The optimizer.

    Raises:
        UnsupportedError: HyTrain cannot follow a setting of the accelerator. Nothing has been started.
    """
    check_settings(accelerator)
    adopted = Sharded if accelerator.is_fsdp2 else Adopted
    if accelerator.is_fsdp2 and not any(known is model for known in accelerator._models):
        param_groups = _shard(accelerator, model, param_groups)
    device = next(model.parameters()).device
    if device.type != accelerator.device.type:
        raise UnsupportedError(f"the model is on {device}, not {accelerator.device}: accelerator.prepare(model) first")
    wanted: dict[str, Any] = {"grad_accumulation": accelerator.gradient_accumulation_steps, **options}
    if accelerator.scaler is not None:  # which unscales gradients, and drops the step, after backward
        wanted["updates"] = "step"
    kind: type[Adopted] = type(optimizer.__name__, (adopted, optimizer), {})
    opt = kind(model, *arguments, param_groups=param_groups, **wanted)
    gradients = accelerator.gradient_state  # the number of backwards may differ from `grad_accumulation`
    opt._accumulation.ask(lambda: not gradients.sync_gradients)
    if accelerator not in _hooks:
        _hooks[accelerator] = _Hooks(accelerator)
    _hooks[accelerator].add(opt)
    return opt


def _shard(
    accelerator: accelerate.Accelerator, model: nn.Module, param_groups: ParamsT | None
) -> list[dict[str, Any]] | None:
    """Let the accelerator shard a model in place. Returns the groups with shards in place of whole parameters.

    Accelerate shards a model only together with an optimizer, into which it puts the shards. HyTrain's is made from the
    shards, so another one, of one parameter, takes its part.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    groups = [
        {**group, "params": [_with_parameter(entry, lambda p: numbers[id(p)]) for entry in group["params"]]}
        for group in groups_for_torch(model, param_groups)
    ]
    accelerator.prepare(model, torch.optim.SGD([next(model.parameters())]))
    del accelerator._optimizers[-1]
    shards = list(model.parameters())
    return [
        {**group, "params": [_with_parameter(entry, lambda number: shards[number]) for entry in group["params"]]}
        for group in groups
    ]


def _with_parameter(entry: Any, other: Callable[[Any], Any]) -> Any:
    """An entry of a group's `params`, perhaps with a name, with another parameter."""
    return (entry[0], other(entry[1])) if isinstance(entry, tuple) else other(entry)


def check_settings(accelerator: accelerate.Accelerator) -> None:
    """Raise `UnsupportedError` for settings under which HyTrain would train something else, or nothing."""
    state = accelerator.state
    if state.deepspeed_plugin is not None:
        raise UnsupportedError("DeepSpeed has an optimizer of its own: leave out its plugin or HyTrain")
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version != 2:
        raise UnsupportedError(
            "FSDP1 replaces the parameters by flat ones: use FSDP2, FullyShardedDataParallelPlugin(fsdp_version=2), or "
            'TrainingArguments(fsdp=True, fsdp_config={"version": 2})'
        )
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UnsupportedError(
            "cpu_offload of the FSDP plugin with HyTrain: leave it out, because HyTrain itself offloads the "
            "optimizer's state"
        )
    if not accelerator.is_fsdp2 and (
        accelerator.num_processes > 1 or accelerator.distributed_type != accelerate.DistributedType.NO
    ):
        raise UnsupportedError(
            "several processes without FSDP2, where each would hold all state: pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False) as the Accelerator's "
            'fsdp_plugin, or TrainingArguments(fsdp=True, fsdp_config={"reshard_after_forward": False})'
        )
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        raise UnsupportedError(f"{accelerator.mixed_precision} is not supported yet: train in bf16, or without it")
