"""What users do with a model while it trains: look at it, copy it, save it, load it, use it in parts.

Whatever reads weights sees all updates, whatever writes them is not overwritten (I6), and every forward reads
what torch's optimizer would have it read (I1).
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import cloudpickle
import dill
import pytest
import torch
import torch._dynamo.testing
from helpers import (
    LR,
    Reference,
    adamw,
    differing,
    late_weights,
    on_waiting,
    process,
    same_as_torch,
    saved_and_loaded,
    scale_by_hand,
    train,
    wait_for,
    wait_for_coordinator,
    weights,
)
from small_models import gpt2, in_parts, language_loss, llama, perceptron, square_loss, vectors
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.errors import UsageError
from hytrain.model.watched import Watched, watched_class
from hytrain.recipe.loss import in_chunks


def reference(steps: range = range(20), make: Callable[[], nn.Module] = perceptron) -> nn.Module:
    """What torch trains."""
    model = make()
    train(model, Reference(model, lr=LR), steps, square_loss)
    return model


def trained_alone(model: nn.Module) -> dict[str, Tensor]:
    """The weights after five steps with torch's optimizer, which HyTrain must not notice."""
    train(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), range(5), square_loss)
    return weights(model)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 0.4, "visit": 0.3, "offload_weights": 0.6}], ids=str)
