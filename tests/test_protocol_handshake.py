"""Hello, Welcome, Ready: each step in its place, and each step out of place refused with the story."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.address import Address
from protocol.handshake import HandshakeError, Phase, RunHandshake, WorkerHandshake
from protocol.messages import Hello, Ready, Welcome

WELCOME = Welcome(run_name="run", coordinator_pid=1)
STEPS: dict[str, Callable[[WorkerHandshake], object]] = {
    "hello": lambda worker: worker.hello(),
    "welcome": lambda worker: worker.on_welcome(WELCOME),
    "ready": lambda worker: worker.ready("built"),
}
ORDER = list(STEPS)


OPTIMIZER, OTHER = Address("optimizer", 0), Address("optimizer", 1)


def hello(pid: int = 10) -> Hello:
    return Hello(pid=pid, inbox="optimizer-0")


def test_a_worker_joins() -> None:
    worker = WorkerHandshake(OPTIMIZER, pid=10, inbox="optimizer-0")
    run = RunHandshake(run_name="run", pid=1, ranks=2)
    worker.on_welcome(run.on_hello(OPTIMIZER, worker.hello()))
    assert worker.phase is Phase.WELCOMED and run.joined == {OPTIMIZER: hello()}
    assert run.detail(OPTIMIZER) == "starting"
    run.on_ready(OPTIMIZER, worker.ready("8 threads"))
    assert worker.phase is Phase.READY
    assert run.detail(OPTIMIZER) == "8 threads"
    run.check()


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("step", ORDER)
def test_each_step_of_a_worker_has_one_place(done: int, step: str) -> None:
    worker = WorkerHandshake(Address("trainer", 0), pid=10, inbox="trainer-0-1f")
    for earlier in ORDER[:done]:
        STEPS[earlier](worker)
    phase = worker.phase
    if done == ORDER.index(step):
        STEPS[step](worker)
        assert worker.phase is not phase
    else:
        with pytest.raises(HandshakeError, match=f"trainer-0: .* while {phase.name}, needs"):
            STEPS[step](worker)
        assert worker.phase is phase


@given(st.lists(st.tuples(st.sampled_from(["hello", "ready", "leave"]), st.sampled_from([OPTIMIZER, OTHER]))))
def test_who_is_ready_has_joined(events: list[tuple[str, Address]]) -> None:
    run, joined, ready = RunHandshake(run_name="run", pid=1, ranks=2), set[Address](), set[Address]()
    for event, who in events:
        try:
            if event == "hello":
                run.on_hello(who, hello())
                assert who not in joined
                joined.add(who)
            elif event == "ready":
                run.on_ready(who, Ready(detail="ready"))
                assert who in joined and who not in ready
                ready.add(who)
            else:
                run.leave(who)
                joined.discard(who)
                ready.discard(who)
        except HandshakeError:
            assert event == "hello" and who in joined or event == "ready" and (who not in joined or who in ready)
        run.check()
        assert set(run.joined) == joined
        assert {who for who in (OPTIMIZER, OTHER) if run.detail(who) == "ready"} == ready
