"""What the optimizer works on next: in forward order, tile by tile, and every message that cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import GradReady, Layer, Segment, StepBegin, Verdict, WeightsReady
from protocol.rules import AdamWHyper
from workers.optimize.update_queue import QueueError, Tile, UpdateQueue


def hyper(lr: float = 1e-3) -> AdamWHyper:
    return AdamWHyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)


def make(*layers: list[int], tile_numel: int = 100, groups: tuple[int, ...] = (0,), made: int = 0) -> UpdateQueue:
    """A queue that owns all its layers, given by the sizes of their segments, after so many updates."""
    specs = tuple(
        Layer(
            lid=lid,
            position=lid,
            name=f"layer {lid}",
            segments=tuple(
                Segment(name="s", numel=numel, dtype="float32", grads_dtype="float32", group=groups[i % len(groups)])
                for i, numel in enumerate(sizes)
            ),
        )
        for lid, sizes in enumerate(layers)
    )
    queue = UpdateQueue(specs, tile_numel=tile_numel)
    for lid in range(len(layers)):
        queue.take_over(lid, (0,) * len(queue.layers[lid].segments))
        queue.counted(lid, (made,) * len(queue.layers[lid].segments))
    return queue


def begin_message(step: int, *lrs: float, awaits_verdict: bool = False) -> StepBegin:
    return StepBegin(step=step, groups=tuple(hyper(lr) for lr in lrs or (1e-3,)), awaits_verdict=awaits_verdict)


def begin(queue: UpdateQueue, step: int, *lrs: float) -> None:
    queue.begin(begin_message(step, *lrs))
    queue.check()


def ready(queue: UpdateQueue, lid: int, step: int, *counts: int) -> None:
    queue.grad_ready(GradReady(step=step, lid=lid, counts=counts or (step + 1,)))
    queue.check()


def work(queue: UpdateQueue) -> tuple[Tile, WeightsReady | None]:
    tile = queue.next_tile()
    assert tile is not None
    done = queue.tile_done(tile)
    queue.check()
    return tile, done


def owing() -> UpdateQueue:
    """Layer 0 done in step 3, layer 1 begun in it, layer 2 not owned."""
    queue = make([100], [200], [100], made=3)
    queue.give_up(2)
    begin(queue, 3)
    ready(queue, 0, 3)
    ready(queue, 1, 3)
    work(queue)
    work(queue)
    return queue


def gradient(lid: int, step: int, *counts: int) -> Callable[[UpdateQueue], None]:
    return lambda queue: queue.grad_ready(GradReady(step=step, lid=lid, counts=counts or (step + 1,)))


def back(queue: UpdateQueue) -> None:
    """Layer 2 is owned again. Nothing was said of its counts yet."""
    queue.take_over(2, (0,))
    begin(queue, 4)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (gradient(2, 3), "layer 2, which the optimizer does not own"),
        (gradient(0, 4), "of step 4 in step 3"),
        (gradient(0, 3), "a second GradReady of layer 0 in step 3"),
        (gradient(1, 3), "a second GradReady of layer 1 in step 3"),
        (lambda queue: (begin(queue, 4), gradient(1, 4)(queue)), "a second GradReady of layer 1 in step 4"),
        (lambda queue: (begin(queue, 4), gradient(0, 4, 1, 1)(queue)), "counts 2 of 1 segments"),
        (lambda queue: (begin(queue, 4), gradient(0, 4, 4)(queue)), r"counts updates \(4,\) after \(4,\)"),
        (lambda queue: (begin(queue, 4), gradient(0, 4, 5 ^ 64)(queue)), r"counts updates \(69,\) after \(4,\)"),
        (lambda queue: queue.counted(1, (3,)), "layer 1, which is being updated"),
        (lambda queue: queue.counted(2, (3,)), "layer 2, which is not owned"),
        (lambda queue: queue.counted(0, (3, 3)), "layer 0 with 2 counts"),
        (
            lambda queue: (queue.begin(StepBegin(step=4, groups=(), awaits_verdict=False)), gradient(0, 4)(queue)),
            "parameter group",
        ),
        (lambda queue: begin(queue, 3), r"StepBegin\(3\) after step 3"),
        (lambda queue: queue.take_over(0, (0,)), "layer 0, which is already owned"),
        (lambda queue: queue.take_over(-1, (0,)), "layer -1, which is unknown"),
        (lambda queue: queue.take_over(2, (0, 0)), "layer 2 with 2 banks"),
        (lambda queue: queue.give_up(1), "layer 1, which is being updated"),
        (lambda queue: queue.give_up(2), "layer 2, which is not owned"),
        (lambda queue: queue.learn_positions((0, 1)), "2 positions for 3 layers"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(event: Callable[[UpdateQueue], object], reason: str) -> None:
    queue = owing()
    with pytest.raises(QueueError, match=reason):
        event(queue)
    queue.check()
    assert queue.banks.keys() == {0, 1} and not queue.idle
    tile, _ = work(queue)
    assert (tile.lid, tile.start, tile.stop, queue.idle) == (1, 100, 200, True)


def test_a_layer_that_comes_back_or_was_loaded_is_counted_anew() -> None:
    queue = owing()
    back(queue)
    with pytest.raises(QueueError, match=r"counts updates \(5,\) after None"):
        gradient(2, 4)(queue)
    queue.counted(2, (4,))
    queue.counted(0, (9,))
    ready(queue, 2, 4)
    with pytest.raises(QueueError, match=r"counts updates \(5,\) after \(9,\)"):
        gradient(0, 4)(queue)
    ready(queue, 0, 4, 10)


@given(seed=st.integers(0, 2**32), tile_numel=st.integers(1, 300))
def test_tiles_come_in_forward_order(seed: int, tile_numel: int) -> None:
    """As it is known: it may be learned in the middle of a layer."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 300) for _ in range(4)]
    queue = make(*([size] for size in sizes), tile_numel=tile_numel)
    begin(queue, 0)
    waiting, owed = rng.sample(range(4), 4), dict[int, int]()
    while waiting or owed:
        if waiting and (not owed or rng.random() < 0.3):
            lid = waiting.pop()
            ready(queue, lid, 0)
            owed[lid] = sizes[lid]
            continue
        tile, done = work(queue)
        assert queue.positions[tile.lid] == min(queue.positions[lid] for lid in owed)
        assert 0 < tile.stop - tile.start <= tile_numel
        owed[tile.lid] -= tile.stop - tile.start
        assert done == (None if owed[tile.lid] else WeightsReady(step=0, lid=tile.lid, banks=(0,)))
        if done is not None:
            del owed[tile.lid]
        if rng.random() < 0.1:
            queue.learn_positions(tuple(rng.sample(range(4), 4)))
    assert queue.idle


