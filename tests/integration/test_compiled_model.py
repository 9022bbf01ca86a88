"""`torch.compile(model)`: one graph, and the bits of the same compiled model with torch's AdamW.

The hooks of modules leave the graph: the call of the whole model, which is not compiled, waits for all weights that the
graph reads. The loops compile again for a second sequence length and for evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from helpers import adamw, on_waiting, process, same_as_torch, seed
from small_models import perceptron, square_loss, vectors
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hytrain
from hytrain.errors import UsageError
from hytrain.model.hooks import AfterForward, BeforeForward
from hytrain.step.uses import Uses

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks

VOCAB, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(self.up(self.norm(x)).relu()))


class Language(nn.Module):
    """Its head is tied to its embedding, `scale` is read by no module but itself. The loss is in the graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens(number: int, length: int = 16) -> Tensor:
    seed(number)
    return torch.randint(0, VOCAB, (2, length))


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Loop:
    """A loop over a compiled model. `graphs`: how many there were with each optimizer, torch's first."""

    def __init__(self, backend: str = "eager", *, fullgraph: bool = True, accumulate: int = 1) -> None:
        self.backend, self.fullgraph, self.accumulate = backend, fullgraph, accumulate
        self.graphs, self.breaks = list[int](), list[int]()

    def compiled(self, model: nn.Module) -> Any:
        return torch.compile(model, backend=self.counter, fullgraph=self.fullgraph)

    def __call__(self, model: nn.Module, opt: Any) -> list[float]:
        torch._dynamo.reset()
        counters.clear()
        self.counter = CompileCounterWithBackend(self.backend)
        compiled, losses = self.compiled(model), list[float]()
        for step in range(8):
            for part in range(self.accumulate):
                loss = compiled(tokens(step + 100 * part, 16 if step < 4 else 24)) / self.accumulate
                loss.backward()
                losses.append(loss.item())
            opt.step()
            opt.zero_grad()
            if step in (2, 5):
                with torch.no_grad():
                    losses.append(compiled(tokens(step, 24)).item())
            if step == 6:
                getattr(model, "_orig_mod", model).load_state_dict(Language().state_dict())
        self.graphs.append(self.counter.frame_count)
        self.breaks.append(sum(counters["graph_break"].values()))
        return losses


@pytest.mark.parametrize(
    ("backend", "k"),
    [("eager", 0.0), ("aot_eager", 0.5), ("eager", 1.0), pytest.param("inductor", 0.5, marks=pytest.mark.slow)],
)
def test_one_graph_with_the_bits_of_torchs_adamw(backend: str, k: float) -> None:
    loop = Loop(backend)
    same_as_torch(loop, Language, k=k)
    assert loop.graphs[1] == loop.graphs[0]
    assert loop.breaks == [0, 0]


def test_a_model_that_is_compiled_in_place_and_accumulates() -> None:
    class InPlace(Loop):
        def compiled(self, model: nn.Module) -> Any:
            model.compile(backend=self.counter, fullgraph=True)
            return model

    loop = InPlace(accumulate=2)
    same_as_torch(loop, Language, k=0.5, grad_accumulation=2)
    assert loop.graphs[1] == loop.graphs[0]


def test_the_compiled_model_is_what_is_trained() -> None:
    """So the hooks of the whole model are on what `torch.compile` returns."""

    class Wrapped(Loop):
        def compiled(self, model: nn.Module) -> Any:
            assert isinstance(model, torch._dynamo.OptimizedModule)
            return model

    same_as_torch(Wrapped(), lambda: cast(nn.Module, torch.compile(Language(), backend="eager", fullgraph=True)), k=0.5)


def test_the_graph_waits_for_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is stopped before it hears of the last gradients, until somebody waits for it."""

    def run(model: nn.Module, opt: Any) -> list[float]:
        compiled, losses = torch.compile(model, backend="eager", fullgraph=True), list[float]()
        optimizer = process(opt, "optimizer") if hasattr(opt, "processes") else None
        if optimizer is not None:
            on_waiting(monkeypatch, lambda what: optimizer.resume())
        for step in range(6):
            loss = (model if step < 2 else compiled)(tokens(step))  # the compiler's first call comes during updates
            if optimizer is not None:
                optimizer.suspend()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    same_as_torch(run, Language, k=0.0)


def test_nothing_runs_at_modules_or_weights_in_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in forward nor in backward, which computes with the weights that forward has saved. But for the model's
    own parameter: its hooks are not compiled."""
    calls = Counter[str]()

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call(self: Any, *arguments: Any) -> Any:
            calls[f"{kind.__name__}.{name}"] += 1
            return original(self, *arguments)

        monkeypatch.setattr(kind, name, call)

    for kind, name in ((BeforeForward, "_enter"), (AfterForward, "_leave"), (Uses, "use")):
        counted(kind, name)
    model = Language()
    with adamw(model, k=0.5) as opt:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(3):
            calls.clear()
            compiled(tokens(step)).backward()
            opt.step()
            opt.zero_grad()
        assert calls == {"BeforeForward._enter": 1, "AfterForward._leave": 1, "Uses.use": 1}, "the model's own `scale`"
        with pytest.raises(UsageError, match="is used between backward and step"):
            compiled(tokens(3)).backward()
            model.head.weight.sum()
        opt.step()


