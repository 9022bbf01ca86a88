"""Who has joined, who is ready, and who is refused; who answers, and of whom nothing is heard any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.address import Address
from protocol.messages import Hello, Pong
from workers.coordinate.members import BEAT_S, SILENT_S, HandshakeError, Members

TRAINER, OPTIMIZER, OTHER = Address("trainer", 0), Address("optimizer", 0), Address("optimizer", 1)
BOTH = (TRAINER, OPTIMIZER)
BEATS = int(SILENT_S / BEAT_S)  # without an answer, until a process is called silent
LIMIT = 2 * BEATS


def hello(pid: int = 10) -> Hello:
    return Hello(pid=pid, inbox="optimizer-0")


def test_a_worker_joins() -> None:
    run = Members(ranks=2, limit_s=60.0)
    run.join(OPTIMIZER, hello())
    assert [*run.joined] == [OPTIMIZER] and not run.is_ready(OPTIMIZER)
    assert run.is_joined(OPTIMIZER, "optimizer-0") and not run.is_joined(OPTIMIZER, "optimizer-1")
    assert run.detail(OPTIMIZER) == run.detail(OTHER) == "starting"
    run.ready(OPTIMIZER, "8 threads")
    assert run.is_ready(OPTIMIZER) and run.detail(OPTIMIZER) == "8 threads"


@given(st.lists(st.tuples(st.sampled_from(["hello", "ready", "leave"]), st.sampled_from([OPTIMIZER, OTHER]))))
def test_who_is_ready_has_joined(events: list[tuple[str, Address]]) -> None:
    run, joined, ready = Members(ranks=2, limit_s=60.0), set[Address](), set[Address]()
    for event, who in events:
        try:
            if event == "hello":
                run.join(who, hello())
                assert who not in joined
                joined.add(who)
            elif event == "ready":
                run.ready(who, "ready")
                assert who in joined and who not in ready
                ready.add(who)
            else:
                run.leave(who)
                joined.discard(who)
                ready.discard(who)
        except HandshakeError:
            assert event == "hello" and who in joined or event == "ready" and (who not in joined or who in ready)
        assert set(run.joined) == joined
        assert {who for who in (OPTIMIZER, OTHER) if run.is_ready(who)} == ready


def both(limit_s: float) -> Members:
    """Of one rank, ready."""
    members = Members(ranks=1, limit_s=limit_s)
    for address in BOTH:
        members.join(address, hello())
        members.ready(address, "")
    return members


def beats(hearts: Members, count: int, *answering: Address, waits_for: str = "") -> tuple[list[str], list[Address]]:
    """So many beats in which only these answer; all the news, and who has hung at the last."""
    told, hung = list[str](), list[Address]()
    for _ in range(count):
        for address in answering:
            hearts.answered(address, Pong(waits_for=waits_for))
        news, hung = hearts.beat(BOTH)
        told += news
    return told, hung


def test_silence_and_its_end_are_told_once() -> None:
    hearts = both(LIMIT * BEAT_S)
    assert beats(hearts, 10, *BOTH) == ([], [])
    assert beats(hearts, BEATS - 1, TRAINER) == ([], []) and hearts.joined[OPTIMIZER].silent_s == 0
    told, hung = beats(hearts, 3, TRAINER, waits_for="the update of layer h.1")
    assert told == ["optimizer-0 has not answered for 4 s; trainer-0 waits for the update of layer h.1"]
    assert (
        hung == []
        and hearts.joined[OPTIMIZER].silent_s == SILENT_S + 2 * BEAT_S
        and hearts.joined[TRAINER].silent_s == 0
    )
    assert beats(hearts, 2, *BOTH) == (["optimizer-0 answers again, after 6 s"], [])


def test_who_is_silent_for_the_limit_has_hung() -> None:
    hearts = both(LIMIT * BEAT_S)
    beats(hearts, 1, *BOTH)
    assert beats(hearts, LIMIT - 1, TRAINER)[1] == []
    assert beats(hearts, 1, TRAINER)[1] == [OPTIMIZER]


def test_a_new_trainer_is_asked_anew() -> None:
    hearts = both(0)
    assert beats(hearts, BEATS + 1)[1] == [*BOTH]
    assert hearts.beat(()) == ([], []) and beats(hearts, BEATS) == ([], [])
