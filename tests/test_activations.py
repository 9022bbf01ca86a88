"""Activations in host memory, over copies that take their time: what leaves, what comes back when, and as what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hytrain.errors import UsageError
from hytrain.memory import pinned
from hytrain.memory.transfer import Copy, Fence, HostTransfers, Transfer
from hytrain.step import activations as module
from hytrain.step.activations import Activations, Saved

WIDTH, ROWS = 32, 16
CPU = torch.device("cpu")


class Weak:
    """Memory on the device that somebody else has to keep."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()

    @property
    def tensor(self) -> Tensor:
        storage = self._storage()
        assert storage is not None, "it is somebody else's by now"
        return torch.empty(0, dtype=torch.uint8).set_(storage, *self._place)


class Late(HostTransfers):
    """A copy happens when somebody waits for it. Both what it reads and what it writes must be there then."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.under_way: dict[Any, tuple[list[tuple[Tensor | Weak, Tensor | Weak]], Transfer | None]] = {}

    def activations_out(self, copies: Any) -> Transfer:
        self.traffic.to_host(copies)
        return self._later([(to, Weak(source)) for to, source in copies], None, [source for _, source in copies])

    def activations_in(self, copies: Any, fence: Fence, *, after: Transfer) -> Transfer:
        self.traffic.to_device(copies)
        return self._later([(Weak(to), source) for to, source in copies], after, ())

    def _later(self, copies: Any, after: Transfer | None, keep: Any) -> Transfer:
        self.number += 1
        transfer = Transfer(None, (self.number, self.number), keep)
        self.under_way[self.number] = copies, after
        return transfer

    def land(self, transfer: Transfer, stream: Any = None) -> None:
        copies, after = self.under_way.pop(transfer.span[0], ([], None))
        if after is not None:
            self.land(after)
        for to, source in copies:
            there, here = (one.tensor if isinstance(one, Weak) else one for one in (to, source))
            there.copy_(here)

    def land_all(self) -> None:
        """The device has done all that it was given."""
        for number in list(self.under_way):
            self.land(Transfer(None, (number, number)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors leave, too, through slabs of which several are needed, and no more than one group is under way."""
    monkeypatch.setattr(module, "MIN_BYTES", 4 * ROWS * WIDTH)
    monkeypatch.setattr(module, "WINDOW_BYTES", 0)
    monkeypatch.setattr(pinned, "SLAB_BYTES", 5 * 512)


@pytest.fixture
def late() -> Late:
    return Late()


@pytest.fixture
def kept(late: Late) -> Iterator[Activations]:
    activations = Activations(late, CPU, ())
    yield activations
    late.land_all()
    activations.close()


@contextmanager
def saving(activations: Activations) -> Iterator[None]:
    """A forward of the model."""

    def pack(tensor: Tensor) -> Any:
        alias = tensor.detach()
        return activations.save(tensor, alias) or alias

    def unpack(saved: Any) -> Tensor:
        return activations.restore(saved) if isinstance(saved, Saved) else saved

    activations.begin_forward()
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        activations.end_forward()


