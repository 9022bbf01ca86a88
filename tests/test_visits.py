"""Gradients that wait for their visit, while the device is late: how many may, and when their memory is let go."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hytrain.kernels.scalars import scalars
from hytrain.memory import visits
from hytrain.memory.transfer import HostTransfers, Transfer
from hytrain.memory.visits import Visit, Visits, ring_bytes
from protocol.handles import STATE_PLANES, plane_dtype
from protocol.messages import Segment
from protocol.rules import AdamWHyper
from protocol.visiting import Turn, put_off

NUMEL = 64
BYTES = 4 * NUMEL
SEGMENT = Segment(name="w", numel=NUMEL, dtype="float32", grads_dtype="float32", group=0)
SCALARS = scalars(AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0), 1)


class Late(HostTransfers):
    """A device that has updated nothing until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Any] = []
        self.landed: list[Any] = []

    def so_far(self) -> Transfer:
        self.updates.append(Mock(query=Mock(return_value=False)))
        return Transfer(self.updates[-1], (0.0, 0.0))

    def land(self, transfer: Transfer, stream: Any = None) -> None:
        if transfer.done is not None:
            self.landed.append(transfer.done)


def visit(made: Visits, *, awaited: bool = False) -> None:
    """A layer of one segment is updated."""
    planes = [torch.zeros(NUMEL) if plane_dtype(plane, SEGMENT) else None for plane in STATE_PLANES]
    one = Visit(SEGMENT, torch.zeros(NUMEL), torch.ones(NUMEL), planes, SCALARS)
    made.update([one], after=None, host=Mock(), verdict=None, awaited=awaited)


def test_as_many_gradients_wait_as_may() -> None:
    transfers = Late()
    made = Visits(transfers, torch.device("cpu"), [SEGMENT], hold_bytes=2 * BYTES)
    for _ in range(2):
        visit(made)
    assert not made.is_full and made.waiting_bytes == 2 * BYTES
    for _ in range(2):
        visit(made)
    assert made.is_full
    made.make_room()
    assert transfers.landed == transfers.updates[:2] and not made.is_full, "the oldest are waited for, in their order"
    assert made.waiting_bytes == 2 * BYTES


def test_one_layers_gradients_may_always_wait() -> None:
    made = Visits(Late(), torch.device("cpu"), [SEGMENT], hold_bytes=0)
    visit(made)
    assert not made.is_full
    visit(made)
    made.make_room()
    assert made.waiting_bytes == BYTES


def test_what_is_updated_is_let_go_without_a_wait() -> None:
    transfers = Late()
    made = Visits(transfers, torch.device("cpu"), [SEGMENT], hold_bytes=1 << 30)
    for _ in range(3):
        visit(made)
    transfers.updates[0].query.return_value = True
    visit(made)
    assert made.waiting_bytes == 3 * BYTES
    transfers.updates[1].query.return_value = True
    made.let_go()
    assert made.waiting_bytes == 2 * BYTES and transfers.landed == []
    assert (made.end_step(), made.end_step()) == (3 * BYTES, 2 * BYTES), "the most at once in a step"


