"""The code that copies to and from a GPU, over a CPU's memory: all of it but streams, events and pinning.

What it says of order between streams only a GPU can show (tests/test_gpu.py). That every call of it is one that torch
takes, and moves what it should, is shown here for whoever has none.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    DEADLINE_S,
    adamw,
    differing,
    keep,
    opened,
    same_as_torch,
    same_bits,
    scale_by_hand,
    state,
    train,
    wait_for,
    weights,
)
from small_models import micro_batches, perceptron, share_of_loss, square_loss
from streams import Current, Event, OverHostMemory, Stream, over_host_memory
from test_k_invariance import train_and_prepare
from torch import nn

import hytrain
from examples.studies.cotraining.shares import cotrain
from hytrain.memory.clock import HostClock
from hytrain.memory.transfer import Copy, CudaTransfers, HostTransfers, Transfer
from hytrain.model.trained import OffloadedBlock, TrainedLayer, TrainedParameter
from hytrain.run.link import Link
from hytrain.step import activations
from hytrain.step.accumulation import Accumulation
from hytrain.step.activations import Activations, Saved
from hytrain.step.device import DeviceUpdates
from hytrain.step.gradient import RoundTrip
from hytrain.step.handover import Handover
from hytrain.step.masters import Masters
from hytrain.step.offload import Offload
from hytrain.tensors import address
from protocol.messages import TakeOver


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    return over_host_memory(monkeypatch)


@pytest.mark.parametrize("transfers", [OverHostMemory, lambda device: HostTransfers()], ids=["cuda", "cpu"])
@pytest.mark.parametrize(
    ("options", "to_device", "to_host"),
    [
        ({"k": 0.0}, 2, 2),  # weights, gradients
        ({"k": 0.0, "visit": 1.0}, 10, 10),  # remainder and moments, both ways
        ({"k": 1.0}, 0, 0),
    ],
    ids=str,
)
def test_copies_are_counted(
    options: dict[str, Any], to_device: int, to_host: int, transfers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes per bf16 parameter and step. The first step also brings all weights to the host, and later ones samples."""
    monkeypatch.setattr("hytrain.build.transfers_for", transfers)
    model = perceptron(dtype=torch.bfloat16)
    numel = sum(parameter.numel() for parameter in model.parameters())
    began_s, records = time.monotonic(), list[dict[str, Any]]()
    with adamw(model, **options) as opt:
        train(model, opt, range(9), square_loss)
        run_dir = opt.run_dir
    while len(records) < 9:  # the coordinator of other tests goes on to write them, over those of the test before
        assert time.monotonic() < began_s + DEADLINE_S, f"{len(records)} records of 9 steps"
        *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")
        records = [record for record in map(json.loads, lines) if record["at_s"] >= began_s]
    there, back = (sum(record[name] for record in records[1:]) for name in ("to_device_bytes", "to_host_bytes"))
    assert 8 * to_host * numel <= back <= 8 * (to_host * numel + 1000)
    assert abs(there - 8 * to_device * numel) <= 2 * numel, "weights may come after their step's record"


@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 0.0), (torch.bfloat16, 0.5), (torch.float16, 1.0)], ids=str)
def test_saved_and_resumed(dtype: torch.dtype, k: float, tmp_path: Path) -> None:
    whole = perceptron(dtype=dtype)
    with adamw(whole, k=k) as opt:
        train(whole, opt, range(6), square_loss)
        loads = [keep(opt, form, tmp_path) for form in ("files", "dictionary")]
        kept = weights(whole)
        train(whole, opt, range(6, 12), square_loss)
        expected = state(opt) | weights(whole)
    for load in loads:
        model = perceptron(dtype=dtype)
        with adamw(model, k=k) as opt:
            model.load_state_dict(kept)
            load(opt)
            train(model, opt, range(6, 12), square_loss)
            assert differing(state(opt) | weights(model), expected) == []


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_weights_from_outside(k: float) -> None:
    def run(model: Any, opt: Any) -> None:
        train(model, opt, range(2), square_loss)
        model.load_state_dict({name: tensor * 1.25 for name, tensor in model.state_dict().items()})
        train(model, opt, range(2, 4), square_loss)
        scale_by_hand(model, opt)
        train(model, opt, range(4, 6), square_loss)
        model.state_dict()

    same_as_torch(run, k=k)