def block(activations: Activations, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    activations.enter_block()
    y = compute(x)
    activations.leave_block()
    return y


def recomputed(activations: Activations, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A block's own hooks run inside of its checkpoint, as in Transformers."""
    return checkpoint(lambda x: block_in_forward(activations, compute, x), x, use_reentrant=False)


def block_in_forward(activations: Activations, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    inside_backward = torch._C._current_graph_task_id() != -1
    return compute(x) if inside_backward else block(activations, compute, x)


def layers(depth: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)]


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(modules: list[nn.Module]) -> list[Tensor]:
    found = [parameter.grad for one in modules for parameter in one.parameters()]
    for one in modules:
        one.zero_grad()
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("run", [block, recomputed], ids=["plain", "checkpointed"])
def test_gradients_keep_their_bits(run: Any, late: Late, kept: Activations) -> None:
    modules = layers()
    for rows in (ROWS, 3 * ROWS, ROWS):  # longer and shorter batches
        x = batch(rows)
        for each in modules:
            x = each(x)
        x.square().sum().backward()
        expected = gradients(modules)
        x = batch(rows)
        with saving(kept):
            for each in modules:
                x = run(kept, each, x)
        x.square().sum().backward()
        assert all(map(torch.equal, gradients(modules), expected))
        to_device, to_host = late.traffic.take()
        assert to_device == to_host >= (len(modules) - 2) * 4 * rows * WIDTH
    most = 6 * 3 * 4 * 3 * ROWS * WIDTH  # three tensors of each block, at most
    assert 0 < kept.host_bytes <= most + pinned.SLAB_BYTES, "memory is used again"


def test_what_blocks_have_saved_leaves_and_what_the_last_has_stays(late: Late, kept: Activations) -> None:
    modules, inputs = layers(), []
    x = batch()
    with saving(kept):
        for each in modules:
            inputs.append(weakref.ref(x.untyped_storage()))
            x = recomputed(kept, each, x)
        gone = [reference() is None for reference in inputs]
        assert gone == [True] * 4 + [False] * 2, "a copy has the time of one block"
        x = x.exp()
        y = weakref.ref(x.untyped_storage())
    assert [reference() is None for reference in inputs] == [True] * 5 + [False]
    loss = x.sum()
    del x
    assert y() is not None, "what comes after the blocks is needed at once"
    _, to_host = late.traffic.take()
    assert to_host == 5 * 4 * ROWS * WIDTH
    loss.backward()


def test_backward_fetches_one_block_ahead(late: Late, kept: Activations) -> None:
    modules, fetched = layers(), list[int]()

    def watched(index: int, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            fetched.append(late.traffic.take()[0] // (4 * ROWS * WIDTH))
        return modules[index](x)

    x = batch()
    with saving(kept):
        for index in range(len(modules)):
            x = recomputed(kept, lambda x, index=index: watched(index, x), x)
    late.traffic.take()
    x.sum().backward()
    assert fetched == [1, 1, 1, 1, 1, 0], "while the last block is computed, the one before comes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_come_back_as_they_went(dtype: torch.dtype, late: Late, kept: Activations) -> None:
    """Views of one storage share it again, and it is copied once."""
    base = torch.randn(4, ROWS, WIDTH).to(dtype)
    whole_numbers = base.view(-1).view(torch.int16)
    views = [
        base,
        base.transpose(0, 2),
        base[1:, ::2, 3:],
        base[0, 0].expand(5, WIDTH),
        whole_numbers,
    ]
    before = [view.clone() for view in views]
    saved = [kept.save(view, view.detach()) for view in views]
    assert saved.pop() is None, "not a floating-point tensor"
    forms = [(view.stride(), view.storage_offset(), view.shape, view.dtype) for view in views]
    nbytes = base.nbytes
    del base, views, whole_numbers
    kept.leave_block()
    kept.enter_block()
    kept.end_forward()
    assert late.traffic.take()[1] == nbytes
    found = [kept.restore(each) for each in saved if each is not None]
    assert late.traffic.take()[0] == nbytes
    for tensor, form, value in zip(found, forms, before, strict=False):
        assert (tensor.stride(), tensor.storage_offset(), tensor.shape, tensor.dtype) == form
        assert torch.equal(tensor, value)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_what_stays(late: Late) -> None:
    """Weights, buffers, their views, small tensors, and whole numbers."""
    frozen, buffer = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
    activations = Activations(late, CPU, [frozen, buffer])
    activations.begin_forward()
    stay = [frozen.t(), buffer.view(-1), weight, weight.t(), torch.zeros(4), torch.zeros(ROWS, WIDTH, dtype=torch.long)]
    assert [activations.save(each, each.detach()) for each in stay] == [None] * len(stay)
    go = torch.zeros(ROWS, WIDTH)
    assert activations.save(go, go.detach()) is not None


def test_what_all_blocks_read_stays(late: Late, kept: Activations) -> None:
    """A mask, for example: what the last blocks need is not to be fetched with what the first one needs."""
    mask, saved = torch.rand(ROWS, WIDTH), list[Saved | None]()
    x = batch().requires_grad_()

    def masked(x: Tensor) -> Tensor:
        saved.append(kept.save(mask, mask.detach()))
        return x * mask

    y = x
    with saving(kept):
        for _ in range(6):
            y = block(kept, masked, y)
    assert [each is None for each in saved] == [False] * 2 + [True] * 4
    assert late.traffic.take()[1] == mask.nbytes, "once"
    y.sum().backward()
    expected = torch.ones_like(mask)
    for _ in range(6):
        expected = expected * mask
    assert x.grad is not None and torch.equal(x.grad, expected)


def exponentials(activations: Activations | None, written: int | None) -> tuple[Tensor, Tensor]:
    """An input, and a loss of it. What the first block has saved is written before block `written` of four others."""
    x = batch().requires_grad_()
    run = partial(block, activations) if activations is not None else lambda compute, x: compute(x)
    with nullcontext() if activations is None else saving(activations):
        y = run(torch.exp, x * 2)  # autograd saves y
        loss = y.sum()
        for index in range(4):
            if index == written:
                with torch.no_grad():
                    y.mul_(3)
            loss = loss + run(torch.tanh, x).sum()
    return x, loss


@pytest.mark.parametrize("written", range(4))
def test_what_is_written_before_backward(written: int, kept: Activations) -> None:
    """Is refused, as torch does. A write that comes when the copy is made does no harm."""
    x, loss = exponentials(kept, written)
    if written < 2:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    y, expected = exponentials(None, None)
    loss.backward()
    expected.backward()
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, y.grad)


def test_a_graph_that_is_kept_is_fetched_again(late: Late, kept: Activations) -> None:
    modules = layers()
    x = batch()
    with saving(kept):
        for each in modules:
            x = block(kept, each, x)
    loss = x.sum()
    found = []
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
        found.append(gradients(modules))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    to_device, to_host = late.traffic.take()
    assert to_device == 3 * to_host > 0


def test_two_graphs_at_once(kept: Activations) -> None:
    """The first one's backward comes first, and the second one's memory is not touched."""
    modules, losses, expected = layers(), [], []
    for rows in (ROWS, 2 * ROWS):
        x = batch(rows)
        for each in modules:
            x = each(x)
        x.sum().backward()
        expected.append(gradients(modules))
    for rows in (ROWS, 2 * ROWS):
        x = batch(rows)
        with saving(kept):
            for each in modules:
                x = block(kept, each, x)
        losses.append(x.sum())
    del x
    for index in range(2):
        losses[index].backward()
        assert all(map(torch.equal, gradients(modules), expected[index]))
        x = batch(ROWS)
        with saving(kept):  # in the memory that is free by now
            for each in modules:
                x = block(kept, each, x)
        del x


def test_what_is_fetched_for_nobody_is_kept_until_it_has_come(late: Late, kept: Activations) -> None:
    """A backward that needs only the last blocks, or fails. The next forward can have the memory."""
    modules = layers()
    for _ in range(2):
        x = batch()
        with saving(kept):
            for each in modules:
                x = block(kept, each, x)
        torch.autograd.grad(x.sum(), list(modules[-1].parameters()))
        del x
        gc.collect()
        assert len(kept._coming) == 1
    kept.begin_forward()
    assert not kept._coming and not late.under_way


def test_memory_that_others_have_freed_meanwhile(kept: Activations) -> None:
    """Such as weights that somebody gathers again for backward: it is not copied, and nor is what it is then."""
    x, gathered = batch(), torch.ones(ROWS, WIDTH)
    with saving(kept):
        kept.enter_block()
        saved = [kept.save(each, each.detach()) for each in (x, gathered)]
        kept.leave_block()
        values = x.clone()
        gathered.untyped_storage().resize_(0)
        for _ in range(3):
            kept.enter_block()
            again = kept.save(gathered, gathered.detach())
            kept.leave_block()
    del x
    gathered.untyped_storage().resize_(4 * ROWS * WIDTH)
    with torch.autograd._unsafe_preserve_version_counter(gathered):
        gathered.fill_(2.0)
    assert saved[0] is not None and saved[1] is not None and again is None
    assert torch.equal(kept.restore(saved[0]), values)
    assert torch.equal(kept.restore(saved[1]), torch.full((ROWS, WIDTH), 2.0))


def test_nothing_is_left_of_a_forward_that_fails(kept: Activations) -> None:
    modules, x, seen = layers(), batch(), list[Any]()

    def fails() -> None:
        nonlocal x
        with saving(kept):
            for each in modules:
                x = block(kept, each, x)
                seen.append(weakref.ref(x.untyped_storage()))
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    x = batch()
    gc.collect()
    assert [reference() for reference in seen] == [None] * len(modules)
    pinned_bytes = kept.host_bytes
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            fails()
        x = batch()
    assert kept.host_bytes == pinned_bytes > 0


def test_without_host_memory_they_stay(late: Late, caplog: pytest.LogCaptureFixture) -> None:
    """What has been pinned is used nevertheless. It is said once."""
    free = [1 << 20]
    activations = Activations(late, CPU, (), lambda: free[0])
    modules, x = layers(), batch()
    for each in modules:
        x = each(x)
    x.sum().backward()
    expected, sent = gradients(modules), []
    for rows, left in ((ROWS, 1 << 20), (ROWS, -1), (4 * ROWS, -1), (4 * ROWS, -1)):
        free[0] = left
        x = batch(rows)
        with saving(activations):
            for each in modules:
                x = block(activations, each, x)
        x.sum().backward()
        found = gradients(modules)
        sent.append(late.traffic.take()[1])
        assert rows != ROWS or all(map(torch.equal, found, expected))
    assert sent[0] == sent[1] > 0
    assert 0 < sent[2] == sent[3] < 4 * sent[0], "as far as it goes"
    [said] = [record.getMessage() for record in caplog.records]
    assert "activations stay on the device: 0.0 MiB of host memory are free" in said
    activations.close()


def test_a_gradient_penalty(kept: Activations) -> None:
    """A backward whose own graph is kept: it saves what has come back."""
    modules, results = layers(), []
    for offloaded in (False, True):
        x = batch().requires_grad_()
        y = x
        with saving(kept) if offloaded else nullcontext():
            for each in modules:
                y = block(kept, each, y) if offloaded else each(y)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (slope.square().sum() + y.sum()).backward()
        results.append(gradients(modules))
    assert all(map(torch.equal, *results))


def test_a_closed_optimizer_says_so() -> None:
    activations = Activations(HostTransfers(), CPU, ())
    x = batch().requires_grad_()
    with saving(activations):
        y = x
        for _ in range(3):
            y = block(activations, torch.exp, y)
    activations.close()
    with pytest.raises(UsageError, match="an optimizer that is closed"):
        y.sum().backward()


def test_copies(late: Late) -> None:
    """Of one range of host memory, in parts that lie in one slab each."""
    stack = pinned.PinnedStack(late)
    stack.grow(3 * pinned.SLAB_BYTES + 1)
    assert stack.nbytes == 4 * pinned.SLAB_BYTES
    parts = stack.parts(pinned.SLAB_BYTES - 7, 2 * pinned.SLAB_BYTES)
    assert [len(part) for part in parts] == [7, pinned.SLAB_BYTES, pinned.SLAB_BYTES - 7]
    pairs: list[Copy] = [(part, part) for part in parts]
    assert sum(part.nbytes for part, _ in pairs) == 2 * pinned.SLAB_BYTES
    stack.close()


def test_graphs_that_end_in_the_order_of_their_beginning_use_memory_again(late: Late) -> None:
    """As in a pipeline that alternates forwards and backwards: three graphs at a time, of many."""
    activations, modules, graphs, taken = Activations(late, CPU, ()), layers(), list[Tensor](), list[int]()
    for _ in range(12):
        x = batch()
        with saving(activations):
            for each in modules:
                x = block(activations, each, x)
        graphs.append(x.sum())
        del x
        if len(graphs) == 3:
            graphs.pop(0).backward()
        taken.append(max(group.stop for group in module._alive(activations._sent)))
    assert max(taken[3:]) <= max(taken[:3])
    activations.close()