def test_two_threads_let_go_only_what_is_updated() -> None:
    """One sees that the first one is; torch gives the turn to the other one there, which waits, or sees it, too."""
    transfers = Late()
    made = Visits(transfers, torch.device("cpu"), [SEGMENT], hold_bytes=1 << 30)
    for _ in range(2):
        visit(made)
    came, both, lock = set[int](), threading.Event(), made._lock

    def come() -> None:
        came.add(threading.get_ident())
        if len(came) == 2:
            both.set()

    def query() -> bool:
        come()
        assert both.wait(60)
        return True

    class Watched:
        def __enter__(self) -> None:
            come()
            lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

    made._lock = Watched()  # type: ignore[assignment]

    transfers.updates[0].query.side_effect = query
    threads = [threading.Thread(target=made.let_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.waiting_bytes == BYTES


def test_gradients_that_are_put_off_take_half_of_what_may_wait() -> None:
    made = Visits(Late(), torch.device("cpu"), [SEGMENT], hold_bytes=4 * BYTES)
    assert [made.puts_off(BYTES) for _ in range(3)] == [True, True, False]
    for _ in range(2):
        visit(made)
    assert made.waiting_bytes == 4 * BYTES and not made.is_full
    visit(made)
    assert made.is_full, "those that are put off count"
    made.make_room()
    assert made.waiting_bytes == 4 * BYTES
    made.begin_put_off()
    for _ in range(2):
        visit(made)
    assert made.waiting_bytes == 4 * BYTES, "they wait like others now"
    assert (made.end_step(), made.end_step()) == (5 * BYTES, 4 * BYTES)
    assert made.puts_off(BYTES)


def test_offloaded_weights_that_are_put_off_take_of_the_same_memory() -> None:
    made = Visits(Late(), torch.device("cpu"), [SEGMENT], hold_bytes=4 * BYTES)
    assert [made.puts_off(BYTES // 2, BYTES) for _ in range(2)] == [True, False]
    made.begin_put_off()
    for _ in range(3):
        visit(made)
    assert made.waiting_bytes == 3 * BYTES and not made.is_full
    assert made.puts_off(BYTES // 2) and made.is_full, "the weights stay"
    assert made.end_step() == 3.5 * BYTES and not made.puts_off(2 * BYTES), "but are not where steps need most memory"


def test_offloaded_weights_borrow_from_gradients_that_wait() -> None:
    made = Visits(Late(), torch.device("cpu"), [SEGMENT], hold_bytes=4 * BYTES)
    made.lent_bytes = 2 * BYTES
    assert [made.puts_off(BYTES) for _ in range(2)] == [True, False]
    visit(made)
    assert not made.is_full and made.end_step() == 4 * BYTES
    for _ in range(2):
        visit(made)
    assert made.is_full


some_turns = st.builds(
    Turn,
    lid=st.just(0),
    forward_s=st.integers(0, 9),
    backward_s=st.integers(1, 9),
    visit_s=st.integers(0, 30),
)


@given(st.lists(some_turns, min_size=1, max_size=12))
@example([Turn(0, 0.0, 1.0, 5.0), Turn(0, 1.0, 1.0, 5.0), Turn(0, 1.0, 1.0, 30.0)])
def test_no_choice_of_visits_makes_forward_wait_longer(turns: list[Turn]) -> None:
    """Than to put nothing off, by a simulation that knows only when visits may begin."""
    turns = [turn._replace(lid=lid) for lid, turn in enumerate(turns)]
    later = put_off(turns)
    assert later <= {turn.lid for turn in turns if turn.visit_s}

    def stall_s(later: frozenset[int]) -> float:
        over_s = now = sum(turn.backward_s for turn in turns)
        ready_s = {turn.lid: sum(other.backward_s for other in turns[turn.lid :]) for turn in turns}
        ready_s |= dict.fromkeys(later, over_s)
        free_s, ends_s = 0.0, dict.fromkeys(range(len(turns)), 0.0)
        for turn in sorted(turns, key=lambda one: (one.lid in later, one.lid if one.lid in later else -one.lid)):
            if turn.visit_s:
                free_s = ends_s[turn.lid] = max(free_s, ready_s[turn.lid]) + turn.visit_s
        for turn in turns:
            now = max(now, ends_s[turn.lid]) + turn.forward_s
        return now - over_s - sum(turn.forward_s for turn in turns)

    assert stall_s(later) <= stall_s(frozenset()) + 1e-9
    assert stall_s(later) < stall_s(frozenset()) or not later


def test_what_awaited_a_verdict_does_not_wait_again() -> None:
    """All of it has waited: nothing else would be let go for it."""
    made = Visits(Late(), torch.device("cpu"), [SEGMENT], hold_bytes=0)
    for _ in range(2):
        visit(made, awaited=True)
    assert not made.is_full and made.waiting_bytes == 0


def test_the_rings_size_is_known_before_it_is_made() -> None:
    bf16 = Segment(name="w", numel=1000, dtype="bfloat16", grads_dtype="bfloat16", group=0)
    made = Visits(HostTransfers(), torch.device("cpu"), [SEGMENT, bf16], hold_bytes=0)
    made.prepare()
    slots = [plane.nbytes for slot in made._slots for plane in slot._planes if plane.nbytes]
    assert sum(slots) == ring_bytes([SEGMENT, bf16]) and len(slots) == 3 * visits.SLOTS
    smaller = replace(bf16, state_dtype="bfloat16")
    assert ring_bytes([smaller]) == visits.SLOTS * 1024 * (2 + 2 + 2)
    for rule, width in (("lion", 2 + 4), ("sgd", 2)):
        assert ring_bytes([replace(bf16, rule=rule)]) == visits.SLOTS * 1024 * width
