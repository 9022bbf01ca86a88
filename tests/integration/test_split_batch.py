"""`split_batch`: blocks compute parts of the batch one after another, and the rest of a step does not notice."""

from __future__ import annotations

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Reference, adamw, differing, same_as_torch, same_bits, train, weights
from small_models import gpt2, language_loss, llama, mixtral, perceptron, square_loss, tokens, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.memory import pinned
from hytrain.model import split_batch
from hytrain.step import activations, offload

PLACEMENTS: list[dict[str, Any]] = [
    {"k": 1.0},
    {"k": 0.0},
    {"k": 0.5},
    {"k": 0.0, "offload_weights": 1.0},
    {"k": 0.0, "visit": 1.0, "offload_weights": 1.0, "offload_activations": True},
]


def split(make: Callable[[], nn.Module], parts: int, checkpoint: bool = False) -> nn.Module:
    model = make()
    hytrain.split_batch(model, parts, checkpoint=checkpoint)
    return model


def recomputing(make: Callable[[], nn.Module], parts: int) -> nn.Module:
    """With checkpoints of its own, as Transformers makes them."""
    model = split(make, parts)
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def by_hand(model: nn.Module, step: int) -> Tensor:
    """As `square_loss` of a perceptron whose blocks compute in three parts."""
    x = vectors(step)
    for block in model.children():
        x = torch.cat([block(part) for part in x.split([3, 3, 2])])
    return (x - vectors(step).sin()).square().mean()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_it_is_what_a_loop_over_parts_computes(checkpoint: bool) -> None:
    ours, theirs = split(perceptron, 3, checkpoint), perceptron()
    found = train(ours, Reference(ours, lr=1e-3), range(4), square_loss)
    assert found == train(theirs, Reference(theirs, lr=1e-3), range(4), by_hand)
    assert differing(weights(ours), weights(theirs)) == []