def judged(queue: UpdateQueue, step: int, scale: float = 1.0, *, skipped: bool = False) -> list[WeightsReady]:
    done = queue.verdict(Verdict(step=step, scale=scale, skipped=skipped))
    queue.check()
    return done


@pytest.mark.parametrize("awaits", [True, False])
def test_a_verdict_comes_once_and_where_it_is_awaited(awaits: bool) -> None:
    queue = make([16], made=2)
    queue.begin(begin_message(2, awaits_verdict=awaits))
    if awaits:
        ready(queue, 0, 2)
        with pytest.raises(QueueError, match="without a verdict on step 2"):
            begin(queue, 3)
        with pytest.raises(QueueError, match="Verdict on step 1 in step 2"):
            judged(queue, 1)
        judged(queue, 2)
    with pytest.raises(QueueError, match="which awaits none"):
        judged(queue, 2)


def speculating(*layers: list[int], tile_numel: int = 16) -> UpdateQueue:
    queue = make(*layers, tile_numel=tile_numel)
    queue.speculate = True
    queue.begin(begin_message(0, awaits_verdict=True))
    return queue


def test_what_is_done_when_the_verdict_is_one_holds_in_the_other_bank() -> None:
    """Lowest position first; what is half done goes on; segments without a gradient stay where they are."""
    queue = speculating([16, 16], [16], [32])
    for lid, counts in ((1, (1,)), (0, (0, 1)), (2, (1,))):
        ready(queue, lid, 0, *counts)
    tiles = [work(queue) for _ in range(3)]
    assert [tile.lid for tile, _ in tiles] == [0, 1, 2]
    assert all((tile.source, tile.target, tile.begins) == (0, 1, True) for tile, _ in tiles)
    assert all(done is None for _, done in tiles), "nobody hears of it before the verdict"
    assert judged(queue, 0) == [WeightsReady(step=0, lid=0, banks=(0, 1)), WeightsReady(step=0, lid=1, banks=(1,))]
    tile, done = work(queue)
    assert (tile.start, tile.target, tile.begins) == (16, 1, False) and done is not None and done.banks == (1,)
    queue.begin(begin_message(1, awaits_verdict=True))
    ready(queue, 1, 1)
    assert (work(queue)[0].source, queue.idle) == (1, True)
    judged(queue, 1)
    queue.give_up(1)
    queue.take_over(1, (0,))
    assert queue.banks[1] == (0,), "a layer that comes back begins with the banks that it is said to have"


