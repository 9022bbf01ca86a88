"""Hello, Welcome, Ready: who has joined, who is ready, and who is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.address import Address
from protocol.messages import Hello, Ready, Welcome
from workers.coordinate.handshake import HandshakeError, RunHandshake

OPTIMIZER, OTHER = Address("optimizer", 0), Address("optimizer", 1)


def hello(pid: int = 10) -> Hello:
    return Hello(pid=pid, inbox="optimizer-0")


def test_a_worker_joins() -> None:
    run = RunHandshake(run_name="run", pid=1, ranks=2)
    assert run.on_hello(OPTIMIZER, hello()) == Welcome(run_name="run", coordinator_pid=1)
    assert run.joined == {OPTIMIZER: hello()} and not run.is_ready(OPTIMIZER)
    assert run.detail(OPTIMIZER) == "starting"
    run.on_ready(OPTIMIZER, Ready(detail="8 threads"))
    assert run.is_ready(OPTIMIZER) and run.detail(OPTIMIZER) == "8 threads"
    run.check()


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