class Pool(HostClock):
    """As the device's clock, whose events are used again once they are given back."""

    def __init__(self) -> None:
        self._last_s, self.given_back = 0.0, set[Any]()

    def mark(self, stream: Any = None) -> float:
        self._last_s = max(time.monotonic(), self._last_s + 1e-6)
        return self._last_s

    def seconds(self, span: Any) -> float:
        assert self.given_back.isdisjoint(span), "is somebody else's by now"
        return super().seconds(span)

    def recycle(self, marks: Any) -> None:
        for mark in marks:
            assert mark not in self.given_back, "would be two users' at once"
            self.given_back.add(mark)


@pytest.mark.parametrize(
    "options",
    [{"k": 1.0}, {"k": 0.0, "visit": 1.0}, {"k": 0.0, "visit": 1.0, "offload_weights": 1.0}, {"policy": "random"}],
)
def test_layers_without_state(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied for them but gradients and weights, and each mark of time is given back once."""
    pools: list[Pool] = []

    def over_host_memory(device: torch.device) -> OverHostMemory:
        made = OverHostMemory(device)
        pools.append(Pool())
        made.clock = pools[-1]
        return made

    monkeypatch.setattr("hytrain.build.transfers_for", over_host_memory)
    theirs, ours = perceptron(), perceptron()
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), range(12), square_loss)
    with opened(hytrain.SGD, ours, lr=0.1, **options) as opt:
        train_and_prepare(ours, opt, 12, square_loss)
        opt.synchronize()
        assert differing(weights(ours), weights(theirs)) == []
    assert pools[0].given_back


def test_backward_waits_for_the_oldest_visits(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that made the gradients, which no other may get the memory of before; or that copies them."""
    monkeypatch.setattr(Event, "query", lambda event: False)  # the device is late
    kept, out = list[Any](), list[Any]()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream))

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train(model, opt, range(6), square_loss)
        assert not opt._engine._visits.is_full, "no more than may wait, which is one layer's gradients on a CPU"
        out.append(opt._engine._transfers._out)

    same_bits(run, lambda: perceptron(dtype=torch.bfloat16), {"k": 0.0, "visit": 1.0}, {"k": 0.0})
    assert set(kept) == {current.stream, out[1]}, "with visits, no gradient leaves"