@given(seed=st.integers(0, 2**32), tile_numel=st.integers(1, 60))
def test_any_order_and_mode_gives_clip_then_step(seed: int, tile_numel: int) -> None:
    """Two banks of numbers, each update a function of what it reads: what is announced is what clipping first gives.

    With the hyperparameters of the update's own step, each segment its group's.
    """
    rng = random.Random(seed)
    sizes = [[rng.randint(1, 60) for _ in range(rng.randint(1, 3))] for _ in range(4)]
    queue = make(*sizes, tile_numel=tile_numel, groups=(0, 1))
    banks = [[[[0] * size for size in row] for row in sizes] for _ in range(2)]
    expected, busy = [[0] * len(row) for row in sizes], set[int]()
    made, due = (
        [[0] * len(row) for row in sizes],
        dict[int, tuple[int, ...]](),
    )  # updates; the counts of those under way

    def hear(done: WeightsReady | None) -> None:
        if done is not None:
            busy.remove(done.lid)
            for index, bank in enumerate(done.banks):
                assert set(banks[bank][done.lid][index]) == {expected[done.lid][index]}

    def go_on() -> None:
        tile = queue.next_tile()
        if tile is not None:
            read, written = (banks[bank][tile.lid][tile.segment] for bank in (tile.source, tile.target))
            assert tile.count == due[tile.lid][tile.segment]
            told = tile.hyper.lr, tile.scale
            written[tile.start : tile.stop] = [hash((x, *told)) for x in read[tile.start : tile.stop]]
            hear(queue.tile_done(tile))
            queue.check()

    for step in range(6):
        queue.learn_positions(tuple(rng.sample(range(4), 4)))
        queue.speculate = rng.random() < 0.7
        awaits, skipped = rng.random() < 0.8, rng.random() < 0.2
        scale = rng.choice((1.0, 0.5)) if awaits else 1.0
        queue.begin(begin_message(step, step + 0.25, step + 0.5, awaits_verdict=awaits))
        coming = [lid for lid in range(4) if lid not in busy and rng.random() < 0.9]
        rng.shuffle(coming)
        late = rng.randint(0, len(coming)) if awaits else 0  # GradReady behind the verdict
        while coming or awaits:
            if rng.random() < 0.6:
                go_on()
            elif awaits and len(coming) <= late:
                awaits = False
                for done in queue.verdict(Verdict(step=step, scale=scale, skipped=skipped)):
                    hear(done)
            elif coming:
                lid = coming.pop()
                counts = tuple(rng.choice((0, done + 1)) for done in made[lid])
                if any(counts):
                    busy.add(lid)
                    due[lid] = counts
                    if not (skipped and queue._awaits_verdict):
                        for index, count in enumerate(counts):
                            old = expected[lid][index]
                            lr = step + (0.5 if index % 2 else 0.25)
                            expected[lid][index] = hash((old, lr, scale)) if count else old
                            made[lid][index] = count or made[lid][index]
                    hear(queue.grad_ready(GradReady(step=step, lid=lid, counts=counts)))
            queue.check()
    while not queue.idle:
        go_on()
    assert not busy