def test_a_head_is_called_for_one_chunk_after_the_other(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """And again for each in backward. gpt2's weight is the embedding's, too."""

    def chunked() -> nn.Module:
        model = make()
        in_chunks(model, 3)
        return model

    def run(model: nn.Module, opt: Any) -> list[float]:
        losses = []
        torch.manual_seed(1)  # of dropout
        for step in range(6):
            losses.append(language_loss(model, step))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
        return [loss.item() for loss in losses]

    same_as_torch(run, chunked, **options)


# ---------------------------------------------------------------- reading


READERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "state_dict": lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()},
    "a part's state_dict": lambda model: {f"0.{n}": t.clone() for n, t in model[0].state_dict().items()},
    "deepcopy": lambda model: weights(copy.deepcopy(model)),
    "pickle": lambda model: weights(pickle.loads(pickle.dumps(model))),
    "torch.save": lambda model: weights(saved_and_loaded(model)),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_see_every_update(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is stopped before it hears of the last gradients, until somebody waits for it."""
    expected = weights(reference(range(11)))
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        optimizer = process(opt, "optimizer")
        on_waiting(monkeypatch, lambda what: optimizer.resume())

        def stop_after_forward(model: nn.Module, step: int) -> Tensor:
            loss = square_loss(model, step)
            optimizer.suspend()
            return loss

        for step in range(11):
            train(model, opt, [step], stop_after_forward)
            seen = READERS[reader](model)
            optimizer.resume()
        assert differing(seen, {name: expected[name] for name in seen}) == []
        train(model, opt, range(11, 20), square_loss)
    assert differing(weights(model), weights(reference())) == []


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_methods_that_torch_does_not_dispatch_see_every_update(k: float) -> None:
    """Assigning to a parametrized weight writes by one of them, right after `step()`."""

    def parametrized() -> nn.Module:
        model = perceptron()
        orthogonal(model[0][0])
        return model

    def run(model: Any, opt: Any) -> list[float]:
        found = []
        for step in range(6):
            train(model, opt, [step], square_loss)
            found += [p.as_subclass(Tensor).detach().sum().item() for p in model.parameters()]  # type: ignore[misc]
            if step == 3:
                model[0][0].weight = torch.eye(32)
        return found

    with late_weights():
        same_as_torch(run, parametrized, k=k)


@pytest.mark.parametrize("policy", ["deadline", "random"])
def test_another_thread_reads_while_the_loop_trains(policy: str) -> None:
    """Between steps it gets weights, else a sentence; the loop does not notice."""
    model, found, done = perceptron(), list[object](), threading.Event()
    with adamw(model, k="auto", policy=policy) as opt:
        train(model, opt, range(3), square_loss)

        def read() -> None:
            while not done.wait(1e-3):
                try:
                    found.append(len(model.state_dict()))
                except UsageError:
                    pass
                except BaseException as error:
                    found.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            train(model, opt, range(3, 80), square_loss)
            wait_for(lambda: bool(found))
        finally:
            done.set()
            reader.join()
        opt.synchronize()
        assert [one for one in found if isinstance(one, BaseException)] == []
        assert differing(weights(model), weights(reference(range(80)))) == []


def test_a_parameter_that_a_forward_unwatches_meanwhile_is_an_ordinary_one() -> None:
    """Another thread's use of it has been looked up already, as one of a watched parameter."""
    parameter = nn.Parameter(torch.ones(3))
    for found in (
        Watched.as_subclass(parameter, Tensor),
        Watched.detach(parameter),  # type: ignore[arg-type]
        Watched.__deepcopy__(parameter, {}),
    ):
        assert torch.equal(found, torch.ones(3))
    assert Watched.__repr__(parameter) == repr(parameter)
    with adamw(perceptron()) as opt:
        first, _, second, *_ = opt.param_groups[0]["params"]
        kind, uses = type(first), list[object]()

        class Unwatching:
            def use(self, tensor: Tensor) -> None:
                uses.append(kind.uses().use(tensor))

            def around(self, tensor: Any) -> contextlib.AbstractContextManager[None]:
                first.__class__ = second.__class__ = kind.plain
                return contextlib.nullcontext()

        unwatching = Unwatching()
        first.__class__ = second.__class__ = watched_class(kind.plain, unwatching)
        assert torch.isfinite(first + second).all() and uses == [None, None]


def test_an_inference_mode_around_it_changes_nothing() -> None:
    def run(model: Any, opt: Any) -> list[float]:
        found = []
        for step in range(6):
            train(model, opt, [step], square_loss)
            with torch.inference_mode():
                found.append(sum(tensor.sum().item() for tensor in model.state_dict().values()))
                if step == 2:
                    opt.add_param_group({"params": [*model[2:].parameters()]})
        return found

    def of_part(model: Any) -> list[dict[str, Any]]:
        return [{"params": [*model[:2].parameters()]}]

    for options in ({"k": 0.0, "offload_weights": 1.0}, {"k": 1.0}):
        same_as_torch(run, perceptron, of_part, **options)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_the_middle_of_training(without_gradients: Callable[[], Any]) -> None:
    def run(model: nn.Module, opt: Any) -> list[float]:
        losses = []
        for step in range(12):
            train(model, opt, [step])
            model.eval()
            with without_gradients():
                losses.append(language_loss(model, 10_000).item())
            model.train()
        return losses

    same_as_torch(run, gpt2, k=0.2)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_freely(copied: Callable[[nn.Module], nn.Module]) -> None:
    expected = reference(range(8))
    plain = trained_alone(copy.deepcopy(expected))
    model = perceptron()
    with adamw(model, k=0.3) as opt:
        train(model, opt, range(8), square_loss)
        twin = copied(model)
        assert differing(weights(twin), weights(expected)) == []
        assert vars(twin).keys() == vars(expected).keys()
        train(model, opt, range(8, 14), square_loss)
        assert differing(trained_alone(twin), plain) == []
        train(model, opt, range(14, 20), square_loss)
        assert all(parameter.grad is None for parameter in twin.parameters())
    assert differing(weights(model), weights(reference())) == []
    assert differing(weights(copy.deepcopy(twin)), plain) == []


def is_ordered(value: object) -> bool:
    return isinstance(value, OrderedDict)


class Own(nn.Module):
    """With ways of its own to be copied and saved, and a hook, a part without parameters and a reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop, self.cache = nn.Linear(32, 32), nn.Dropout(0.0), Tensor()
        self.itself = [self]
        self.linear.register_forward_hook(noted)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return y


def noted(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook of the user's."""


def as_torch_saves(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [perceptron, Own])
@pytest.mark.parametrize("way", [as_torch_saves, pickle.dumps, cloudpickle.dumps, dill.dumps])
def test_a_saved_model_is_what_it_is_without_hytrain(
    way: Callable[[object], bytes], make: Callable[[], nn.Module]
) -> None:
    """It names nothing of HyTrain's, so it loads where that is not installed; also of a part, and of a shallow copy."""
    plain, model = make(), make()
    with adamw(model, k=0.3) as opt:
        train(model, opt, range(2), square_loss)
        shallow = copy.copy(model)
        shallow.extra = 5  # type: ignore[assignment]
        for whole, expected in ((model, plain), (shallow, plain), (list(model.children()), list(plain.children()))):
            saved = way(whole)
            assert b"hytrain" not in saved
            if way is as_torch_saves:
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint
                assert sorted(unsafe(io.BytesIO(saved))) == sorted(unsafe(io.BytesIO(way(expected))))
            else:
                loaded = pickle.loads(saved)
                assert loaded is not whole and getattr(loaded, "extra", 5) == 5
        with torch.serialization.safe_globals([*{type(module) for module in plain.modules()}, noted, type(plain)]):
            loaded = torch.load(io.BytesIO(as_torch_saves(model)), weights_only=True)
        assert differing(weights(loaded), weights(model)) == []
        hooks = [list(module._forward_hooks.values()) for module in loaded.modules()]
        assert hooks == [list(module._forward_hooks.values()) for module in plain.modules()]
        train(model, opt, range(2, 4), square_loss)  # the model still has them
    assert b"hytrain" not in way(model)


def test_a_program_that_is_exported_while_training_names_nothing_of_hytrain() -> None:
    model, buffer = perceptron(), io.BytesIO()
    with adamw(model, k=0.3) as opt:
        train(model, opt, range(2), square_loss)
        torch.export.save(torch.export.export(model, (vectors(0),)), buffer)
        assert b"hytrain" not in buffer.getvalue()
        found = torch.export.load(io.BytesIO(buffer.getvalue())).module()(vectors(0))
        assert torch.equal(found, model(vectors(0)))


def test_a_consumed_gradient_is_not_saved() -> None:
    model = perceptron()
    with adamw(model, updates="backward") as opt:
        square_loss(model, 0).backward()
        for read in (pickle.dumps, as_torch_saves, cloudpickle.dumps):
            with pytest.raises(UsageError, match="already consumed"):
                read(next(model.parameters()).grad)
        opt.step()


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_loaded_weights_are_taken_over(k: float, dtype: torch.dtype) -> None:
    """Moments stay, and masters are exactly what was loaded."""

    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(6), square_loss)
        model.load_state_dict(perceptron(dtype=dtype).state_dict())
        if isinstance(opt, Reference):
            opt.import_weights()
        train(model, opt, range(6, 12), square_loss)

    same_as_torch(run, lambda: perceptron(dtype=dtype), k=k)


