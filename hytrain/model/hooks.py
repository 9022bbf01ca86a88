"""The hooks that connect a model to its engine, and that disappear from copies of the model.

    forward of the model or of a block  ─▶ BeforeRoot, BeforeForward ─▶ waits for its layers, and measures them
    FSDP2 gathers a group's shards      ─▶ OnGather                  ─▶ waits on the stream that reads them, and
                                                                        measures where modules use what was gathered
    any other use of a parameter        ─▶ Watched, BeforeUse        ─▶ waits for this parameter
    its gradient                        ─▶ OnGradient                ─▶ consumes the gradient

A hook holds a weak reference to its engine. In a copy (`copy.deepcopy`) or a saved model (`torch.save`), it does
nothing. Before a model is saved, its hooks wait for all updates.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import torch
from torch import nn
from torch.jit._recursive import get_hook_stubs
from torch.utils.hooks import RemovableHandle

from hytrain.errors import UsageError
from hytrain.model import fsdp
from hytrain.model.parts import roots
from hytrain.model.watched import unwatched, watched_class

if TYPE_CHECKING:
    from hytrain.memory.clock import Mark, Stream
    from hytrain.model.trained import Gate, TrainedLayer, TrainedParameter
    from hytrain.step.backward import Backward
    from hytrain.step.engine import Engine
    from hytrain.step.measure import Waited
    from hytrain.step.reads import Reads


T = TypeVar("T", bound="Reads | Backward | Engine")

_SCRIPTED: Final = (
    "torch.jit.script of a model that HyTrain trains: TorchScript reads weights where nobody waits for their updates. "
    "Script a copy, torch.jit.script(copy.deepcopy(model)), or the model itself after opt.close()"
)


class _Hook(Generic[T]):
    """A callable with a weak reference to its target. Its copies have no target."""

    def __init__(self, target: T | None) -> None:
        self._target = weakref.ref(target) if target is not None else None

    def release(self) -> None:
        """Do nothing from now on, even if the module is already running its hooks."""
        self._target = None

    @property
    def __name__(self) -> str:
        """`torch.jit.script` compiles hooks, too, by their names."""
        if self._target is not None and sys._getframe(1).f_code is get_hook_stubs.__code__:
            raise UsageError(_SCRIPTED)
        raise AttributeError("a hook of HyTrain has no name")

    @property
    def target(self) -> T | None:
        return self._target() if self._target is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class BeforeForward(_Hook["Reads"]):
    def __init__(self, reads: Reads | None, gate: Gate | None = None) -> None:
        super().__init__(reads)
        self._gate = gate

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any) -> None:
        reads = self.target
        if reads is not None and self._gate is not None:
            reads.enter(self._gate)


class OnGather(_Hook["Reads"]):
    """Reads the shards of one of FSDP2's groups. Its parameters stay watched, since no module reads them.

    After a forward that no backward followed (evaluation), FSDP2 gathers some group again at the end of the next
    backward, and drops the result. So shards that the same backward has updated may be gathered, but not used.
    """

    def __init__(self, reads: Reads | None, gate: Gate | None = None) -> None:
        super().__init__(reads)
        self._gate = gate
        self._again: TrainedLayer | None = None
        self._gathered: Callable[[], None] | None = None
        self._waited: Waited | None = None  # for updates, in a training step's forward
        self._arrived: Mark | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_gather(self, modules: Stream) -> None:
        reads = self.target
        if reads is None or self._gate is None:
            return
        self._again = reads.updated_in_this_backward(self._gate)
        if self._again is None:
            self._waited = reads.before_gather(self._gate, modules)
            self._gathered = reads.gathering(self._gate)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_gather(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_use(self) -> None:
        if (reads := self.target) is None:
            return
        if self._again is not None:
            reads.refuse_again(self._again)
        if self._waited is not None:
            self._arrived = reads.before_use_of_gathered()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_use(self) -> None:
        reads, waited, self._waited = self.target, self._waited, None
        if reads is not None and self._gate is not None and waited is not None:
            reads.use_gathered(self._gate, self._arrived, waited)


class AfterForward(_Hook["Reads"]):
    """Forward hook of a module with a gate, also after an exception: from here on, uses are watched again."""

    def __init__(self, reads: Reads | None, gate: Gate | None = None) -> None:
        super().__init__(reads)
        self._gate = gate

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        reads = self.target
        if reads is not None and self._gate is not None:
            reads.leave(self._gate, output)


class BeforeRoot(_Hook["Engine"]):
    """Forward pre-hook of the whole model: waits for the parameters that no other pre-hook covers."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any) -> None:
        if (engine := self.target) is not None:
            engine.before_root()


