"""Who answers: silence is told once, with who waits; a limit ends it; and beats are counted, not seconds."""

from __future__ import annotations

from protocol.address import Address
from protocol.messages import Pong
from workers.coordinate.heartbeats import BEAT_S, SILENT_S, Heartbeats

TRAINER, OPTIMIZER = Address("trainer", 0), Address("optimizer", 0)
BOTH = (TRAINER, OPTIMIZER)
BEATS = int(SILENT_S / BEAT_S)  # without an answer, until a process is called silent
LIMIT = 2 * BEATS


def beats(hearts: Heartbeats, count: int, *answering: Address, waits_for: str = "") -> tuple[list[str], list[Address]]:
    """So many beats in which only these answer; all the news, and who has hung at the last."""
    told, hung = list[str](), list[Address]()
    for _ in range(count):
        for address in answering:
            hearts.answered(address, Pong(waits_for=waits_for))
        news, hung = hearts.beat(BOTH)
        told += news
    return told, hung


def test_silence_and_its_end_are_told_once() -> None:
    hearts = Heartbeats(limit_s=LIMIT * BEAT_S)
    assert beats(hearts, 10, *BOTH) == ([], [])
    assert beats(hearts, BEATS - 1, TRAINER) == ([], []) and hearts.silent_s(OPTIMIZER) == 0
    told, hung = beats(hearts, 3, TRAINER, waits_for="the update of layer h.1")
    assert told == ["optimizer-0 has not answered for 4 s; trainer-0 waits for the update of layer h.1"]
    assert hung == [] and hearts.silent_s(OPTIMIZER) == SILENT_S + 2 * BEAT_S and hearts.silent_s(TRAINER) == 0
    assert beats(hearts, 2, *BOTH) == (["optimizer-0 answers again, after 6 s"], [])


def test_who_is_silent_for_the_limit_has_hung() -> None:
    hearts = Heartbeats(limit_s=LIMIT * BEAT_S)
    beats(hearts, 1, *BOTH)
    assert beats(hearts, LIMIT - 1, TRAINER)[1] == []
    assert beats(hearts, 1, TRAINER)[1] == [OPTIMIZER]


def test_a_new_trainer_is_asked_anew() -> None:
    hearts = Heartbeats(limit_s=0)
    assert beats(hearts, BEATS + 1)[1] == [*BOTH]
    assert hearts.beat(()) == ([], []) and beats(hearts, BEATS) == ([], [])