@pytest.mark.parametrize("make", [gpt2, llama, mixtral], ids=["gpt2", "llama", "mixtral"])
def test_the_gradients_are_those_of_the_whole_batch(make: Callable[..., nn.Module]) -> None:
    """Within rounding."""
    one, other = make(torch.float64).eval(), make(torch.float64).eval()
    hytrain.split_batch(one, 3)
    for model in (one, other):
        model.config.use_cache = False
        language_loss(model, 0).backward()
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("options", PLACEMENTS, ids=str)
@pytest.mark.parametrize(
    "make", [partial(split, gpt2, 3), partial(split, gpt2, 4, True), partial(recomputing, gpt2, 2)], ids=["", "c", "r"]
)
def test_torchs_bits_wherever_layers_are(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """With dropout, tied embeddings and a last part that is smaller."""

    def without_cache() -> nn.Module:
        model = make()
        model.config.use_cache = False
        return model

    same_as_torch(lambda model, opt: train(model, opt, range(4)), without_cache, **options)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_offloaded_weights_come_once_for_all_parts(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward, once the order of a step is known."""
    monkeypatch.setattr(offload, "SLOTS", 1)
    fetch, events = offload.Offload._fetch, list[tuple[str, str]]()

    def noted(self: offload.Offload, block: Any) -> None:
        events.append(("fetch", block.layers[0].name))
        fetch(self, block)

    monkeypatch.setattr(offload.Offload, "_fetch", noted)
    model = split(perceptron, 4, checkpoint)
    for name, block in model.named_children():
        block[0].register_forward_pre_hook(lambda *_, name=name: events.append(("part", name)))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        events.append(("forward", ""))
        loss = square_loss(model, step)
        events.append(("backward", ""))
        return loss

    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        train(model, opt, range(3), loss_of)
        events.append(("forward", ""))
    ways = [place for place, (what, _) in enumerate(events) if what in ("forward", "backward")]
    for begins, ends in list(itertools.pairwise(ways))[2:]:
        (way, _), *come = events[begins:ends]
        parts = [name for what, name in come if what == "part"]
        order = list("0123") if way == "forward" else list("3210") if checkpoint else []
        assert parts == [name for name in order for _ in range(4)]
        for name in order if way == "forward" else order[:-1]:  # the next forward begins with the first one
            since = come.index(("part", name))
            assert ("fetch", name) not in come[since:], f"{name} comes again in {way}"
    assert {name for what, name in events if what == "fetch"} == set("0123")


def test_a_step_of_another_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of an epoch, and around an evaluation, which computes all at once."""
    monkeypatch.setattr(offload, "SLOTS", 1)

    def run(model: nn.Module, opt: Any) -> None:
        for step, rows in enumerate((8, 8, 1, 2, 8, 7)):
            model(vectors(step)[:rows]).square().mean().backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model(vectors(step))

    same_bits(run, partial(split, perceptron, 4), *PLACEMENTS)


def test_accumulation_and_clipping() -> None:
    """Several backwards of several parts."""

    def run(model: nn.Module, opt: Any) -> None:
        for step in range(3):
            for part in range(2):
                square_loss(model, 2 * step + part).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()

    same_bits(run, partial(split, perceptron, 4, True), *PLACEMENTS)


class Block(nn.Module):
    """Takes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, more: dict[str, Any], *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        self.seen.append((len(x), len(more["rows"]), len(more["shared"]), 0 if mask is None else len(mask)))
        made = {"rows": more["rows"] * 2, "name": more["name"], "no": None}
        return self.line(x) * more["rows"] + more["shared"], made


def test_what_has_the_batch_is_split_and_joined() -> None:
    """Tensors with the batch's tokens, and masks of four dimensions."""
    blocks = nn.ModuleList(Block() for _ in range(2))
    hytrain.split_batch(blocks, 3)
    x, rows, shared = torch.randn(7, 8), torch.randn(7, 8), torch.randn(1, 8)
    y, more = blocks[0](x, {"rows": rows, "shared": shared, "name": "it"}, mask=torch.ones(7, 1, 5, 5))
    assert blocks[0].seen == [(3, 3, 1, 3), (3, 3, 1, 3), (1, 1, 1, 1)]
    torch.testing.assert_close(y, blocks[0].line(x) * rows + shared)
    assert torch.equal(more["rows"], rows * 2) and more["name"] == "it" and more["no"] is None
    blocks[1](x[:1], {"rows": rows[:1], "shared": shared, "name": "it"})
    blocks[1].eval()(x, {"rows": rows, "shared": shared, "name": "it"})
    assert blocks[1].seen == [(1, 1, 1, 0), (7, 7, 1, 0)], "one row, and an evaluation"


SLOPES = torch.ones(6, 1, 4)


@pytest.mark.parametrize(
    ("size", "more", "times"),
    [
        pytest.param(6, SLOPES, 1, id="as many heads as rows"),
        pytest.param(5, SLOPES[:1], 2, id="one for all heads"),
        pytest.param(6, torch.ones(6, 4, 4), 1, id="as many heads as rows, for each pair of tokens"),
        pytest.param(6, torch.ones(12, 4, 4), 1, id="two heads for each row"),
        pytest.param(6, torch.ones(12, 4), 1, id="two rows for each row"),
        pytest.param(2, torch.ones(4, 4), 2, id="a table of tokens"),
        pytest.param(6, torch.ones(6, 4), 2, id="as the batch"),
        pytest.param(6, torch.ones(6, 4, 3), 1, id="as many heads as rows, for each token"),
        pytest.param(6, torch.ones(6, 4, 3).long(), 2, id="whole numbers for each token"),
        pytest.param(6, torch.ones(6), 1, id="a vector"),
        pytest.param(6, torch.Size([6, 4]), 1, id="the batch's shape"),
        pytest.param(5, torch.Size([6, 4]), 2, id="another shape"),
        pytest.param(6, 6, 1, id="the batch's size"),
        pytest.param(6, True, 2, id="a flag"),
        pytest.param(4, torch.ones(4, 4), 1, id="as many tokens as rows"),
        pytest.param(4, torch.ones(1, 4), 2, id="one for all rows"),
    ],
)
def test_where_nobody_can_tell_what_has_the_batch_all_is_computed_at_once(size: int, more: Any, times: int) -> None:
    blocks, seen = nn.ModuleList(Block() for _ in range(2)), list[int]()
    hytrain.split_batch(blocks, 2)
    blocks[0].forward = lambda x, more: seen.append(len(x)) or x  # type: ignore[method-assign]
    blocks[0](torch.randn(size, 4), more)
    assert len(seen) == times and sum(seen) == size


def test_what_cannot_be_split_or_joined_is_refused() -> None:
    blocks = nn.ModuleList(Block() for _ in range(2))
    hytrain.split_batch(blocks, 2)
    x, shared = torch.randn(6, 8), torch.randn(1, 8)
    with pytest.raises(UsageError, match="Block is given a list_iterator, which may hold all of the batch"):
        blocks[0](x, {"rows": iter([]), "shared": shared, "name": "it"})
    with pytest.raises(UsageError, match=r"not split by the batch: a tensor of shape \(1, 1\)"):
        blocks[0](x, {"rows": torch.ones(1, 1), "shared": shared, "name": "it"})
    blocks[0].forward = lambda x: (x, float(x.sum()))  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="Block returns something that is not split by the batch: float"):
        blocks[0](x)
    blocks[0].forward = lambda x: (x, torch.ones(3))  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"not split by the batch: a tensor of shape \(3,\)"):
        blocks[0](x)
    blocks[0].forward = lambda x: x.add_(1)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="Block writes into what it is given"):
        blocks[0](x)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_blocks_write_elsewhere_or_count_is_refused(checkpoint: bool) -> None:
    """The model would see one part's, or none."""
    blocks = nn.ModuleList(Block() for _ in range(2))
    hytrain.split_batch(blocks, 2, checkpoint=checkpoint)
    x, total = torch.randn(6, 8), torch.zeros(())
    forwards: list[tuple[Any, tuple[Any, ...], str]] = [
        (lambda x, losses: (losses.append(x.mean()), x)[1], ([],), "writes into what it is given"),
        (lambda x, losses: (losses.update(aux=x.mean()), x)[1], ({},), "writes into what it is given"),
        (lambda x, states: (states.__setitem__(0, x + 1), x)[1], ([x + 0],), "writes into what it is given"),
        (lambda x, total: (total.add_(x.detach().mean()), x)[1], (total,), "writes into what it is given"),
        (lambda x: (x, len(x)), (), "not split by the batch: int"),
        (lambda x: (x, x.shape), (), "not split by the batch: Size"),
        (lambda x: (x, x) if x[0, 0] == first else (x,), (), "other things for one part"),
    ]
    first = x[0, 0]
    for forward, others, sentence in forwards:
        blocks[0].forward = forward
        with pytest.raises(UsageError, match=f"split_batch: Block .*{sentence}"):
            blocks[0](x, *others)
    blocks[0].forward = lambda x: (x, None, True, 0.0, "name")
    assert blocks[0](x)[1:] == (None, True, 0.0, "name")


