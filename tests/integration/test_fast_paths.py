"""Evaluation computes as with torch, which takes other ways where it sees neither hooks nor subclasses of tensors.

In them, an encoder rounds in another way, computes in float32 under an autocast of the CPU, and leaves zeros where a
sequence is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers import LR, Reference, adamw, differing, late_weights, same, train, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 6, 8
PADDED = torch.arange(LENGTH) >= torch.tensor([6, 6, 5, 4, 3, 2, 6, 1])[:, None]


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.1, batch_first=True, **options)


class Model(nn.Module):
    """A projection, then `body`, called by `call`, then a head."""

    def __init__(self, body: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.body, self.head = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.call(self.body, self.before(x).float()))
        return y


def padded(body: Any, x: Tensor) -> Tensor:
    y: Tensor = body(x, src_key_padding_mask=PADDED)
    return y


def attended(body: Any, x: Tensor) -> Tensor:
    y, shares = body(x, x, x)
    return y + shares @ x  # type: ignore[no-any-return]


def recurrent(body: Any, x: Tensor) -> Tensor:
    y: Tensor = body(x)[0]
    return y


class WithAttention(nn.Module):
    """Blocks, beside an attention that is in none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Model(nn.TransformerEncoder(layer(), 3), lambda body, x: body(x)),
    "encoder, padded": lambda: Model(nn.TransformerEncoder(layer(), 3, nn.LayerNorm(WIDTH)), padded),
    "encoder, norms first": lambda: Model(
        nn.TransformerEncoder(layer(norm_first=True, activation="gelu"), 2, enable_nested_tensor=False), padded
    ),
    "layer": lambda: Model(layer(activation="gelu"), padded),
    "layers of one's own": lambda: Model(nn.Sequential(layer(), layer()), lambda body, x: body(x)),
    "layer alone": layer,
    "in blocks": lambda: nn.Sequential(*[nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]),
    "encoder and decoder": lambda: Model(
        nn.Transformer(WIDTH, HEADS, 2, 3, 64, batch_first=True), lambda body, x: body(x, x.flip(1))
    ),
    "attention": lambda: Model(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), attended),
    "attention beside blocks": WithAttention,
    "LSTM": lambda: Model(nn.LSTM(WIDTH, 16, 2, batch_first=True, dropout=0.1, bidirectional=True), recurrent),
    "GRU": lambda: Model(nn.GRU(WIDTH, WIDTH, 2, batch_first=True), recurrent),
}


def sequences(step: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = sequences(step)
    return (model(x) - x.sin()).square().mean()  # type: ignore[no-any-return]


class Operators(TorchDispatchMode):
    """The names of those that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gate() -> Iterator[Any]:
    with late_weights() as gate:
        yield gate


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_takes_torchs_way(name: str, k: float, gate: Any) -> None:
    ways: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
        nullcontext,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
    )

    def run(model: Any, opt: Any) -> object:
        seen: list[object] = []
        for step in range(4):
            train(model, opt, [step], loss_of)
            model.eval()
            for way in ways:
                with torch.no_grad(), way(), Operators() as operators:
                    try:
                        seen.append(model(sequences(100)).clone())
                    except RuntimeError as error:  # of torch's fast path, for bfloat16 under an autocast
                        seen.append(str(error))
                seen.append(operators.names)
            seen.append(model(sequences(100)).detach())
            model.train()
        return seen

    torch.manual_seed(0)
    theirs = MODELS[name]()
    torch.manual_seed(0)
    ours = MODELS[name]()
    expected = run(theirs, Reference(theirs, lr=LR))
    with adamw(ours, k=k) as opt:
        try:
            assert same(run(ours, opt), expected)
            opt.synchronize()
            assert differing(weights(ours), weights(theirs)) == []
        finally:
            gate.set()


def test_hooks_of_ones_own_count() -> None:
    """torch leaves its fast path where a module has hooks. They see what they would see with torch."""
    model = Model(layer(), padded)
    plain = model.eval()(sequences(0))
    seen = list[Tensor]()
    with adamw(model) as opt:
        before = len(model.body._forward_hooks)
        kept = model.body.register_forward_hook(lambda module, args, output: seen.append(output))
        with torch.no_grad(), Operators() as operators:
            model(sequences(0))
        assert len(seen) == 1 and not any("_transformer_encoder" in name for name in operators.names)
        kept.remove()
        with torch.no_grad(), Operators() as operators:
            model(sequences(0))
        assert len(seen) == 1 and any("_transformer_encoder" in name for name in operators.names)
        with pytest.raises(RuntimeError, match="embed_dim"), torch.no_grad():
            model.body(sequences(0)[:, :, :16])
        assert len(model.body._forward_hooks) == before
        opt.close()
    assert not model.body._forward_hooks and torch.equal(model(sequences(0)), plain)