@pytest.mark.parametrize(
    ("loss_of", "k", "dtype"),
    [(in_parts, 0.0, torch.float32), (square_loss, 0.0, torch.bfloat16), (square_loss, 1.0, torch.bfloat16)],
)
def test_imported_weights_are_taken_over(loss_of: Any, k: float, dtype: torch.dtype) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        train(model, opt, range(6), loss_of)
        scale_by_hand(model, opt)
        train(model, opt, range(6, 12), loss_of)

    same_as_torch(run, lambda: perceptron(dtype=dtype), k=k)


# ---------------------------------------------------------------- reading in parts


class Attention(nn.Module):
    """`MultiheadAttention.out_proj` is never called, `scale` is the root's own, `embedding` is read functionally."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(32))
        self.embedding = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale) @ self.embedding.weight
        x = x[None]
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(x + block(x, x, x, need_weights=False)[0])
        return nn.functional.linear(x[0], self.last.weight, self.last.bias)


class Repeated(nn.Module):
    """One block three times in a forward, one also again inside backward, another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = perceptron(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 0, 1, 0):
            x = x + self.blocks[index](x)
        return x + checkpoint(self.blocks[2], x, use_reentrant=False)


class Nested(nn.Module):
    """Tied weights across levels, a parameter list, and a block that the root calls through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = perceptron(depth=3)
        self.gains = nn.ParameterList(torch.ones(32) for _ in range(2))
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.inner[0][0].weight

    def body(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return self.inner.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def pruned() -> nn.Module:
    """A pre-hook that was there before HyTrain's computes a weight."""
    model = perceptron()
    torch.manual_seed(1)
    prune.random_unstructured(model[1][0], "weight", amount=0.5)
    return model