def test_memory_of_others_is_kept_while_it_is_copied(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another library's gradients, of which torch's allocator knows nothing; its own it keeps itself."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(tensor))
    transfers, own, others = OverHostMemory(torch.device("cpu")), torch.ones(3), torch.from_dlpack(torch.ones(3))
    leaving = transfers.let_go(transfers.gradients_out([(torch.zeros(3), own), (torch.zeros(3), others)]))
    assert [id(tensor) for tensor in kept] == [id(own)]
    assert [id(tensor) for tensor in leaving.keep] == [id(others)]


def test_what_reads_memory_that_others_get_next_comes_first(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that leave memory which the user has allocated: whoever computes may get it next."""
    reads, seen = list[Any](), list[Any]()
    ever, kept, fetched, fences = set[int](), set[int](), set[int](), set[Any]()

    def weights_out(self: OverHostMemory, copies: Any) -> Any:
        reads.append(CudaTransfers.weights_out(self, copies))
        return reads[-1]

    def sample_freed(self: Masters, block: OffloadedBlock) -> None:
        reads.clear()  # the others have ended
        sample(self, block)

    def stream_in(self: OverHostMemory, tensors: list[torch.Tensor], copies: Any, *, after: Any) -> Any:
        arrival = CudaTransfers.stream_in(self, tensors, copies, after=after)
        fetched.update(tensor.data_ptr() for tensor in tensors)
        return arrival

    def free(self: OverHostMemory, tensors: list[torch.Tensor], *, after: list[Any]) -> None:
        now = {tensor.data_ptr() for tensor in tensors}
        if not now <= fetched:
            assert {read.done for read in reads} <= current.stream.waited_for
            assert now <= kept
            seen.append(list(reads))
        fetched.difference_update(now)
        kept.clear()
        CudaTransfers.free(self, tensors, after=after)
        fences.add(after[0])
        assert fences <= self._window.waited_for  # type: ignore[operator]

    sample = Masters.sample_freed
    monkeypatch.setattr(Masters, "sample_freed", sample_freed)
    for replacement in (weights_out, stream_in, free):
        monkeypatch.setattr(OverHostMemory, replacement.__name__, replacement, raising=False)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        kept.add(tensor.data_ptr())
        ever.add(tensor.data_ptr())

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    model = perceptron(depth=8)
    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        train(model, opt, range(3), square_loss)
        assert any(seen)
        seen.clear()
        replaced = set()
        for block in model:
            values = block[0].weight.detach().clone()
            replaced.add(block[0].weight.data_ptr())
            block[0].weight.data = values
        ever.clear()
        train(model, opt, range(3, 6), square_loss)
        assert any(seen)
        assert replaced <= ever, "fetched weights may get it next"
        ever.clear()
    assert {block[0].weight.data_ptr() for block in model} <= ever, "another optimizer's may, later"


def test_all_users_of_memory_that_is_left_to_others_are_known(
    current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fetch, and all streams that have used it, also the user's own."""
    kept: list[Stream] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream))
    model, (first, second) = perceptron(depth=8), current.streams
    with adamw(model, k=0.0, offload_weights=1.0) as opt:
        train(model, opt, range(2), square_loss)
        current.stream = second
        mean = model[0][0].weight.square().mean()
        offload = opt._engine._offload
        block = offload._blocks[0]
        assert second in block.computed and mean > 0
        current.stream = first
        kept.clear()
        first.waited_for.clear()
        offload.leave_to_others(block, [known.own for known in block.parameters[:1]])
        assert block.arrival.done in first.waited_for and set(kept) == {first, second}


def test_a_stream_that_has_used_weights_waits_for_no_other(current: Current) -> None:
    """As that of FSDP2's all-gathers, beside what the default stream computes. Who fetches waits for both."""
    transfers = OverHostMemory(torch.device("cpu"))
    used: Any = SimpleNamespace(computed={}, leaving=[], copies_out=[])
    default, current.stream = current.streams
    Offload([], transfers).note_use(used)
    assert not current.stream.waited_for and list(used.computed) == [current.stream]
    transfers.free([], after=Offload([], transfers)._users(used))
    assert not current.stream.waited_for and len(transfers._window.waited_for) == 3  # type: ignore[attr-defined]