def test_no_graph_breaks_while_models_are_looked_for() -> None:
    """An evaluation comes first, as in nanoGPT. Later one optimizer has found its model, and another has not."""
    one, other, counter = Language(), Language(), CompileCounterWithBackend("eager")
    with hytrain.AdamW(one.parameters()) as first, hytrain.AdamW(other.parameters()) as second:
        graphs: list[Any] = [torch.compile(model, backend=counter, fullgraph=True) for model in (one, other)]
        with torch.no_grad():
            graphs[0](tokens(0))
        assert counter.frame_count == 1
        for opt, graph in zip((first, second), graphs, strict=True):
            assert opt._started is None
            graph(tokens(0)).backward()
            opt.step()
            opt.zero_grad()
    assert counter.frame_count == 3


def test_a_compiled_function_that_calls_the_model() -> None:
    """The graph breaks around the whole model only, before which is waited."""

    class Function(Loop):
        def compiled(self, model: nn.Module) -> Any:
            return torch.compile(lambda tokens: model(tokens) * 2.0, backend=self.counter)

    loop = Function()
    same_as_torch(loop, Language, k=0.5)
    assert loop.breaks[0] == 0 and loop.graphs[1] <= 2 * loop.graphs[0]


def test_compiled_modules_that_the_whole_model_does_not_always_call() -> None:
    """On their own, their blocks wait, between graphs; within the model, it waits for them."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = perceptron(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.last(self.body(x)))

    def run(model: Any, opt: Any) -> list[float]:
        torch._dynamo.reset()
        model.body.compile(backend="eager")
        losses = []
        for step in range(6):
            loss = (model if step % 2 else model.body)(vectors(step)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    same_as_torch(run, Outer, k=0.3)


def test_compiled_blocks_wait_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hooks are outside of what is compiled, and are not compiled either: updates overlap with forward."""
    entered = Counter[str]()
    enter: Callable[..., None] = BeforeForward._enter

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def counted(self: Any, module: nn.Module) -> None:
        entered[type(module).__name__] += 1
        enter(self, module)

    monkeypatch.setattr(BeforeForward, "_enter", counted)
    model = Language()
    with adamw(model, k=0.5) as opt:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        for step in range(3):
            entered.clear()
            model(tokens(step)).backward()
            opt.step()
            opt.zero_grad()
        assert entered["Block"] == 3


def test_what_leaves_the_device_still_comes_at_blocks() -> None:
    loop = Loop(fullgraph=False)
    same_as_torch(loop, Language, k=0.0, visit=0.5, offload_weights=1.0)
    assert loop.breaks[0] == 0 < loop.breaks[1]


def test_evaluation_that_is_compiled_between_backward_and_step_is_refused_in_words() -> None:
    model = Language()
    with adamw(model, k=0.5, updates="backward") as opt:
        compiled = torch.compile(model, backend="eager")
        model(tokens(0)).backward()
        for _ in range(2):
            with torch.no_grad(), pytest.raises(UsageError, match=r"Evaluate before backward, or after opt\.step\(\)"):
                compiled(tokens(1))
        opt.step()
        compiled(tokens(1))


@pytest.mark.parametrize("updates", ["step", "auto"])
def test_a_compiled_backward(updates: str) -> None:
    """Compiled autograd never calls what was queued for the end of backward."""
    backwards = 1 if updates == "auto" else 2

    def run(model: nn.Module, opt: Any) -> list[float]:
        seen = []
        for number in range(4):
            for part in range(backwards):
                loss = square_loss(model, backwards * number + part)
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    loss.backward()
                seen.append(loss.item())
            seen += [parameter.sum().item() for parameter in model.parameters()] if updates == "step" else []
            opt.step()
            opt.zero_grad()
        return seen

    same_as_torch(run, lambda: perceptron(depth=2), k=0.5, updates=updates)  # each gradient breaks the graph