@pytest.mark.parametrize("options", [{"k": 0.0}, {"policy": "random"}])
@pytest.mark.parametrize("make", [Attention, Repeated, Nested, pruned])
def test_whatever_way_weights_are_read(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        for step in range(20):
            train(model, opt, [step], square_loss)
            if "policy" in options and isinstance(opt, hytrain.AdamW):
                wait_for_coordinator(opt)
                opt._engine._handover.wait()
        assert "policy" not in options or not isinstance(opt, hytrain.AdamW) or opt.statistics().moved > 0

    same_as_torch(run, make, **options)


class Quantizer(nn.Module):
    """Reads a codebook and then calls it, in one forward; `shift` is the root's own, and read by `decode` as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.codebook, self.decoder = nn.Linear(32, 64), nn.Embedding(512, 64), nn.Linear(64, 32)
        self.late = nn.ParameterList([torch.ones(32)])
        self.shift = nn.Parameter(torch.randn(200_000) * 0.02)
        self.steps = 0

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z) + self.shift.sum()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codebook.weight.detach()).argmin(1)
        y = self.decode(z + self.codebook(nearest))
        return y * self.late[0] if self.steps > 2 else y


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_weights_are_waited_for_wherever_a_module_is_asked_for_them(k: float) -> None:
    """Before their module is called, in methods that are no forward, without gradients, and years after the start."""

    def run(model: Any, opt: Any) -> list[float]:
        seen = []
        for step in range(12):
            train(model, opt, [step], square_loss)
            with torch.no_grad():
                seen.append(model.decode(torch.ones(1, 64)).sum().item())
        return seen

    same_as_torch(run, Quantizer, k=k)


def test_a_module_of_an_ended_optimizer_is_an_ordinary_one() -> None:
    model = perceptron()
    with adamw(model, k=0.3) as opt:
        train(model, opt, range(8), square_loss)
        block, copied, saved = model[0][0], copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        shallow = copy.copy(block)
        assert type(block.weight) is not nn.Parameter and repr(block.weight) == repr(copied[0][0].weight), "watched"
        assert {type(p) for other in (copied, saved) for p in other.parameters()} == {nn.Parameter}
        assert torch.equal(copied[0][0].weight, saved[0][0].weight)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert shallow.weight is block.weight and vars(model).keys() == vars(perceptron()).keys()
    assert not any(vars(value) for module in model.modules() for value in vars(module).values() if is_ordered(value))
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())
    assert differing(trained_alone(model), trained_alone(reference(range(8)))) == []


@pytest.mark.parametrize("k", [0.0, 0.5])
def test_parameters_of_a_list_that_was_made_before(k: float) -> None:
    """No module is called, and none is asked for its weights."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = vectors(step)
        for weight, bias in zip(kept[model][::2], kept[model][1::2], strict=True):
            x = nn.functional.linear(x, weight, bias).tanh()
        return x.square().mean()

    def run(model: nn.Module, opt: Any) -> None:
        kept[model] = list(model.parameters())
        train(model, opt, range(6), loss_of)

    kept = dict[nn.Module, list[nn.Parameter]]()
    same_as_torch(run, k=k)


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) + x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks(backend: str) -> None:
    def run(model: nn.Module, opt: Any) -> None:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        for block in model.children():
            block.compile(backend=counter)
        train(model, opt, range(10), square_loss)
        assert counter.frame_count > 0

    same_as_torch(run, lambda: nn.Sequential(*map(Block, perceptron())), k=0.3)