def test_the_cpu_takes_over_what_is_back_from_its_last_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is nothing to copy, since its weights rest in host memory: its state may be unpinned then."""
    sent: list[Any] = []

    def post(self: Link, to: str, what: Any, after: Any = None) -> None:
        if isinstance(what, TakeOver):
            sent.append((what.step, after))
        before(self, to, what, after=after)

    before = Link.post
    monkeypatch.setattr(Link, "post", post)
    model = perceptron(depth=8, dtype=torch.bfloat16)
    with adamw(model, policy="random", offload_weights=1.0) as opt:
        step = itertools.count()  # how many layers move in how many depends on chance

        def have_moved() -> bool:
            return sum(step > 0 for step, _ in sent) > 10

        wait_for(have_moved, lambda: train_and_prepare(model, opt, 1, square_loss, start=next(step)))
    assert all(after is not None and after.done is not None for _, after in sent)


def test_layers_that_move_all_the_time() -> None:
    moved = []

    def run(model: nn.Module, opt: hytrain.AdamW) -> None:
        train_and_prepare(model, opt, 40, square_loss)
        moved.append(opt.statistics().moved)

    choices = ({"max_grad_norm": 1.0, "policy": "random"}, {"max_grad_norm": 1.0, "k": 0.0})
    same_bits(run, lambda: perceptron(dtype=torch.bfloat16), *choices)
    assert moved[0] > 0 == moved[1]


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_gradients_of_two_streams_are_waited_for(k: float, current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's gradients may be made on several; whoever sends or applies them is on one of those."""
    model, kept = perceptron(), set[int]()
    for index, parameter in enumerate(model.parameters()):  # hooks run in the order in which they were hung in

        def run_on(tensor: torch.Tensor, stream: Stream = current.streams[index % 2]) -> None:
            current.stream = stream
            stream.waited_for.clear()

        parameter.register_post_accumulate_grad_hook(run_on)
    sent = []

    def send(self: RoundTrip, layer: TrainedLayer, stream: Stream) -> None:
        gradients, (other,) = list(layer.filled.values()), set(current.streams) - {current.stream}
        assert layer.streams == set(current.streams), "a weight's and a bias's"
        before(self, layer, stream)
        assert other in current.stream.waited_for
        assert {id(gradient) for gradient in gradients} <= kept
        sent.append(layer.lid)

    before = RoundTrip.send
    monkeypatch.setattr(RoundTrip, "send", send)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.add(id(tensor)))
    with adamw(model, updates="backward", k=k) as opt:
        train(model, opt, range(2), square_loss)
        assert len(sent) == 2 * len(opt._session.layers)