def test_dropout_in_a_reentrant_checkpoint_is_the_same_in_backward() -> None:
    """Forward runs without gradients there, and backward computes the block again."""
    seen = list[Tensor]()
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))
    for block in blocks:
        block[1].register_forward_hook(lambda module, given, made: seen.append((made != 0).detach()))
    hytrain.split_batch(blocks, 3)
    torch.manual_seed(0)
    x = torch.randn(9, 8, requires_grad=True)
    checkpointed(blocks[0], x, use_reentrant=True).sum().backward()
    forward, backward = seen[:3], seen[3:]
    assert [len(each) for each in seen] == [3] * 6 and all(map(torch.equal, forward, backward))


def test_a_cache_is_refused() -> None:
    """Transformers would make one, of which a part would see the part before."""
    model = split(llama, 2)
    with pytest.raises(UsageError, match="is given a DynamicCache"):
        model(input_ids=tokens(0), use_cache=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 4), "no repeated blocks"),
        (nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)), "EncoderLayer has batch_first=False"),
        (nn.ModuleList(nn.GRU(8, 8) for _ in range(2)), "GRU has batch_first=False"),
        (nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)), "BatchNorm1d computes"),
    ],
)
def test_models_that_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hytrain.split_batch(model, 2)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        hytrain.split_batch(model, 0)


class Sharded(nn.Linear):
    """As `fully_shard` makes of a module."""

    _get_fsdp_state = None


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("whole", [True, False], ids=["the block", "a part of it"])
def test_blocks_that_are_sharded_are_refused(whole: bool, rows: int) -> None:
    """Each part would gather the weights. Also with one row, or others would wait for a rank that has refused."""
    blocks = nn.ModuleList(Sharded(4, 4) if whole else nn.Sequential(Sharded(4, 4)) for _ in range(2))
    hytrain.split_batch(blocks, 2)
    with pytest.raises(UnsupportedError, match="is sharded by fully_shard"):
        blocks[0](torch.randn(rows, 4))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_inputs_of_parts_leave_the_device(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself: none keeps the memory of all of them."""
    monkeypatch.setattr(activations, "MIN_BYTES", 512)
    monkeypatch.setattr(activations, "WINDOW_BYTES", 0)
    monkeypatch.setattr(pinned, "SLAB_BYTES", 4096)
    real, batches = split_batch._split, list[weakref.ref[torch.UntypedStorage]]()

    def noted(each: Any, batch: Tensor, sizes: list[int]) -> Any:
        if each is batch:
            batches.append(weakref.ref(batch.untyped_storage()))
        return real(each, batch, sizes)

    monkeypatch.setattr(split_batch, "_split", noted)
    with adamw(split(partial(perceptron, 256), 4, checkpoint), k=0.0, offload_activations=True) as opt:
        loss = opt._model(vectors(0, 256).repeat(8, 1)).square().mean()
        assert len(batches) == 4 and [batch() for batch in batches] == [None] * 4
        loss.backward()
        opt.step()


def test_a_model_can_be_copied_saved_and_split_anew() -> None:
    """Copies compute all at once: a file needs no HyTrain to be loaded."""
    model = split(perceptron, 4)
    kind = type(model[0])
    hytrain.split_batch(model, 2)
    assert kind is not type(model[0]) is not nn.Sequential and type(model[0]).__mro__[1] is nn.Sequential
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is nn.Sequential and torch.equal(copied(vectors(0)), model.eval()(vectors(0)))
    hytrain.split_batch(model, 1)
    assert type(model[0]) is nn.Sequential