class Repeated(nn.Module):
    """Each of its two blocks is called three times, in reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = perceptron(depth=3)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        call = partial(checkpoint, use_reentrant=True) if self.training else nn.Module.__call__
        x = x + torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            x = call(self.second, call(self.first, x))
        return cast(Tensor, self.head(x))


@pytest.mark.parametrize("options", [{"k": 0.0}, {"k": 1.0}, {"k": 0.4, "on_nonfinite": "skip"}], ids=str)
def test_blocks_that_several_reentrant_checkpoints_share(options: dict[str, Any]) -> None:
    """Each has a backward of its own, with a part of the gradient."""

    def run(model: Any, opt: Any) -> None:
        for step in range(6):
            train(model, opt, [step], square_loss)
            with torch.no_grad():
                square_loss(model.eval(), step)
            model.train()
        train(model, opt, [6], lambda *_: (square_loss(model, 7) + square_loss(model, 8)) * model.scale.mean())

    same_as_torch(run, Repeated, **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step(whole: bool) -> None:
    """Nothing of HyTrain's is compiled along, whether the optimizer's step is, or all that the loop does in a step."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        torch._dynamo.reset()

        def one_step(x: Tensor) -> Tensor:
            loss: Tensor = (model(x) - x.sin()).square().mean()
            loss.backward()
            step()
            opt.zero_grad()
            return loss

        step, compiled = opt.step, one_step
        if isinstance(opt, hytrain.AdamW):
            step = opt.step if whole else torch.compile(opt.step, backend="eager")
            compiled = torch.compile(one_step, backend="eager") if whole else one_step
        return [float(compiled(vectors(number)).detach()) for number in range(4)]

    same_as_torch(run, k=0.3)


JIT_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@JIT_WARNS
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_a_traced_copy_reads_every_update(k: float, caplog: pytest.LogCaptureFixture) -> None:
    """It has the model's parameters, and reads them without any hook."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        traced, read = torch.jit.trace(model, vectors(0)), []
        for step in range(4):
            train(model, opt, [step], square_loss)
            read.append(float(traced(vectors(9)).detach().sum()))
        return read

    with late_weights():
        same_as_torch(run, k=k)
    assert [one for one in caplog.messages if "torch.jit.trace" in one and "copy.deepcopy(model)" in one]


@JIT_WARNS
def test_a_model_whose_weights_are_offloaded_is_not_traced() -> None:
    model = perceptron()
    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        with pytest.raises(UsageError, match=r"offloaded.*copy.deepcopy\(model\)"):
            torch.jit.trace(model, vectors(0))
        train(model, opt, range(2), square_loss)
        torch.jit.trace(copy.deepcopy(model), vectors(0))


@JIT_WARNS
def test_torchscript_of_a_copy() -> None:
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
        with pytest.raises(UsageError, match=r"torch.jit.script\(copy.deepcopy\(model\)\)"):
            torch.jit.script(model)
        scripted = torch.jit.script(copy.deepcopy(model))
        train(model, opt, range(2, 4), square_loss)
    assert differing(weights(model), weights(reference(range(4)))) == []
    assert torch.equal(scripted(vectors(9)), reference(range(2))(vectors(9)))
    assert torch.equal(torch.jit.script(model)(vectors(9)), model(vectors(9)))


def test_a_closed_optimizer_is_not_in_the_way_of_swapped_parameters() -> None:
    """As `nn.Module.to` swaps those of some classes, which torch refuses while weak references to them exist."""
    model = perceptron()
    frozen = model[1][0].weight.requires_grad_(False)
    with adamw(model, k=0.0) as opt:
        train(model, opt, range(2), square_loss)
    for parameter in (model[0][0].weight, frozen):
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(32, 32)))
    assert opt.param_groups and torch.equal(model[0][0].weight, torch.ones(32, 32))