@pytest.mark.parametrize("where", ["device", "host"])
def test_sums_of_two_streams_are_converted_each_on_its_own(
    where: Any, current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last gradient of a layer comes on another stream than some of those before it, which still compute."""
    model, of = perceptron(dtype=torch.bfloat16), dict[str, Stream]()
    for index, (name, parameter) in enumerate(model.named_parameters()):

        def run_on(tensor: torch.Tensor, stream: Stream = current.streams[index % 2]) -> None:
            current.stream = stream

        of[name] = current.streams[index % 2]
        parameter.register_post_accumulate_grad_hook(run_on)
    seen = list[bool]()

    def take(self: Accumulation, parameter: TrainedParameter, **how: Any) -> Any:
        seen.append(current.stream is of[parameter.name])
        return before(self, parameter, **how)

    before = Accumulation.take
    monkeypatch.setattr(Accumulation, "take", take)
    with adamw(model, updates="backward", grad_accumulation=2, accumulate_on=where) as opt:
        for step in range(2):
            for part in range(2):
                square_loss(model, 2 * step + part).backward()
            opt.step()
            opt.zero_grad()
    assert len(seen) == 2 * len(of) and all(seen)


def test_updates_wait_for_state_that_another_stream_has_awaited(
    current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is finished on a stream of the loop's own, in `synchronize()`, say."""
    first, second = current.streams
    came, seen = dict[int, Any](), list[bool]()

    def finish(self: Handover, step: int) -> Any:
        coming = list(self._move.coming) if self._move is not None else []
        with current.use(second):
            done = finish_before(self, step)
        came.update({layer.lid: layer.returned for layer in coming if layer.returned is not None})
        return done

    def update(self: DeviceUpdates, *updates: Any) -> Any:
        measured = update_before(self, *updates)
        for made in updates:
            if (arrival := came.pop(made.layer.lid, None)) is not None:
                seen.append(arrival.done in current.stream.waited_for)
        return measured

    finish_before, update_before = Handover.finish, DeviceUpdates._update
    monkeypatch.setattr(Handover, "finish", finish)
    monkeypatch.setattr(DeviceUpdates, "_update", update)
    model = perceptron()
    with adamw(model, policy="random") as opt:
        train_and_prepare(model, opt, 40, square_loss)
    assert current.stream is first and seen and all(seen)


def test_computing_waits_for_weights_that_another_stream_has_awaited(
    current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded weights come to stay. Under FSDP2, the stream that reduces gradients finishes the plan."""
    first, second = current.streams
    came, seen = dict[OffloadedBlock, Any](), list[bool]()

    def finish(self: Handover, step: int) -> Any:
        coming = [layer.block for layer in self._move.coming if layer.block is not None] if self._move else []
        with current.use(second):
            done = finish_before(self, step)
        came.update({block: block.arrival for block in coming if block.arrival is not None})
        return done

    def enter(self: Offload, block: OffloadedBlock, inside_backward: bool) -> None:
        enter_before(self, block, inside_backward)
        if (arrival := came.pop(block, None)) is not None:
            seen.append(arrival.done in current.stream.waited_for)

    finish_before, enter_before = Handover.finish, Offload.enter
    monkeypatch.setattr(Handover, "finish", finish)
    monkeypatch.setattr(Offload, "enter", enter)
    model = perceptron()
    with adamw(model, policy="random", offload_weights="auto") as opt:
        train_and_prepare(model, opt, 60, square_loss)
    assert current.stream is first and seen and all(seen)


def test_each_stream_that_uses_a_layer_waits_for_its_weights(current: Current) -> None:
    """A module called twice in a forward, on two streams that do not wait for each other."""
    model = perceptron()
    first, second = current.streams
    with adamw(model, k=0.0) as opt:
        layer = next(layer for layer in opt._session.layers if layer.name.startswith("0"))
        for number in range(3):
            x = torch.randn(8, model[0][0].in_features)
            current.stream = first
            y = model[0](x)
            current.stream = second
            y = y + model[0](x)
            if number:
                assert layer.landing.done in first.waited_for & second.waited_for
            model[1:](y).square().mean().backward()
            opt.step()
            opt.zero_grad()


def shared(cpu_parts: int) -> tuple[dict[str, torch.Tensor], int | None]:
    """State and weights after steps of which the CPU trains some parts, and its process at the end."""
    model = perceptron()
    with adamw(model, k=0.0) as opt:
        cotraining = cotrain(opt, model, perceptron, partial(share_of_loss, parts=4), parts=4, cpu_parts=cpu_parts)
        for step in range(3):
            cotraining.backward(micro_batches(step, 4))
            opt.step()
            opt.zero_grad()
        return {**state(opt), **weights(model)}, cotraining.pid


def test_the_cpu_trainers_gradients_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot is pinned as long as it is used, and the bits are those of a step without a CPU trainer."""
    pinned, fetched, fetch = dict[int, int](), list[int](), OverHostMemory.fetch

    def pin(self: OverHostMemory, start: int, nbytes: int, *, gently: bool = False) -> None:
        pinned[start] = nbytes

    def unpin(self: OverHostMemory, start: int, nbytes: int) -> None:
        assert pinned.pop(start) == nbytes

    def fetched_from(self: OverHostMemory, copies: list[Copy], **options: Any) -> Transfer:
        for _, source in copies:
            fetched.append(address(source))
            assert any(start <= fetched[-1] < start + nbytes for start, nbytes in pinned.items())
        return fetch(self, copies, **options)

    for name, stub in {"pin": pin, "unpin": unpin, "fetch": fetched_from}.items():
        monkeypatch.setattr(OverHostMemory, name, stub)
    monkeypatch.setattr("hytrain.memory.transfer.TURN_BYTES", 5000)  # a weight and its bias at a time
    expected, _ = shared(0)
    assert fetched == []
    assert differing(shared(3)[0], expected) == []
    assert len(fetched) == 3 * 3 * 8, "each gradient of each part"
    assert pinned == {}


def test_activations_and_who_uses_their_memory_next(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits on the host: streams wait for the copies, before memory is freed or read, and before they begin."""
    freed, read = list[bool](), list[bool]()
    first, second = current.streams
    monkeypatch.setattr(activations, "MIN_BYTES", 512)
    monkeypatch.setattr(activations, "WINDOW_BYTES", 0)
    monkeypatch.setattr(Event, "query", lambda event: False)  # the device is late

    def leave(self: OverHostMemory, copies: Any) -> Any:
        departure = CudaTransfers.activations_out(self, copies)
        done = departure.done  # the departure itself keeps what it reads
        assert {current.stream, self._restoring} <= self._saving.waited_for

        def check() -> None:
            freed.append(done in first.waited_for & second.waited_for)

        for _, source in copies:
            weakref.finalize(source.untyped_storage(), check).atexit = False
        return departure

    def come(self: OverHostMemory, copies: Any, fence: Any, *, after: Any) -> Any:
        assert fence.at_s is not None
        arrival = CudaTransfers.activations_in(self, copies, fence, after=after)
        assert {fence, after.done} <= self._restoring.waited_for
        return arrival

    def restore(self: Activations, saved: Saved) -> torch.Tensor:
        found = before(self, saved)
        if saved.activation.came is not None:
            read.append(saved.activation.came.done in current.stream.waited_for)
        return found

    before = Activations.restore
    monkeypatch.setattr(Activations, "restore", restore)
    for name, replacement in (("activations_out", leave), ("activations_in", come)):
        monkeypatch.setattr(OverHostMemory, name, replacement, raising=False)
    model = perceptron(depth=8)
    for index, block in enumerate(model):  # every other block computes on a stream of its own

        def run_on(module: nn.Module, args: Any, stream: Stream = current.streams[index % 2]) -> None:
            current.stream = stream

        block.register_forward_pre_hook(run_on)

    with adamw(model, k=0.5, offload_activations=True) as opt:
        for step in range(3):
            loss = square_loss(model, step)
            assert len(freed) >= 6 * (step + 1) and all(freed), "both had used it"
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert read and all(read)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"visit": 0.4, "k": 0.4}], ids=str)
def test_state_leaves_at_once_is_parked_and_comes_back(options: dict[str, Any]) -> None:
    found = []
    for gives_way in (False, True):
        model = perceptron(dtype=torch.bfloat16)
        with adamw(model, **{"k": 1.0, **options}) as opt:
            for step in range(8):
                train(model, opt, [step], square_loss)
                if gives_way:
                    opt._engine.evictions.evict(1, "a test")
                    with opt.parked(weights=step % 2 == 1):
                        pass
            found.append(state(opt) | weights(model))
    assert differing(*found) == []


class Driver:
    """CUDA's, which pins at most so many bytes. It keeps an error until a kernel is launched."""

    def __init__(self, most: int) -> None:
        self.most, self.error, self.refusals = most, 0, 0
        self.pinned = dict[int, int]()

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if sum(self.pinned.values()) + nbytes > self.most:
            self.error, self.refusals = 2, self.refusals + 1
            return self.error
        self.pinned[start] = nbytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return 0

    def launch(self) -> None:
        self.error = 0


@pytest.mark.parametrize("most", [0, 3_000])
@pytest.mark.parametrize(
    "options",
    [
        {"k": 0.0},
        {"k": 0.0, "visit": 1.0},
        {"k": "auto", "policy": "random", "offload_weights": "auto"},
        {"k": 0.5, "offload_activations": True},
    ],
    ids=str,
)
def test_memory_that_the_driver_does_not_pin(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, with the same bits, and the log says it once."""
    driver = Driver(most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(activations, "MIN_BYTES", 512)
    for name, method in {
        "pin": CudaTransfers.pin,
        "unpin": CudaTransfers.unpin,
        "_forget_error": driver.launch,
    }.items():
        monkeypatch.setattr(OverHostMemory, name, method)
    found = []
    for pins in (True, False):
        driver.most = 1 << 40 if pins else most
        model = perceptron(dtype=torch.bfloat16)
        with adamw(model, **options) as opt:
            train_and_prepare(model, opt, 12, square_loss)
            found.append(state(opt) | weights(model))
        assert bool(driver.refusals) is not pins and not driver.error and not driver.pinned
    assert differing(*found) == []
    assert len([record for record in caplog.records if "CUDA pins no more than" in record.getMessage()]) == 1
