"""The hooks that connect a model to its engine, and that disappear from copies of the model.

    forward of the model or of a block  ─▶ _Calls, BeforeForward     ─▶ waits for its layers, and measures them
    FSDP2 gathers a group's shards      ─▶ OnGather                  ─▶ waits on the stream that reads them, and
                                                                        measures where modules use what was gathered
    any other use of a parameter        ─▶ Watched                   ─▶ waits for this parameter
    its gradient                        ─▶ OnGradient                ─▶ consumes the gradient

`torch.compile(model)` traces the hooks of the modules inside. Then the whole model waits instead of them, and the graph
has nothing of them (`Reads.hoist`).

torch's encoder computes in another way in evaluation, its fast path, where it sees neither hooks nor watched
parameters. It does not see these.

A copy (`copy.deepcopy`) or a saved model (`torch.save`) does not have them: `_OursLeftOut` leaves them out of the
dictionaries in which torch keeps hooks. In copies that are made otherwise, a hook does nothing: its reference to the
engine is weak.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import torch
from torch import nn
from torch.jit._recursive import get_hook_stubs
from torch.utils.hooks import RemovableHandle

from hytrain.errors import UsageError
from hytrain.model import collectives, fsdp
from hytrain.model.parts import roots
from hytrain.model.trained import Gate
from hytrain.model.watched import watched_class
from hytrain.uncompiled import constant_when_traced, traced_by_others, uncompiled

if TYPE_CHECKING:
    from hytrain.memory.clock import Mark, Stream
    from hytrain.model.trained import TrainedLayer, TrainedParameter
    from hytrain.step.backward import Backward
    from hytrain.step.engine import Engine
    from hytrain.step.marks import Waited
    from hytrain.step.reads import Reads


T = TypeVar("T", bound="Reads | Backward | Engine")

#: The attributes in which a module keeps its hooks, and what it notes of them.
_KEPT_IN: Final = [name for name in vars(nn.Module()) if "_hooks" in name]
_SCRIPTED: Final = (
    "torch.jit.script of a model that HyTrain trains: TorchScript reads weights where HyTrain cannot wait for their "
    "updates. Script a copy, torch.jit.script(copy.deepcopy(model)), or the model itself after opt.close()"
)


class _Hook(Generic[T]):
    """A callable with a weak reference to its target, and what it is `given` besides. Its copies have neither."""

    def __init__(self, target: T | None, given: Any = None) -> None:
        self._target = weakref.ref(target) if target is not None else None
        self._given = given

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


class _Uncounted(UserDict[int, Any]):
    """The hooks of a module while its forward runs: the number is that of all others."""

    def __init__(self, hooks: dict[int, Any]) -> None:
        self.data = hooks

    def __len__(self) -> int:
        return sum(not isinstance(hook, _Hook) for hook in self.data.values())

    def __bool__(self) -> bool:
        return bool(self.data)


_FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks")
_ENCODERS: Final = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


class _GateHook(_Hook["Reads"]):
    """`given` is the gate."""

    def _vanishes(self, module: nn.Module) -> bool:
        """The compiler traces a call of the hook: whether its graph can do without.

        Not for torch's encoder in evaluation, which looks at its hooks.
        """
        return (module.training or not isinstance(module, _ENCODERS)) and self._is_hoisted()

    @constant_when_traced
    def _is_hoisted(self) -> bool:
        reads = self.target
        return reads is None or reads.hoist(self._given)


class BeforeForward(_GateHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not (torch.compiler.is_dynamo_compiling() and self._vanishes(module)):
            self._enter(module)

    @uncompiled
    def _enter(self, module: nn.Module) -> None:
        if (reads := self.target) is None:
            return
        reads.enter(self._given)
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            for name in _FORWARD:
                hooks = getattr(module, name)
                setattr(module, name, hooks if isinstance(hooks, _Uncounted) else _Uncounted(hooks))


class BeforeEvaluation(BeforeForward):
    """Pre-hook of torch's encoder: unwatches its first layer, which it looks at."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            super().__call__(module, args)