class AfterRoot(_Hook["Reads"]):
    """Forward hook of the whole model: refuses a second backward through its output before `step()`."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (reads := self.target) is not None:
            reads.leave_root(output)


class BeforeUse(_Hook["Reads"]):
    """Called when a watched parameter is used."""

    def __call__(self, parameter: torch.Tensor) -> None:
        if (reads := self.target) is not None:
            reads.use(parameter)

    def around(self, parameter: torch.Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if (reads := self.target) is None else reads.around_use(parameter)

    def away(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return None if (reads := self.target) is None else reads.away(parameter)


class OnGradient(_Hook["Backward"]):
    def __init__(self, backward: Backward | None, parameter: TrainedParameter | None = None) -> None:
        super().__init__(backward)
        self._parameter = parameter

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: torch.Tensor) -> None:
        backward = self.target
        if backward is not None and self._parameter is not None:
            with unwatched():
                backward.on_gradient(self._parameter)


class BeforeStateDict(_Hook["Engine"]):
    """Also runs in `torch.save(model)`, which saves this hook too."""

    def __call__(self, *args: Any) -> None:
        if (engine := self.target) is not None:
            engine.synchronize()

    def __reduce__(self) -> tuple[Any, ...]:
        self()
        return super().__reduce__()


class BeforeLoadStateDict(_Hook["Engine"]):
    def __call__(self, *args: Any) -> None:
        if (engine := self.target) is not None:
            engine.before_load("model.load_state_dict()")
            engine.synchronize()
            engine.reads.forget_copies()


class _GuardedCopy:
    """Waits for all updates before `copy.deepcopy(model)`, which reads the weights before any hook could."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine, self._model = weakref.ref(engine), weakref.ref(model)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        model = self._model()
        assert model is not None, "deepcopy holds the model"
        if (engine := self._engine()) is not None:
            engine.synchronize()
        vars(model).pop("__deepcopy__")
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
        finally:
            vars(model)["__deepcopy__"] = self
        for hooks in (copied._forward_pre_hooks, copied._forward_hooks):  # which nobody else could compile
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_deepcopy, ()


def _plain_deepcopy() -> None:
    """The placeholder for `_GuardedCopy` in a saved model."""


def attach(
    model: nn.Module,
    gates: list[tuple[Any, Gate]],
    parameters: list[TrainedParameter],
    *,
    engine: Engine,
    reads: Reads,
    backward: Backward,
) -> Callable[[], None]:
    """Register all hooks. Returns a function that removes them, which does not keep the model."""
    if "torch._dynamo" in sys.modules:  # code compiled before would call only the hooks of that time
        torch.compiler.reset()
    hooks: list[_Hook[Any]] = []
    handles: list[RemovableHandle | fsdp.ReaderHandle] = []
    guarded = weakref.WeakSet[nn.Module]()

    def detach() -> None:
        for module in guarded:
            vars(module).pop("__deepcopy__", None)
        for hook in hooks:
            hook.release()
        for handle in handles:
            handle.remove()
        for known in parameters:
            known.release()

    def hang(register: Callable[..., RemovableHandle | fsdp.ReaderHandle], hook: _Hook[Any], **options: Any) -> None:
        hooks.append(hook)
        handles.append(register(hook, **options))

    try:
        # Before the user's own pre-hooks, which may compute with weights (pruning, weight norm). The root's runs first.
        for reader, gate in gates:
            if isinstance(reader, nn.Module):
                hang(reader.register_forward_pre_hook, BeforeForward(reads, gate), prepend=True)
                hang(reader.register_forward_hook, AfterForward(reads, gate), always_call=True)
            else:
                hang(partial(fsdp.read_by, reader), OnGather(reads, gate))
        for root in roots(model):
            hang(root.register_forward_pre_hook, BeforeRoot(engine), prepend=True)
            hang(root.register_forward_hook, AfterRoot(reads), always_call=True)
        for known in parameters:
            hang(known.parameter.register_post_accumulate_grad_hook, OnGradient(backward, known))
        hooks.append(before_use := BeforeUse(reads))
        watched = {kind: watched_class(kind, before_use) for kind in {type(known.parameter) for known in parameters}}
        for known in parameters:
            known.watch_with(watched[type(known.parameter)])
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]  # all frozen
        for module in modules:
            hang(module.register_state_dict_pre_hook, BeforeStateDict(engine))
            hang(module.register_load_state_dict_pre_hook, BeforeLoadStateDict(engine))
        for module in modules:
            if next(module.parameters(), None) is not None:
                vars(module)["__deepcopy__"] = _GuardedCopy(engine, module)
                guarded.add(module)
    except BaseException:
        detach()
        raise
    return detach