class OnGather(_GateHook):
    """Reads the shards of one of FSDP2's groups. Its parameters stay watched, since no module reads them.

    After a forward that no backward followed (evaluation), FSDP2 gathers some group again at the end of the next
    backward, and drops the result. So shards that the same backward has updated may be gathered, but not used.
    """

    def __init__(self, reads: Reads | None, given: Gate | None = None) -> None:
        super().__init__(reads, given)
        self._again: TrainedLayer | None = None
        self._gathered: Callable[[], None] | None = None
        self._waited: Waited | None = None  # for updates, in a training step's forward
        self._arrived: Mark | None = None

    @uncompiled
    def before_gather(self, modules: Stream) -> None:
        """On the stream that reads the shards, for modules on another one."""
        if (reads := self.target) is not None:
            self._again, self._waited, self._gathered = reads.before_gather(self._given, modules)

    @uncompiled
    def after_read(self) -> None:
        """The stream that reads the shards has copied them."""
        if (reads := self.target) is not None:
            reads.after_reading(self._given)

    @uncompiled
    def after_gather(self) -> None:
        """On the stream that gathers them."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered()

    @uncompiled
    def before_use(self) -> None:
        """Before modules wait for what is gathered."""
        if (reads := self.target) is None:
            return
        if self._again is not None:
            reads.refuse_again(self._again)
        if self._waited is not None:
            self._arrived = reads.arrive()

    @uncompiled
    def after_use(self) -> None:
        """Before they compute with it."""
        reads, waited, self._waited = self.target, self._waited, None
        if reads is not None and waited is not None:
            reads.use_gathered(self._given, self._arrived, waited)


class AfterForward(_GateHook):
    """Forward hook of a module with a gate, also after an exception: from here on, uses are watched again."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (torch.compiler.is_dynamo_compiling() and self._vanishes(module)):
            self._leave(module, output)

    @uncompiled
    def _leave(self, module: nn.Module, output: Any) -> None:
        if isinstance(module, nn.TransformerEncoderLayer):
            for name in _FORWARD:
                hooks = getattr(module, name)
                setattr(module, name, hooks.data if isinstance(hooks, _Uncounted) else hooks)
        if (reads := self.target) is not None:
            reads.leave(self._given, output)


# Compiled code that calls a module has them traced. The compiler makes no code of them alone, where none calls it.
for _hook in (BeforeForward, BeforeEvaluation, AfterForward):
    traced_by_others(_hook.__call__)


class _Calls(_Hook[Any]):
    """Calls the `given` function with its target, and with what the hook gets."""

    @uncompiled
    def __call__(self, *args: Any) -> None:
        if (target := self.target) is not None:
            self._given(target, *args)


class OnGradient(_Hook["Backward"]):
    """`given` is the parameter."""

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> None:
        target = self._target
        if target is not None and (backward := target()) is not None:
            backward.on_gradient(self._given, tensor)


def _before_root(engine: Engine, module: nn.Module, *inputs: Any) -> None:
    engine.reads.note_mode(module.training)
    engine.before_root()
    engine.evictions.before_forward(*inputs)


def _after_root(engine: Engine, module: nn.Module, args: Any, output: Any) -> None:
    engine.reads.leave_root(output)
    engine.reclaiming.note(sys.exception())


def _before_loading(engine: Engine, module: nn.Module, *args: Any) -> None:
    engine.before_load("model.load_state_dict()")
    engine.synchronize()
    engine.uses.before_loading(module.parameters(recurse=False))


class _OursLeftOut:
    """The `__reduce_ex__` of a dictionary of hooks: deep copies and pickles of it lack those in `ours`.

    Those wait for the weights themselves, which are parameters that are watched.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks, self.ours = weakref.ref(hooks), set[int]()

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        hooks = self._hooks()
        assert hooks is not None, "who copies it holds it"
        return OrderedDict, (), None, None, iter([item for item in hooks.items() if item[0] not in self.ours])


def _leave_out(model: nn.Module, ours: set[int]) -> Callable[[], None]:
    """Leave hooks, by the numbers of their handles, out of what is copied or saved of a model.

    Returns the way back, which does not keep the model.
    """
    dictionaries = [
        hooks
        for module in model.modules()
        for name in _KEPT_IN
        if isinstance(hooks := vars(module).get(name), OrderedDict) and ours & hooks.keys()
    ]
    for hooks in dictionaries:
        vars(hooks).setdefault("__reduce_ex__", _OursLeftOut(hooks)).ours.update(ours & hooks.keys())
    found = [weakref.ref(hooks) for hooks in dictionaries]

    def undo() -> None:
        for hooks in [hooks for reference in found if (hooks := reference()) is not None]:
            left_out = vars(hooks)["__reduce_ex__"]
            left_out.ours -= ours
            if not left_out.ours:
                del vars(hooks)["__reduce_ex__"]

    return undo


def _gate_of_first_layer(encoder: nn.TransformerEncoder, gates: list[tuple[Any, Gate]]) -> Gate:
    """A gate for the encoder's forward, which looks at its first layer's parameters. Empty if another covers them."""
    inside = {id(module) for module in encoder.layers[0].modules()}
    covered = [gate for reader, gate in gates if id(reader) in inside]
    first = Gate([layer for gate in covered for layer in gate.layers])
    first.parameters = [known for gate in covered for known in gate.parameters]
    return first


def attach(
    model: nn.Module,
    gates: list[tuple[Any, Gate]],
    parameters: list[TrainedParameter],
    *,
    engine: Engine,
) -> Callable[[], None]:
    """Register all hooks. Returns a function that removes them, which does not keep the model."""
    reads = engine.reads
    compiler = sys.modules.get("torch._dynamo")
    codes = getattr(getattr(compiler, "convert_frame", None), "input_codes", None)
    if compiler is not None and (codes is None or codes.seen):  # on a GPU, reset() imports Inductor: seconds
        torch.compiler.reset()  # code compiled before would call only the hooks of that time
    ours = set[int]()

    def hang(register: Callable[..., RemovableHandle], hook: _Hook[Any], **options: Any) -> None:
        handle = register(hook, **options)
        undo.callback(handle.remove)
        undo.callback(hook.release)
        ours.add(handle.id)

    with ExitStack() as undo:
        for known in parameters:
            undo.callback(known.release)
        # Before the user's own pre-hooks, which may compute with weights (pruning, weight norm). The root's runs first.
        for reader, gate in gates:
            if isinstance(reader, nn.Module):
                hang(reader.register_forward_pre_hook, BeforeForward(reads, gate), prepend=True)
                hang(reader.register_forward_hook, AfterForward(reads, gate), always_call=True)
            else:
                hang(partial(fsdp.read_by, reader), OnGather(reads, gate))
        for encoder in (module for module in model.modules() if isinstance(module, nn.TransformerEncoder)):
            first = _gate_of_first_layer(encoder, gates)
            if first.layers:
                hang(encoder.register_forward_pre_hook, BeforeEvaluation(reads, first), prepend=True)
                hang(encoder.register_forward_hook, AfterForward(reads, first), always_call=True)
        for root in roots(model):
            # It waits for the parameters that no other pre-hook covers.
            hang(root.register_forward_pre_hook, _Calls(engine, _before_root), prepend=True, with_kwargs=True)
            # It refuses a second backward through the output before `step()`.
            hang(root.register_forward_hook, _Calls(engine, _after_root), always_call=True)
        for known in parameters:
            hang(known.parameter.register_post_accumulate_grad_hook, OnGradient(engine.backward, known))
        if torch.distributed.is_available():
            undo.callback(collectives.watch(engine.uses))
        watched = {kind: watched_class(kind, engine.uses) for kind in {type(known.parameter) for known in parameters}}
        for known in parameters:
            known.watch_with(watched[type(known.parameter)])
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]  # all frozen
        for module in modules:
            hang(module.register_state_dict_pre_hook, _Calls(engine, lambda engine, *_: engine.synchronize()))
            hang(module.register_load_state_dict_pre_hook, _Calls(engine, _before_loading))
        undo.callback(_leave_out(model, ours))
        return undo.pop_all().close
